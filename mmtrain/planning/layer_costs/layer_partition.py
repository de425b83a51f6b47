"""How layers are divided into stages: evenly by time where memory allows it, and partitions near that.

A *layer chain* is a line of layers that is divided over pipeline ranks: in `unified` the layers of all units, else
those of one unit. Its *model chunks* go round the pipeline ranks, `vpp` on each. The *anchor* is the partition whose
slowest chunk is done soonest; partitions near it are found by moving its boundaries (OmniBal's jitter, arXiv
2407.20761).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import combinations, islice, pairwise, product

import numpy as np
import numpy.typing as npt

from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.planning.artifact.layout import Layout, MeshSize, disaggregated_units, replicated_units, unified_units
from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.planning.layer_costs.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts, UnitLayerCosts
from mmtrain.planning.layer_costs.min_max_partition import (
    OPTIMUM_TOLERANCE,
    BoolArray,
    band,
    longest_span_within,
    min_max_band_partition,
    min_max_span_partition,
    spans_of_partitions,
)
from mmtrain.planning.layer_costs.sampled_loads import LoadSplit, load_split
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute, prefix_sums
from mmtrain.planning.space.budget import DEFAULT_BUDGET, PartitionBudget
from mmtrain.planning.space.candidate import LayerPartition, MeshAssignment
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.schedules.builder import in_flight_microbatches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ChainPartition = tuple[int, ...]  # bounds of the chunks of one chain, from 0 to its number of layers
# What the chain of one unit depends on: its name, mesh, microbatches, and what decides about its loads.
ChainKey = tuple[str, MeshSize, int, LoadSplit]


@dataclass(frozen=True, eq=False)
class LayerChain:
    """A line of layers and the pipeline ranks that it is divided over."""

    units: tuple[str, ...]
    bounds: tuple[int, ...]  # where the units' layers start, and the end
    costs: UnitLayerCosts  # of one microbatch of the LLM where units share the chain
    pp: int
    vpp: int
    num_microbatches: int  # of the unit whose microbatches the pipeline runs
    # (L + 1,) least seconds from the first forward until one reaches the layer, and back; the last: through all layers.
    round_trip_s: FloatArray
    # (1 or chunks, L + 1, L + 1) alternatives of what sizes fixed in the recipe allow; empty: everything.
    masks: tuple[BoolArray, ...]

    @property
    def num_chunks(self) -> int:
        """Model chunks that the chain is divided into."""
        return self.pp * self.vpp

    @cached_property
    def anchor(self) -> ChainPartition | None:
        """The partition whose slowest chunk is done soonest, of those the most even; None if the recipe allows none."""
        return anchor_partition(self)

    @cached_property
    def has_partition(self) -> bool:
        """Whether the recipe allows any partition; where it leaves all open, no partition is sought for that."""
        return self.anchor is not None if self.masks else 1 <= self.num_chunks <= len(self.costs.seconds)

    def recompute_to_fit(self, num_in_flight: IntArray, memory_bytes: float) -> SpanRecompute:
        """Return what `recompute_to_fit` does; mesh assignments that share a chain mostly ask for the same."""
        key = memory_bytes, num_in_flight[list(self.bounds[:-1])].tobytes()  # the same for all layers of a unit
        if key not in self._recompute:
            self._recompute[key] = recompute_to_fit(self, num_in_flight, memory_bytes)
        return self._recompute[key]

    def anchor_within(self, recompute: SpanRecompute | None) -> ChainPartition | None:
        """Return the anchor of chunks that recompute what they must to fit, see `anchor_partition`."""
        if recompute is None:
            return self.anchor
        if recompute not in self._anchors_within:
            self._anchors_within[recompute] = anchor_partition(self, recompute)
        return self._anchors_within[recompute]

    @cached_property
    def _recompute(self) -> dict[tuple[float, bytes], SpanRecompute]:
        """Cache of `recompute_to_fit`, by bytes of memory and microbatches in flight."""
        return {}

    @cached_property
    def _anchors_within(self) -> dict[SpanRecompute, ChainPartition | None]:
        """Cache of `anchor_within`."""
        return {}


@dataclass(frozen=True)
class KnownChains:
    """What chains of several mesh assignments share: many of these differ in one unit's mesh, or in pp and vpp."""

    of_units: dict[ChainKey, LayerChain] = field(default_factory=dict)
    # Of all units in `unified`, by their tensor-parallel sizes and the split.
    joined_costs: dict[tuple[object, ...], UnitLayerCosts] = field(default_factory=dict)


