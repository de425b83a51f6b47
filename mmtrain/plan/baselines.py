"""How pipelines are cut by folklore: baselines that stand in the ranking beside what the planner found.

All are `unified` plans, each at the fastest of a few sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from mmtrain.costs import Hardware
from mmtrain.costs.hardware import GIB
from mmtrain.plan.constraints import UnitChoices
from mmtrain.plan.cut import Track, tracks_of
from mmtrain.plan.fit import Fitted, fitted
from mmtrain.plan.partition import min_max_partition
from mmtrain.plan.plan import Alternative
from mmtrain.plan.pricing import Pricing
from mmtrain.plan.rate import Rater
from mmtrain.plan.search import HEAVIEST, SAME
from mmtrain.plan.sizes import Sizing, split_lane_of
from mmtrain.program.graph import LLM

LOOKED_AT = 4  # sizes of the one pipeline, those whose bounds are least
CutRule = Callable[[Track], tuple[int, ...] | None]


def megatron(track: Track) -> tuple[int, ...] | None:
    """The LLM's layers evenly over all ranks, encoders in front of the first stage, a generator behind the last."""
    begin, end = _llm(track)
    return _even(track.parts, begin, end, first=0, last=track.bounds[-1])


def megatron_extra(track: Track) -> tuple[int, ...] | None:
    """The encoders as a first stage of their own, the LLM's layers evenly over the others."""
    begin, end = _llm(track)
    if begin == 0 or track.parts < 2:
        return None
    rest = _even(track.parts - 1, begin, end, first=begin, last=track.bounds[-1])
    return None if rest is None else (0, *rest)


def balanced(track: Track) -> tuple[int, ...] | None:
    """Forward and backward of the mean microbatch as even as can be over all chunks (Optimus' baseline)."""
    return min_max_partition(track.line.seconds.tolist(), track.parts)


def equal_parameters(track: Track) -> tuple[int, ...] | None:
    """As many trained parameters in every part."""
    return min_max_partition((track.line.parameters + 1e-6).tolist(), track.parts)


def equal_layers(track: Track) -> tuple[int, ...] | None:
    """As many layers in every part."""
    return min_max_partition([1.0] * len(track.line.seconds), track.parts)


BASELINES: Mapping[str, CutRule] = {
    "megatron": megatron,
    "megatron-extra": megatron_extra,
    "balanced": balanced,
    "equal parameters": equal_parameters,
    "equal layers": equal_layers,
}


def _llm(track: Track) -> tuple[int, int]:
    at = track.units.index(LLM)
    return track.bounds[at], track.bounds[at + 1]


def _even(parts: int, begin: int, end: int, first: int, last: int) -> tuple[int, ...] | None:
    """Cut [begin, end) into parts of as many layers; the outer ones also have what lies from `first`, and to `last`."""
    if end - begin < parts:
        return None
    inner = np.linspace(begin, end, parts + 1).round().astype(int).tolist()
    return (first, *inner[1:-1], last) if all(a < b for a, b in pairwise(inner)) else None


def baselines(
    sizings: Sequence[tuple[float, Sizing]],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    fastest: float,
) -> list[Alternative]:
    """Every rule that is slower, at its fastest size of the few `unified` ones that look quickest; times are ratings.

    Sizes of one pipeline rank have nothing to cut. Rules under which nothing fits are left out.
    """
    pipelines = [s for _, s in sorted(sizings, key=lambda entry: entry[0]) if s.placement == "unified"]
    pipelines = [s for s in pipelines if s.sizes[LLM].pp > 1 and not split_lane_of(s, machine.ranks_per_node)]
    rater = Rater(pricing, machine, HEAVIEST)
    found = []
    for name, rule in BASELINES.items():
        best: tuple[float, Fitted] | None = None
        for sizing in pipelines[:LOOKED_AT]:
            (track,) = tracks_of(sizing, pricing, choices)
            cuts = rule(track)
            if cuts is None:
                continue
            rating = float(rater.rate(sizing, (track,), [(cuts,)], [None])[0])
            if best is not None and rating >= best[0]:
                continue
            fitting = fitted(sizing, pricing, (cuts,), machine, rater.alive(sizing, (cuts,)))
            if isinstance(fitting, Fitted):
                best = rating, fitting
        if best is not None and best[0] > fastest * SAME:
            found.append(_told(name, *best, fastest))
    return found


def _told(name: str, seconds: float, found: Fitted, fastest: float) -> Alternative:
    return Alternative(
        summary=f"{name} baseline, {found.layout.summary}",
        placement="unified",
        step_time_s=seconds,
        peak_memory_gib=round(max(m.total for m in found.memory.values()) / GIB, 4),
        reason=f"{seconds / fastest:.2f}x slower: cut by rule, whatever layers cost",
    )
