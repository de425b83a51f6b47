"""Cutting units into stages: by time first, and by time under the memory limit where the first cut does not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.costs.memory import MARGIN
from mmtrain.plan.constraints import UnitChoices
from mmtrain.plan.graph import graph_of
from mmtrain.plan.layout import Layout, MeshSize, disaggregated, unified
from mmtrain.plan.partition import BoolArray, min_max_partition
from mmtrain.plan.plan import Placement
from mmtrain.plan.pricing import DataParallel, Line, Pricing
from mmtrain.program.graph import LLM, StageGraph, block_sizes
from mmtrain.program.paces import Pace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sizing:
    """A placement with the size of every unit's mesh, still uncut.

    In `unified` all units have the same size, and its `pp` is the number of ranks of the one pipeline.
    """

    placement: Placement
    sizes: Mapping[str, MeshSize]

    @property
    def dp(self) -> DataParallel:
        """Data-parallel sizes by unit."""
        return tuple((name, size.dp) for name, size in self.sizes.items())

    def __str__(self) -> str:
        if self.placement == "unified":
            return f"unified: {next(iter(self.sizes.values()))}"
        return "disaggregated: " + ", ".join(f"{name} {size}" for name, size in self.sizes.items())


def arrange(
    sizing: Sizing, pricing: Pricing, choices: Mapping[str, UnitChoices], memory_bytes: float | None = None
) -> Layout | None:
    """Cut every unit into stages of equal time, with `memory_bytes` only into stages that fit; None if impossible."""
    num_microbatches = pricing.num_microbatches(sizing.dp)
    lines = {name: pricing.line(name, size.tp, sizing.dp) for name, size in sizing.sizes.items()}
    if sizing.placement == "unified":
        size = next(iter(sizing.sizes.values()))
        line = Line.join(list(lines.values()))
        masks = _unit_masks([len(x.seconds) for x in lines.values()], size.pp, [choices[n].pp for n in lines])
        if memory_bytes is not None:
            each = [_in_flight(size.pp, 0, name, num_microbatches) for name in lines]
            flight = np.concatenate(
                [np.tile(one, (len(x.seconds), 1)) for one, x in zip(each, lines.values(), strict=True)]
            )
            fits = _memory_mask(line, flight, memory_bytes)
            masks = [mask & fits for mask in masks]
        cuts = _best_cuts(line.seconds.tolist(), size.pp, masks)
        units = cuts and unified(pricing.shape, size, cuts, pricing.recompute)
    else:
        per_unit: dict[str, tuple[int, ...]] = {}
        for name, size in sizing.sizes.items():
            below = 0 if name == LLM else sizing.sizes[LLM].pp
            flight = np.tile(_in_flight(size.pp, below, name, num_microbatches), (len(lines[name].seconds), 1))
            mask = None if memory_bytes is None else _memory_mask(lines[name], flight, memory_bytes)
            unit_cuts = min_max_partition(lines[name].seconds.tolist(), size.pp, mask)
            if unit_cuts is None:
                return None
            per_unit[name] = unit_cuts
        units = disaggregated(sizing.sizes, per_unit, pricing.recompute)
    return Layout(sizing.placement, units, num_microbatches) if units else None


def graph_for(layout: Layout, pricing: Pricing) -> StageGraph:
    """The layout's stage graph."""
    return graph_of(layout.units, layout.num_microbatches, pricing.shape)


def _in_flight(pp: int, below: int, unit: str, num_microbatches: Mapping[str, int]) -> list[int]:
    """Microbatches of `unit` that 1F1B holds at each of `pp` pipeline ranks, with `below` more of the LLM after them.

    With none they are the LLM's own ranks, and all units there keep its time.
    """
    own, llm = block_sizes(num_microbatches[unit], num_microbatches[LLM])
    if below == 0:
        pace = Pace(own, llm, late=False)
        return [min(pace.in_flight(pp - 1 - p), num_microbatches[unit]) for p in range(pp)]
    last = -(-(llm + below - 1) // llm) * own + own  # all that the LLM holds when a block returns, and one block more
    return [min(last + pp - 1 - p, num_microbatches[unit]) for p in range(pp)]


def _memory_mask(line: Line, in_flight: IntArray, memory_bytes: float) -> BoolArray:
    """(parts, L + 1, L + 1): does part p fit with layers [lo, hi)? As `costs.memory.rank_memory` counts.

    in_flight: (L, parts) microbatches of each layer's unit that are alive if the layer lies in that part.
    """
    need = np.stack([_span_sums(line.kept_bytes * alive) for alive in in_flight.T])
    need += (_span_sums(line.state_bytes) + _span_working(line))[None]
    return np.asarray(need * (1 + MARGIN) <= memory_bytes)


def _span_sums(values: FloatArray) -> FloatArray:
    """(L + 1, L + 1) sums of [lo, hi)."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(prefix[None, :] - prefix[:, None])


def _span_working(line: Line) -> FloatArray:
    """(L + 1, L + 1) the largest layer's working bytes in [lo, hi), and the messages at both ends."""
    num_layers = len(line.working_bytes)
    working = np.zeros((num_layers + 1, num_layers + 1))
    for lo in range(num_layers):
        working[lo, lo + 1 :] = np.maximum.accumulate(line.working_bytes[lo:])
        working[lo, lo + 1 :] += line.input_bytes[lo] + line.input_bytes[lo:]
    return working


def _best_cuts(seconds: Sequence[float], parts: int, masks: Sequence[BoolArray]) -> tuple[int, ...] | None:
    """The cuts with the shortest longest part that one of the masks allows."""
    found = [cuts for mask in masks if (cuts := min_max_partition(seconds, parts, mask)) is not None]
    return min(found, key=lambda cuts: max(sum(seconds[a:b]) for a, b in pairwise(cuts)), default=None)


def _unit_masks(lengths: Sequence[int], parts: int, allowed_pp: Sequence[Sequence[int]]) -> list[BoolArray]:
    """(parts, L + 1, L + 1) each: may part p hold layers [lo, hi) when units must span the ranks they are given?

    Only a size fixed in the recipe binds. The first unit starts on the first rank, the last one ends on the last;
    a unit in the middle may start anywhere, and each start is a mask of its own.
    """
    total, bounds = sum(lengths), np.cumsum([0, *lengths])
    lo, hi = np.meshgrid(np.arange(total + 1), np.arange(total + 1), indexing="ij")
    part = np.arange(parts)[:, None, None]
    masks = [np.ones((parts, total + 1, total + 1), dtype=np.bool_)]
    for unit, (begin, end) in enumerate(pairwise(bounds.tolist())):
        if len(allowed_pp[unit]) > 1:
            continue
        span = allowed_pp[unit][0]
        starts = [0] if unit == 0 else [parts - span] if unit == len(lengths) - 1 else range(parts - span + 1)
        touches = ((lo < end) & (hi > begin))[None]
        masks = [mask & (touches == ((first <= part) & (part < first + span))) for mask in masks for first in starts]
    return masks