def layer_chains(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    known: KnownChains | None = None,
) -> tuple[LayerChain, ...]:
    """Return the chains that a mesh assignment divides: one of all units in `unified`, else one for each unit.

    known: of other assignments, which this one's join.
    """
    known = KnownChains() if known is None else known
    if assignment.placement == "unified":
        return (_unified_chain(assignment, layer_costs, choices, known),)
    return tuple(_unit_chain(unit, assignment, layer_costs, choices, known) for unit in assignment.meshes)


def _unit_chain(
    unit: str,
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    known: KnownChains,
) -> LayerChain:
    """Return the chain of a unit with a pipeline of its own."""
    mesh, split, num_microbatches = assignment.meshes[unit], assignment.batch_split, assignment.num_microbatches[unit]
    key = (unit, mesh, num_microbatches, load_split(unit, split))
    if key not in known.of_units:
        costs = layer_costs.unit_costs(unit, mesh.tp, split)
        known.of_units[key] = LayerChain(
            units=(unit,),
            bounds=(0, len(costs.seconds)),
            costs=costs,
            pp=mesh.pp,
            vpp=mesh.vpp,
            num_microbatches=num_microbatches,
            round_trip_s=_round_trip_seconds(layer_costs, unit, mesh.tp, assignment),
            masks=division_masks(len(costs.seconds), choices[unit].layers_per_chunk),
        )
    return known.of_units[key]


def _unified_chain(
    assignment: MeshAssignment, layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], known: KnownChains
) -> LayerChain:
    """Return the chain of all units in one pipeline."""
    units, mesh = list(assignment.meshes), assignment.meshes[LLM]
    tp, num_microbatches, split = _tp_sizes(assignment), assignment.num_microbatches, assignment.batch_split
    costs = {unit: layer_costs.unit_costs(unit, tp[unit], split) for unit in units}
    round_trips = {unit: _round_trip_seconds(layer_costs, unit, tp[unit], assignment) for unit in units}
    joined_key = (*tp.items(), *split)
    if joined_key not in known.joined_costs:
        per_llm_microbatch = [num_microbatches[unit] / num_microbatches[LLM] for unit in units]
        known.joined_costs[joined_key] = _join_costs([costs[unit] for unit in units], per_llm_microbatch)
    start_s = dict.fromkeys(units, 0.0)  # of the longest way through the units before
    for edge in layer_costs.shape.edges:
        start_s[edge.dst] = max(start_s[edge.dst], start_s[edge.src] + float(round_trips[edge.src][-1]))
    bounds = np.cumsum([0, *(len(costs[unit].seconds) for unit in units)]).tolist()
    spans = [choices[unit].spanned_chunks(mesh) for unit in units]
    is_whole = [choices[unit].is_whole for unit in units]
    if mesh.vpp > 1 and all(span is None or whole for span, whole in zip(spans, is_whole, strict=True)):
        masks = _whole_unit_masks(bounds, is_whole)
    else:
        masks = _fixed_span_masks(bounds, mesh.pp * mesh.vpp, spans)
    divisions = [choices[unit].layers_per_chunk for unit in units]
    masks = _with_divisions(masks, bounds, mesh.pp * mesh.vpp, divisions)
    return LayerChain(
        units=tuple(units),
        bounds=tuple(bounds),
        costs=known.joined_costs[joined_key],
        pp=mesh.pp,
        vpp=mesh.vpp,
        num_microbatches=num_microbatches[LLM],
        round_trip_s=np.concatenate(
            [
                *(round_trips[unit][:-1] + start_s[unit] for unit in units),
                [max(round_trips[unit][-1] + start_s[unit] for unit in units)],
            ]
        ),
        masks=masks,
    )


