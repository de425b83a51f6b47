"""Cutting units into stages: even by time, where memory allows it; and the cuts near that.

A *chain* is a line of layers that is cut over pipeline ranks: in `unified` that of all units, else one unit's. Its
*parts* go round the ranks, `vpp` on each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations, islice, pairwise, product

import numpy as np
import numpy.typing as npt

from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.plan.artifact.layout import Layout, disaggregated_units, unified_units
from mmtrain.plan.artifact.plan_graph import build_stage_graph
from mmtrain.plan.estimate.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts, UnitLayerCosts
from mmtrain.plan.estimate.recompute import span_recompute
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.mesh_enumeration import MeshAssignment
from mmtrain.plan.search.min_max_partition import BoolArray, min_max_span_partition
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.schedules.builder import in_flight_microbatches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
LayerPartition = tuple[tuple[int, ...], ...]  # of each chain: the bounds of its parts

MAX_BOUNDARY_SHIFT = 3  # layers that a cut is moved away from the anchor at most
MAX_SCORED_JITTERS = 20_000  # cuts near the anchor that are scored
JITTER_SEED = 0  # of the jitters that are looked at where there are more


@dataclass(frozen=True)
class LayerChain:
    """A line of layers and the pipeline ranks it is cut over."""

    units: tuple[str, ...]
    bounds: tuple[int, ...]  # where the units' layers begin, and the end
    costs: UnitLayerCosts
    pp: int
    vpp: int
    num_microbatches: int  # of the unit that keeps time
    round_trip_s: FloatArray  # (L,) seconds at least from the first forward until one comes to the layer, and back
    masks: tuple[BoolArray, ...]  # what sizes fixed in the recipe allow; none of them: everything

    @property
    def num_chunks(self) -> int:
        """Parts the line is cut into."""
        return self.pp * self.vpp

    @cached_property
    def anchor(self) -> tuple[int, ...] | None:
        """The cut whose slowest part is done soonest, of those the evenest; None if the recipe allows none."""
        return anchor_partition(self)


def layer_chains(
    assignment: MeshAssignment, layer_costs: LayerCosts, choices: Mapping[str, UnitChoices]
) -> tuple[LayerChain, ...]:
    """What has to be cut for a assignment."""
    names, spread = list(assignment.meshes), assignment.batch_split
    lines = {n: layer_costs.unit_costs(n, s.tp, spread) for n, s in assignment.meshes.items()}
    ways = {n: _way(layer_costs, n, s.tp, assignment) for n, s in assignment.meshes.items()}
    if assignment.placement != "unified":
        return tuple(
            LayerChain(
                (n,),
                (0, len(lines[n].seconds)),
                lines[n],
                s.pp,
                s.vpp,
                assignment.num_microbatches[n],
                ways[n][:-1],
                (),
            )
            for n, s in assignment.meshes.items()
        )
    size = assignment.meshes[LLM]
    share = {
        n: assignment.num_microbatches[n] / assignment.num_microbatches[LLM] for n in names
    }  # seconds of each LLM microbatch
    reached = dict.fromkeys(names, 0.0)
    for edge in layer_costs.shape.edges:
        reached[edge.dst] = max(reached[edge.dst], reached[edge.src] + float(ways[edge.src][-1]))
    way = np.concatenate([ways[n][:-1] + reached[n] for n in names])
    bounds = np.cumsum([0, *(len(lines[n].seconds) for n in names)]).tolist()
    if size.vpp == 1:
        masks = _unit_masks(bounds, size.pp, [choices[n].pp for n in names])
    else:
        masks = _whole_masks(bounds, size.pp * size.vpp, [choices[n].is_whole for n in names])
    line = _join([lines[n] for n in names], [share[n] for n in names])
    return (
        LayerChain(tuple(names), tuple(bounds), line, size.pp, size.vpp, assignment.num_microbatches[LLM], way, masks),
    )


def chain_time_lower_bound(chain: LayerChain) -> float:
    """Seconds that no cut of the chain can beat, whatever the schedule.

    Some part works for all microbatches, and no sooner than the first has come down to it; its last backward still
    has to travel up. The least of the largest such sum is found exactly.
    """
    seconds, num = chain.costs.seconds, chain.num_microbatches
    work = num * max(seconds.sum() / chain.pp, seconds.max())
    if chain.vpp > 1 or chain.anchor is None:
        return float(work)
    return max(float(work), _longest(chain, chain.anchor))


def anchor_partition(chain: LayerChain, fits: FloatArray | None = None) -> tuple[int, ...] | None:
    """Cut a chain so that the slowest part is done soonest, with all its work and the way to it; None if impossible.

    fits: (parts, L + 1, L + 1) seconds of recomputation that part p with layers [lo, hi) needs to fit, or infinity.
    """
    seconds = chain.costs.seconds
    if not 1 <= chain.num_chunks <= len(seconds):
        return None
    segment = _span_sums(seconds)[None] * chain.num_microbatches
    if fits is not None:
        segment = segment + fits * chain.num_microbatches
    if chain.vpp == 1:  # interleaved parts take turns: there only work counts
        segment = segment + np.append(chain.round_trip_s, 0.0)[None, :, None]
    found = [min_max_span_partition(segment, chain.num_chunks, mask) for mask in chain.masks or (None,)]
    ways = [cuts for cuts in found if cuts is not None]
    return min(ways, key=lambda cuts: _longest(chain, cuts), default=None)


def jittered_partitions(
    chain: LayerChain, around: tuple[int, ...], limit: int, extra: FloatArray | None = None
) -> list[tuple[int, ...]]:
    """At most `limit` cuts near one, that one first, by how uneven their parts are and how much crosses between them.

    Each boundary moves by up to `MAX_BOUNDARY_SHIFT` layers (OmniBal's jitter); both terms of the score are divided by
    their mean.
    `extra`: seconds that parts take besides, as in `anchor_partition`.
    """
    if chain.num_chunks == 1:
        return [around]
    moved = np.array(list(islice(_moves(len(around) - 2), MAX_SCORED_JITTERS)), dtype=np.int64).reshape(
        -1, len(around) - 2
    )
    cuts = np.unique(np.asarray(around)[None, 1:-1] + moved, axis=0)
    full = np.concatenate([np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), around[-1])], axis=1)
    full = full[(np.diff(full, axis=1) > 0).all(axis=1) & _allowed(chain, full)]
    seconds = chunk_seconds(chain, full, extra)
    ranked = np.isfinite(seconds).all(axis=1)
    full, seconds = full[ranked], seconds[ranked]
    if not len(full):
        return []
    volume = chain.costs.input_bytes[full[:, 1:-1]].sum(axis=1)
    spread = seconds.var(axis=1)
    score = spread / max(spread.mean(), 1e-30) + volume / max(volume.mean(), 1e-30)
    score[(full == np.asarray(around)).all(axis=1)] = -1.0
    return [tuple(row) for row in full[np.argsort(score, kind="stable")[:limit]].tolist()]


def is_partition_allowed(chain: LayerChain, cuts: tuple[int, ...]) -> bool:
    """Whether sizes fixed in the recipe allow a cut."""
    return bool(_allowed(chain, np.asarray([cuts]))[0])


def all_chain_partitions(chain: LayerChain) -> list[tuple[int, ...]]:
    """All ways to cut a chain that the recipe allows."""
    length = len(chain.costs.seconds)
    cuts = np.array(
        [(0, *inner, length) for inner in combinations(range(1, length), chain.num_chunks - 1)], dtype=np.int64
    )
    return [tuple(row) for row in cuts[_allowed(chain, cuts)].tolist()] if len(cuts) else []


def chunk_seconds(chain: LayerChain, cuts: IntArray, extra: FloatArray | None = None) -> FloatArray:
    """(n, parts) mean seconds of each part under each of n cuts."""
    prefix = np.concatenate([[0.0], np.cumsum(chain.costs.seconds)])
    seconds = np.diff(prefix[cuts], axis=1)
    return seconds if extra is None else seconds + extra[np.arange(chain.num_chunks), cuts[:, :-1], cuts[:, 1:]]


def partitioned_layout(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    cuts: LayerPartition,
    recompute: Mapping[str, frozenset[int]] | None = None,
) -> Layout:
    """The layout with these cuts, and with these layers recomputed besides those that the recipe names."""
    again = {
        unit.name: frozenset(range(len(unit.layers))) if layer_costs.recompute[unit.name] == "all" else frozenset[int]()
        for unit in layer_costs.shape.units
    } | dict(recompute or {})
    if assignment.placement == "unified":
        units = unified_units(layer_costs.shape, assignment.meshes[LLM], cuts[0], again)
    else:
        units = disaggregated_units(assignment.meshes, dict(zip(assignment.meshes, cuts, strict=True)), again)
    sliced = {n: u.model_copy(update={"sp": True}) for n, u in units.items() if layer_costs.has_sp(n, u.tp)}
    return Layout(assignment.placement, units | sliced, dict(assignment.num_microbatches))


def anchor_layout(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    memory_bytes: float | None = None,
) -> Layout | None:
    """Cut every unit into stages of equal time, with `memory_bytes` only into stages that fit; None if impossible."""
    chains = layer_chains(assignment, layer_costs, choices)
    cuts = tuple(chain.anchor for chain in chains)
    if any(c is None for c in cuts):
        return None
    layout = partitioned_layout(assignment, layer_costs, tuple(c for c in cuts if c is not None))
    if memory_bytes is None:
        return layout
    alive = in_flight_microbatches(layout_graph(layout, layer_costs))
    fits = [
        anchor_partition(chain, recompute_to_fit(chain, in_flight_by_chunk(chain, alive), memory_bytes))
        for chain in chains
    ]
    return (
        None
        if any(c is None for c in fits)
        else partitioned_layout(assignment, layer_costs, tuple(c for c in fits if c is not None))
    )


def layout_graph(layout: Layout, layer_costs: LayerCosts) -> StageGraph:
    """The layout's stage graph."""
    return build_stage_graph(layout.units, layout.num_microbatches, layer_costs.shape)


def recompute_to_fit(chain: LayerChain, alive: IntArray, memory_bytes: float) -> FloatArray:
    """(parts, L + 1, L + 1) seconds of recomputation that part p with layers [lo, hi) needs to fit; infinite: never.

    alive: (L, parts) microbatches of each layer's unit that are alive if the layer lies in that part. With several
    parts on a rank each may take its share of the memory.
    """
    line, limit = chain.costs, memory_bytes / (1 + MEMORY_MARGIN) / chain.vpp
    held = _span_sums((line.kept_bytes[:, None] * alive).T) + _span_sums(line.state_bytes) - limit
    plain = held + _span_working(line.working_bytes, line.input_bytes) / chain.vpp
    found = np.where(plain <= 0, 0.0, np.inf)
    saved = line.saved_bytes[:, None] * alive
    held += _span_working(line.working_again, line.input_bytes) / chain.vpp
    # Few spans are left that need some recomputation, and fit with it.
    part, lo, hi = np.nonzero((plain > 0) & (held <= _span_sums(saved.T)) & ~np.tri(len(saved) + 1, dtype=np.bool_))
    lots = np.flatnonzero(np.bincount(line.kind))
    first = np.array([int(np.flatnonzero(line.kind == k)[0]) for k in lots])
    before = np.concatenate([np.zeros((1, len(lots))), np.cumsum(line.kind[:, None] == lots, axis=0)])
    found[part, lo, hi] = span_recompute(
        saved[first].T[part], line.again[first], before[hi] - before[lo], held[part, lo, hi]
    )
    return found


def in_flight_by_chunk(chain: LayerChain, alive: Mapping[StageId, int]) -> IntArray:
    """(L, parts) microbatches of each layer's unit that are alive if the layer lies in that part.

    As the program of the anchor says; where the unit has no layers in a part, as in the nearest that has.
    """
    assert chain.anchor is not None
    found = np.zeros((len(chain.costs.seconds), chain.num_chunks), dtype=np.int64)
    for unit, (begin, end) in zip(chain.units, pairwise(chain.bounds), strict=True):
        first = int(np.searchsorted(chain.anchor, begin, side="right")) - 1
        own = {first + sid.index: count for sid, count in alive.items() if sid.unit == unit}
        for part in range(chain.num_chunks):
            nearest = min(own, key=lambda at: (abs(at - part), at))
            found[begin:end, part] = own[nearest]
    return found


def _way(layer_costs: LayerCosts, unit: str, tp: int, assignment: MeshAssignment) -> FloatArray:
    """(L + 1,) the least seconds through a unit's layers [0, l), down and back, mean over the batches."""
    prices = layer_costs.unit_times(unit, tp, assignment.batch_split)
    least = prices.by_kind.min(axis=(3, 4)).mean(axis=2)
    per_layer = least[:, FORWARD] + least[:, BACKWARD]
    if layer_costs.recompute[unit] == "all":
        per_layer = per_layer + least[:, RECOMPUTE]
    return np.concatenate([[0.0], np.cumsum(per_layer[prices.kind])])


def _join(lines: Sequence[UnitLayerCosts], share: Sequence[float]) -> UnitLayerCosts:
    """All units' layers one after another, in seconds of each LLM microbatch; kinds stay apart."""
    first_kind = np.cumsum([0, *(int(line.kind.max()) + 1 for line in lines)])
    columns = {f.name: np.concatenate([getattr(line, f.name) for line in lines]) for f in fields(UnitLayerCosts)}
    columns["seconds"] = np.concatenate([line.seconds * s for line, s in zip(lines, share, strict=True)])
    columns["again"] = np.concatenate([line.again * s for line, s in zip(lines, share, strict=True)])
    columns["kind"] = np.concatenate([line.kind + k for line, k in zip(lines, first_kind[:-1], strict=True)])
    return UnitLayerCosts(**columns)


def _longest(chain: LayerChain, cuts: tuple[int, ...]) -> float:
    """Seconds until the slowest part of a cut is done, at least."""
    work = chunk_seconds(chain, np.asarray([cuts]))[0] * chain.num_microbatches
    return float((work + chain.round_trip_s[list(cuts[:-1])]).max())


def _moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    """Moves of all cuts, all of them if they are few, else those of one and two neighbours and then random ones."""
    steps = range(-MAX_BOUNDARY_SHIFT, MAX_BOUNDARY_SHIFT + 1)
    if len(steps) ** num_cuts <= MAX_SCORED_JITTERS:
        yield from product(steps, repeat=num_cuts)
        return
    still = (0,) * num_cuts
    yield still
    for at in range(num_cuts):
        for step in steps:
            yield (*still[:at], step, *still[at + 1 :])
            if at + 1 < num_cuts:
                yield from ((*still[:at], step, other, *still[at + 2 :]) for other in (-1, 1))
    rng = np.random.default_rng(JITTER_SEED)
    for _ in range(MAX_SCORED_JITTERS // 10):
        yield tuple(rng.integers(-1, 2, num_cuts).tolist())


def _allowed(chain: LayerChain, cuts: IntArray) -> BoolArray:
    """(n,) whether sizes fixed in the recipe allow a cut."""
    if not chain.masks:
        return np.ones(len(cuts), dtype=np.bool_)
    each = [mask[np.arange(chain.num_chunks), cuts[:, :-1], cuts[:, 1:]].all(axis=1) for mask in chain.masks]
    return np.asarray(np.any(each, axis=0))


def _span_sums(values: FloatArray) -> FloatArray:
    """(..., L + 1, L + 1) sums of [lo, hi), of values (..., L)."""
    prefix = np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)
    return np.asarray(prefix[..., None, :] - prefix[..., :, None])


def _span_working(working: FloatArray, inputs: FloatArray) -> FloatArray:
    """(L + 1, L + 1) the largest layer's working bytes in [lo, hi), and the messages at both ends."""
    num_layers = len(working)
    found = np.zeros((num_layers + 1, num_layers + 1))
    for lo in range(num_layers):
        found[lo, lo + 1 :] = np.maximum.accumulate(working[lo:])
        found[lo, lo + 1 :] += inputs[lo] + inputs[lo:]
    return found


def _whole_masks(bounds: Sequence[int], parts: int, whole: Sequence[bool]) -> tuple[BoolArray, ...]:
    """The same of interleaved parts, where some units lie in one of them."""
    lo, hi = np.meshgrid(np.arange(bounds[-1] + 1), np.arange(bounds[-1] + 1), indexing="ij")
    mask = np.ones(lo.shape, dtype=np.bool_)
    for is_whole, (begin, end) in zip(whole, pairwise(bounds), strict=True):
        if is_whole:
            mask &= (lo >= end) | (hi <= begin) | ((lo <= begin) & (hi >= end))
    return () if mask.all() else (np.broadcast_to(mask, (parts, *mask.shape)),)


def _unit_masks(bounds: Sequence[int], parts: int, allowed_pp: Sequence[Sequence[int]]) -> tuple[BoolArray, ...]:
    """(parts, L + 1, L + 1) each: may part p hold layers [lo, hi) when units must span the ranks they are given?

    Only a size fixed in the recipe binds; none means that all cuts are allowed. The first unit starts on the first
    rank, the last one ends on the last; a unit in the middle may start anywhere, and each start is a mask of its own.
    """
    if all(len(sizes) > 1 for sizes in allowed_pp):
        return ()
    total, last = bounds[-1], len(bounds) - 2
    lo, hi = np.meshgrid(np.arange(total + 1), np.arange(total + 1), indexing="ij")
    part = np.arange(parts)[:, None, None]
    masks = [np.ones((parts, total + 1, total + 1), dtype=np.bool_)]
    for unit, (begin, end) in enumerate(pairwise(bounds)):
        if len(allowed_pp[unit]) > 1:
            continue
        span = allowed_pp[unit][0]
        starts = [0] if unit == 0 else [parts - span] if unit == last else range(parts - span + 1)
        touches = ((lo < end) & (hi > begin))[None]
        masks = [mask & (touches == ((first <= part) & (part < first + span))) for mask in masks for first in starts]
    return tuple(masks)