def _tp_sizes(assignment: MeshAssignment) -> dict[str, int]:
    """Return the tensor-parallel size of each unit."""
    return {unit: mesh.tp for unit, mesh in assignment.meshes.items()}


def chain_time_lower_bound(chain: LayerChain) -> float:
    """Return seconds that no partition of the chain can beat under any schedule.

    The least possible value of what the slowest chunk asks for (`_step_seconds_of_spans`) is found exactly.
    """
    seconds = chain.costs.seconds
    work = chain.num_microbatches * max(seconds.sum() / chain.pp, seconds.max())
    if chain.vpp > 1 or chain.anchor is None:
        return float(work)
    return max(float(work), _slowest_chunk_seconds(chain, chain.anchor))


def partition_time_lower_bound(
    chain: LayerChain, partition: ChainPartition, recompute: SpanRecompute | None = None
) -> float:
    """Return the seconds that a step takes at least under a partition.

    Either the slowest chunk decides, with the way to it and back, or the rank that computes most.
    recompute: what chunks recompute to fit into memory. Infinite where one of them alone does not fit.
    """
    chunks, lo, hi = np.arange(chain.num_chunks), np.asarray(partition[:-1]), np.asarray(partition[1:])
    recompute_s = None if recompute is None else recompute.seconds(chunks, lo, hi)
    work_s = _work_seconds(chain, lo, hi, recompute_s).reshape(chain.vpp, chain.pp).sum(axis=0)
    return float(max(_step_seconds(chain, lo, hi, recompute_s).max(), chain.num_microbatches * work_s.max()))


def anchor_partition(chain: LayerChain, recompute: SpanRecompute | None = None) -> ChainPartition | None:
    """Divide a chain so that the chunk that asks for the longest step asks for least, and otherwise most evenly.

    recompute: what chunks must recompute to fit into memory. Returns None if no partition is allowed and fits.
    """
    if not 1 <= chain.num_chunks <= len(chain.costs.seconds):
        return None
    best_of_masks = [
        _anchor_without_limit(chain, mask) if recompute is None else _anchor_that_fits(chain, recompute, mask)
        for mask in chain.masks or (None,)
    ]
    partitions = [partition for partition in best_of_masks if partition is not None]
    return min(partitions, key=lambda partition: _slowest_chunk_seconds(chain, partition), default=None)


def _anchor_without_limit(chain: LayerChain, mask: BoolArray | None) -> ChainPartition | None:
    """Return the anchor of the partitions that a mask allows, whether or not it fits into memory."""
    lo, hi = _all_spans(chain)
    step_s, work_s = _step_seconds(chain, lo, hi), _work_seconds(chain, lo, hi, None)
    # Where one chunk decides, the others are to have equal work: with the way to them counted, later ones would get
    # less, and the first ones recompute more than all need together.
    return min_max_span_partition(step_s[None], chain.num_chunks, mask, work_s[None])


def _anchor_that_fits(chain: LayerChain, recompute: SpanRecompute, mask: BoolArray | None) -> ChainPartition | None:
    """Return the anchor under a limit of memory, of the partitions that a mask allows.

    Only spans are looked at that fit, that alone take no longer than the anchor without that limit would, and that such
    spans before and behind them complete to a partition.
    """
    if chain.anchor is None:
        return None
    chunks, lo, hi = np.arange(chain.num_chunks), np.asarray(chain.anchor[:-1]), np.asarray(chain.anchor[1:])
    limit_s = np.inf
    if len(chain.masks) <= 1:  # else the anchor may be one that another mask allows
        limit_s = float(_step_seconds(chain, lo, hi, recompute.seconds(chunks, lo, hi)).max())
    lo, hi = _all_spans(chain)
    least_s = np.where((lo < hi) & recompute.may_fit(), _step_seconds(chain, lo, hi), np.inf)
    is_open = np.isfinite(least_s) & (least_s <= limit_s * (1 + OPTIMUM_TOLERANCE))
    is_open = is_open[None] if mask is None else is_open & mask
    lo, hi = band(chain.bounds[-1], longest_span_within(np.where(is_open, least_s, np.inf), limit_s))
    starts = np.maximum(lo, 0)
    is_part = np.stack(list(spans_of_partitions((lo >= 0) & is_open[:, starts, hi], chain.num_chunks)))
    chunk, last, column = np.nonzero(is_part)
    first = starts[last, column]
    recompute_s = recompute.seconds(chunk, first, last)
    step_s, work_s = (np.full(is_part.shape, np.inf) for _ in range(2))
    step_s[is_part] = _step_seconds(chain, first, last, recompute_s)
    work_s[is_part] = _work_seconds(chain, first, last, recompute_s)
    return min_max_band_partition(step_s, chain.num_chunks, work_s)


def jittered_partitions(
    chain: LayerChain,
    around: ChainPartition,
    recompute: SpanRecompute | None = None,
    budget: PartitionBudget = DEFAULT_BUDGET.partitions,
) -> list[ChainPartition]:
    """Return partitions near `around`, that one first, ordered by how uneven chunks are and how much crosses them.

    Each boundary moves by up to `max_boundary_shift` layers; both terms of the score are divided by their mean.
    recompute: see `anchor_partition`.
    """
    if chain.num_chunks == 1:
        return [around]
    inner = np.asarray(around)[None, 1:-1] + _sorted_shifts(len(around) - 2, budget)
    first = np.zeros((len(inner), 1), np.int64)
    last = np.full((len(inner), 1), around[-1])
    partitions = np.concatenate([first, inner, last], axis=1)
    partitions = partitions[(np.diff(partitions, axis=1) > 0).all(axis=1)]  # no bound lies outside of the layers
    partitions = partitions[_allowed(chain, partitions)]
    seconds = chunk_seconds(chain, partitions, recompute)
    can_fit = np.isfinite(seconds).all(axis=1)
    partitions, seconds = partitions[can_fit], seconds[can_fit]
    if not len(partitions):
        return []
    volume = chain.costs.input_bytes[partitions[:, 1:-1]].sum(axis=1)
    variance = seconds.var(axis=1)
    score = variance / max(variance.mean(), 1e-30) + volume / max(volume.mean(), 1e-30)
    score[(partitions == np.asarray(around)).all(axis=1)] = -1.0
    best = np.argsort(score, kind="stable")[: budget.max_jitters_per_assignment]
    return [tuple(row) for row in partitions[best].tolist()]


def is_partition_allowed(chain: LayerChain, partition: ChainPartition) -> bool:
    """Return whether sizes fixed in the recipe allow a partition."""
    return bool(_allowed(chain, np.asarray([partition]))[0])


def all_chain_partitions(chain: LayerChain) -> list[ChainPartition]:
    """List every partition of a chain that the recipe allows."""
    length = len(chain.costs.seconds)
    inner_bounds = combinations(range(1, length), chain.num_chunks - 1)
    partitions = np.array([(0, *inner, length) for inner in inner_bounds], dtype=np.int64)
    return [tuple(row) for row in partitions[_allowed(chain, partitions)].tolist()] if len(partitions) else []


def chunk_seconds(chain: LayerChain, partitions: IntArray, recompute: SpanRecompute | None = None) -> FloatArray:
    """Return (n, chunks) mean seconds of each chunk under each of n partitions, (n, chunks + 1)."""
    prefix = np.concatenate([[0.0], np.cumsum(chain.costs.seconds)])
    seconds = np.diff(prefix[partitions], axis=1)
    return seconds if recompute is None else seconds + recompute.of_partitions(partitions)


def partitioned_layout(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    partition: LayerPartition,
    recompute: Mapping[str, frozenset[int]] | None = None,
) -> Layout:
    """Return which ranks hold which layers; `recompute` adds layers to those that the recipe has recomputed."""
    recomputed = {
        unit.name: frozenset(range(len(unit.layers))) if layer_costs.recompute[unit.name] == "all" else frozenset[int]()
        for unit in layer_costs.shape.units
    }
    recomputed |= dict(recompute or {})
    if assignment.placement == "unified":
        llm = assignment.meshes[LLM]
        units = unified_units(layer_costs.shape, llm, partition[0], recomputed, _tp_sizes(assignment))
    elif assignment.placement == "replicated":
        llm, dispatch, exchange = assignment.meshes[LLM], assignment.dispatch, assignment.exchange
        shard, keeps_weights = assignment.shard, assignment.keeps_weights
        units = replicated_units(layer_costs.shape, llm, shard, dispatch, exchange, recomputed, keeps_weights)
    else:
        partition_of_unit = dict(zip(assignment.meshes, partition, strict=True))
        units = disaggregated_units(assignment.meshes, partition_of_unit, recomputed)
    units = {name: with_settings(name, unit, layer_costs) for name, unit in units.items()}
    return Layout(assignment.placement, units, dict(assignment.num_microbatches), assignment.encoder_first)


def with_settings(name: str, unit: UnitPlan, layer_costs: LayerCosts) -> UnitPlan:
    """Return the unit's plan with the way in which its TP groups divide tokens, and replicas their gradients."""
    split = layer_costs.token_split(name, unit.tp)
    settings = {"sp": split.sp, "tp_chunks": split.chunks, "bucket_parameters": layer_costs.bucket_parameters}
    return unit.model_copy(update=settings)


def anchored_partition(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    memory_bytes: float | None = None,
) -> LayerPartition | None:
    """Divide every chain at its anchor, with `memory_bytes` into chunks that fit; None if that is impossible."""
    chains = layer_chains(assignment, layer_costs, choices)
    anchors = [chain.anchor for chain in chains if chain.anchor is not None]
    if len(anchors) < len(chains):
        return None
    if memory_bytes is None:
        return tuple(anchors)
    layout = partitioned_layout(assignment, layer_costs, tuple(anchors))
    num_in_flight = in_flight_microbatches(layout_graph(layout, layer_costs))
    fitting = []
    for chain in chains:
        recompute = chain.recompute_to_fit(in_flight_by_chunk(chain, num_in_flight), memory_bytes)
        partition = chain.anchor_within(recompute)
        if partition is None:
            return None
        fitting.append(partition)
    return tuple(fitting)


def layout_graph(layout: Layout, layer_costs: LayerCosts) -> StageGraph:
    """Return the layout's stage graph."""
    return build_stage_graph(layout.units, layout.num_microbatches, layer_costs.shape, layout.encoder_first)


def recompute_to_fit(chain: LayerChain, num_in_flight: IntArray, memory_bytes: float) -> SpanRecompute:
    """Return what recomputes as much of every span of layers as a chunk needs to fit into memory.

    num_in_flight: (L, chunks) from `in_flight_by_chunk`. With several chunks on a rank, each may take its share of the
    memory.
    """
    costs = chain.costs
    kinds = np.flatnonzero(np.bincount(costs.kind))
    first_of_kind = np.array([int(np.flatnonzero(costs.kind == kind)[0]) for kind in kinds])
    saved = costs.saved_bytes[:, None] * num_in_flight
    return SpanRecompute(
        limit_bytes=memory_bytes / (1 + MEMORY_MARGIN) / chain.vpp,
        kept_until=prefix_sums((costs.kept_bytes[:, None] * num_in_flight).T),
        saved_until=prefix_sums(saved.T),
        state_until=prefix_sums(costs.state_bytes),
        working=costs.span_working,
        recompute_working=costs.span_recompute_working,
        vpp=chain.vpp,
        saved_of_kind=saved[first_of_kind].T,
        seconds_of_kind=costs.recompute_seconds[first_of_kind],
        num_of_kind_until=prefix_sums((costs.kind[:, None] == kinds).T.astype(np.float64)).T,
    )


def in_flight_by_chunk(chain: LayerChain, num_in_flight: Mapping[StageId, int]) -> IntArray:
    """Return (L, chunks) microbatches of each layer's unit that are in flight if the layer lies in that chunk.

    num_in_flight: of the anchor's stages. Where a unit has no layer in a chunk, the nearest chunk that has one counts.
    """
    assert chain.anchor is not None
    table = np.zeros((len(chain.costs.seconds), chain.num_chunks), dtype=np.int64)
    for unit, (start, end) in zip(chain.units, pairwise(chain.bounds), strict=True):
        first_chunk = int(np.searchsorted(chain.anchor, start, side="right")) - 1
        of_unit = sorted((stage.index, count) for stage, count in num_in_flight.items() if stage.unit == unit)
        index, count_of_stage = np.array(of_unit, dtype=np.int64).T
        distance = np.abs(first_chunk + index[:, None] - np.arange(chain.num_chunks))
        table[start:end] = count_of_stage[distance.argmin(axis=0)]  # of two as near, the first
    return table


def _round_trip_seconds(layer_costs: LayerCosts, unit: str, tp: int, assignment: MeshAssignment) -> FloatArray:
    """Return (L + 1,) the least seconds through a unit's layers [0, l), down and back, mean over the batches."""
    times = layer_costs.unit_times(unit, tp, assignment.batch_split)
    shortest_s = times.by_kind.min(axis=(3, 4)).mean(axis=2)
    per_layer = shortest_s[:, FORWARD] + shortest_s[:, BACKWARD]
    if layer_costs.recompute[unit] == "all":
        per_layer = per_layer + shortest_s[:, RECOMPUTE]
    return np.concatenate([[0.0], np.cumsum(per_layer[times.kind])])


def _join_costs(units: Sequence[UnitLayerCosts], per_llm_microbatch: Sequence[float]) -> UnitLayerCosts:
    """Return all units' layers one after another, in seconds of each LLM microbatch; kinds stay apart."""
    first_kind = np.cumsum([0, *(int(costs.kind.max()) + 1 for costs in units)])
    columns = {f.name: np.concatenate([getattr(costs, f.name) for costs in units]) for f in fields(UnitLayerCosts)}
    scaled = list(zip(units, per_llm_microbatch, strict=True))
    columns["seconds"] = np.concatenate([costs.seconds * share for costs, share in scaled])
    columns["recompute_seconds"] = np.concatenate([costs.recompute_seconds * share for costs, share in scaled])
    columns["kind"] = np.concatenate([costs.kind + k for costs, k in zip(units, first_kind[:-1], strict=True)])
    return UnitLayerCosts(**columns)


def _all_spans(chain: LayerChain) -> tuple[IntArray, IntArray]:
    """Return lo and hi, (L + 1, L + 1) both, of all spans of a chain's layers."""
    lo, hi = np.indices((chain.bounds[-1] + 1,) * 2)
    return lo, hi


def _work_seconds(chain: LayerChain, lo: IntArray, hi: IntArray, recompute_s: FloatArray | None) -> FloatArray:
    """Return the seconds of one microbatch in chunks that hold layers [lo, hi)."""
    until = prefix_sums(chain.costs.seconds)
    work = until[hi] - until[lo]
    return np.asarray(work if recompute_s is None else work + recompute_s)


def _step_seconds(chain: LayerChain, lo: IntArray, hi: IntArray, recompute_s: FloatArray | None = None) -> FloatArray:
    """Return the least seconds of a step in which a chunk holds layers [lo, hi).

    A chunk works for all microbatches, starts no sooner than the first has come down to it, and its last backward still
    has to travel up. Besides, its first backward waits until the first microbatch has come down to the end and back,
    and then all backwards follow; likewise all forwards come before the last microbatch's way to the end and back.
    Interleaved chunks take turns on a rank, so there only their work counts.

    recompute_s: seconds of recomputation of a microbatch in these chunks.
    """
    n, until, backward_until = (
        chain.num_microbatches,
        prefix_sums(chain.costs.seconds),
        prefix_sums(chain.costs.backward_seconds),
    )
    backward_s = backward_until[hi] - backward_until[lo]
    forward_s = until[hi] - until[lo] - backward_s
    if recompute_s is not None:
        backward_s = backward_s + recompute_s
    work_s = n * (forward_s + backward_s)
    if chain.vpp > 1:
        return np.asarray(work_s)
    reached_s = chain.round_trip_s[lo]
    elsewhere_s = chain.round_trip_s[-1] - (chain.round_trip_s[hi] - reached_s)  # of one microbatch
    return np.asarray(np.maximum(reached_s + work_s, elsewhere_s + n * np.maximum(forward_s, backward_s)))


def _slowest_chunk_seconds(chain: LayerChain, partition: ChainPartition) -> float:
    """Return the least seconds of a step under a partition, as its slowest chunk has it."""
    return float(_step_seconds(chain, np.asarray(partition[:-1]), np.asarray(partition[1:])).max())


@lru_cache(maxsize=64)
def _sorted_shifts(num_boundaries: int, budget: PartitionBudget) -> npt.NDArray[np.int8]:
    """Return (n, boundaries) the first shifts of `_boundary_shifts`, each once, in lexicographic order.

    Shifts of a few layers are kept in one byte each.
    """
    shifts = list(islice(_boundary_shifts(num_boundaries, budget), budget.max_scored_jitters))
    return np.unique(np.array(shifts, np.int8).reshape(-1, num_boundaries), axis=0)


def _boundary_shifts(num_boundaries: int, budget: PartitionBudget) -> Iterator[tuple[int, ...]]:
    """List shifts of all boundaries: every combination if they are few.

    Else no shift, then shifts of one boundary and of two neighbours, then random shifts by at most one layer.
    """
    steps = range(-budget.max_boundary_shift, budget.max_boundary_shift + 1)
    if len(steps) ** num_boundaries <= budget.max_scored_jitters:
        yield from product(steps, repeat=num_boundaries)
        return
    none = (0,) * num_boundaries
    yield none
    for boundary in range(num_boundaries):
        before, after, after_next = none[:boundary], none[boundary + 1 :], none[boundary + 2 :]
        for step in steps:
            yield (*before, step, *after)
            if boundary + 1 < num_boundaries:
                yield from ((*before, step, neighbour, *after_next) for neighbour in (-1, 1))
    rng = np.random.default_rng(budget.jitter_seed)
    for _ in range(budget.max_scored_jitters // 10):
        yield tuple(rng.integers(-1, 2, num_boundaries).tolist())


def _allowed(chain: LayerChain, partitions: IntArray) -> BoolArray:
    """Return (n,) whether sizes fixed in the recipe allow each partition."""
    if not chain.masks:
        return np.ones(len(partitions), dtype=np.bool_)
    chunks, lo, hi = np.arange(chain.num_chunks), partitions[:, :-1], partitions[:, 1:]
    of_chunks = (np.broadcast_to(mask, (chain.num_chunks, *mask.shape[1:])) for mask in chain.masks)
    allowed_by_mask = [mask[chunks, lo, hi].all(axis=1) for mask in of_chunks]
    return np.asarray(np.any(allowed_by_mask, axis=0))


def _whole_unit_masks(bounds: Sequence[int], is_whole: Sequence[bool]) -> tuple[BoolArray, ...]:
    """Return (1, L + 1, L + 1) which spans of layers any chunk may hold where some units lie in a single chunk.

    Empty: all partitions are allowed.
    """
    lo, hi = np.meshgrid(np.arange(bounds[-1] + 1), np.arange(bounds[-1] + 1), indexing="ij")
    mask = np.ones(lo.shape, dtype=np.bool_)
    for is_unit_whole, (start, end) in zip(is_whole, pairwise(bounds), strict=True):
        if is_unit_whole:
            is_outside = (lo >= end) | (hi <= start)
            is_inside = (lo <= start) & (hi >= end)
            mask &= is_outside | is_inside
    return () if mask.all() else (mask[None],)


def _fixed_span_masks(bounds: Sequence[int], num_chunks: int, spans: Sequence[int | None]) -> tuple[BoolArray, ...]:
    """Return (chunks, L + 1, L + 1) masks: may chunk p hold layers [lo, hi) when units span the chunks they are given?

    Only a `pp` fixed in the recipe binds; no mask means that all partitions are allowed. The first unit starts in the
    first chunk, the last one ends in the last. A unit in the middle may start anywhere, and each start is a mask.
    """
    if all(span is None for span in spans):
        return ()
    num_layers, last_unit = bounds[-1], len(bounds) - 2
    lo, hi = np.meshgrid(np.arange(num_layers + 1), np.arange(num_layers + 1), indexing="ij")
    chunk = np.arange(num_chunks)[:, None, None]
    masks = [np.ones((num_chunks, num_layers + 1, num_layers + 1), dtype=np.bool_)]
    for unit, (start, end) in enumerate(pairwise(bounds)):
        span = spans[unit]
        if span is None:
            continue
        first_chunks: Sequence[int] = range(num_chunks - span + 1)
        if unit == 0:
            first_chunks = [0]
        elif unit == last_unit:
            first_chunks = [num_chunks - span]
        touches = ((lo < end) & (hi > start))[None]
        masks = [
            mask & (touches == ((first <= chunk) & (chunk < first + span))) for mask in masks for first in first_chunks
        ]
    return tuple(masks)


def division_masks(num_layers: int, division: Sequence[int] | None) -> tuple[BoolArray, ...]:
    """Return the masks of a unit with a pipeline of its own whose blocks the recipe may divide, see `LayerChain`."""
    return () if division is None else _with_divisions((), (0, num_layers), len(division), [division])


def _with_divisions(
    masks: tuple[BoolArray, ...],
    bounds: Sequence[int],
    num_chunks: int,
    divisions: Sequence[Sequence[int] | None],
) -> tuple[BoolArray, ...]:
    """Return masks that also demand the blocks that the recipe gives each chunk; of None it leaves a unit open.

    The first and the last layer of a unit are no blocks and may lie in any chunk that their order allows.
    """
    if all(division is None for division in divisions):
        return masks
    rows = np.arange(bounds[-1] + 1)
    allowed = np.ones((num_chunks, len(rows), len(rows)), dtype=np.bool_)
    for division, (start, end) in zip(divisions, pairwise(bounds), strict=True):
        if division is not None:
            blocks_until = np.clip(rows, start + 1, end - 1) - (start + 1)
            held = blocks_until[None, :] - blocks_until[:, None]
            allowed &= held[None] == np.asarray(division)[:, None, None]
    return tuple(mask & allowed for mask in masks) or (allowed,)


def whole_root(value: int, degree: int) -> int:
    """Return the largest whole number whose power `degree` is at most `value`; floats make 3.99... of 64 ** (1 / 3)."""
    root: int = round(value ** (1 / degree))
    return root if root**degree <= value else root - 1
