"""`StepLoads`: what changes from step to step, while the program is fixed for the run."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import BatchMeta
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.program.ir.context_loads import Splits, feature_runs, part_loads, split_microbatches
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph, UnitMesh, microbatches_per_block

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Route:
    """Which rows of which source microbatch go where in which destination microbatch, for one pair of units.

    There is one entry a span (neighboring items that stay neighbors): rows [src_offset, src_offset + length) of the
    features of `src` become rows [dst_offset, dst_offset + length) of the features that `dst` receives. Entries are
    ordered by `dst_offset`; pairs that exchange nothing are absent.
    """

    spans: dict[tuple[Microbatch, Microbatch], IntArray]  # (src, dst) -> (k, 3): src_offset, dst_offset, length

    @cached_property
    def _rows(self) -> dict[tuple[Microbatch, Microbatch], int]:
        """Rows that travel, by (source, destination): the simulator asks once for each message."""
        return {pair: sum(spans[:, 2].tolist()) for pair, spans in self.spans.items()}

    @cached_property
    def pairs(self) -> IntArray:
        """(pairs, 5): replica and index of the source, those of the destination, and the rows that travel."""
        rows = [(s.replica, s.index, d.replica, d.index, rows) for (s, d), rows in self._rows.items()]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    @cached_property
    def _pairs_by_indices(self) -> dict[tuple[int, int], list[tuple[Microbatch, Microbatch]]]:
        """Pairs that exchange rows, of all replicas, by the indices of their microbatches."""
        pairs: dict[tuple[int, int], list[tuple[Microbatch, Microbatch]]] = {}
        for src, dst in self.spans:
            pairs.setdefault((src.index, dst.index), []).append((src, dst))
        return pairs

    def pairs_between(self, src: int, dst: int) -> list[tuple[Microbatch, Microbatch]]:
        """Return the pairs that exchange rows from microbatches number `src` to those number `dst`, of all replicas."""
        return self._pairs_by_indices.get((src, dst), [])

    def exchanged(self, src: int, dst: int, is_back: bool) -> tuple[IntArray, IntArray, IntArray]:
        """Return (pairs,) the sending and the receiving replica, and the rows, of what a dispatch moves.

        src, dst: numbers of the microbatches. is_back: whether gradients go from the destination to the source.
        """
        src_replica, src_index, dst_replica, dst_index, rows = self.pairs.T
        moved = (src_index == src) & (dst_index == dst)
        source, destination = src_replica[moved], dst_replica[moved]
        return (destination, source, rows[moved]) if is_back else (source, destination, rows[moved])

    @cached_property
    def _received_rows(self) -> tuple[Counter[Microbatch], Counter[Microbatch]]:
        """Rows into each destination, and those whose gradients come back to each source."""
        into: Counter[Microbatch] = Counter()
        back: Counter[Microbatch] = Counter()
        for (src, dst), rows in self._rows.items():
            into[dst] += rows
            back[src] += rows
        return into, back

    def received_rows(self, mb: Microbatch, is_back: bool) -> int:
        """Return the rows that a destination receives or, with `is_back`, whose gradients a source gets back."""
        return self._received_rows[is_back][mb]

    def rows(self, src: Microbatch, dst: Microbatch) -> int:
        """Return the number of feature rows that travel from `src` to `dst`."""
        return self._rows.get((src, dst), 0)


@dataclass(frozen=True)
class StepLoads:
    """A load for every microbatch and a route for every pair of units that exchange data."""

    loads: dict[Microbatch, TokenLoad]
    routes: dict[tuple[str, str], Route]  # (source unit, destination unit)
    rows_out: dict[Microbatch, int]  # rows sent to other units: an encoder's features, or the LLM's for a generator


def step_loads(graph: StageGraph, meta: BatchMeta) -> StepLoads:
    """Sum up one global batch for every microbatch, and find where each feature goes.

    An LLM microbatch receives an encoder's features in the order of its samples and, within a sample, of its items; it
    sends features to a unit after it in the same order. Microbatches of other units hold theirs in the order of the
    item table. A few sorts do all of it: there is no loop over samples.

    Replicas that share sequences by context parallelism have a load each, of the tokens that they compute.

    Raises:
        KeyError: the batch has no item table for a unit of the graph.
    """
    llm = next((mesh for mesh in graph.meshes if mesh.unit == LLM), None)
    splits = split_microbatches(llm, meta) if llm is not None and llm.cp > 1 else {}
    pairs = dict.fromkeys((e.src.unit, e.dst.unit) for e in graph.edges if e.crosses_units)
    routes = {pair: _route(graph, *pair, meta, splits) for pair in pairs}
    loads: dict[Microbatch, TokenLoad] = {}
    rows_out = {mb: 0 for mesh in graph.meshes for mb in _microbatches(mesh)}
    for mesh in graph.meshes:
        if mesh.cp > 1:
            loads.update(part_loads(mesh, meta, splits))
            continue
        sizes = meta if mesh.unit == LLM else meta.items[mesh.unit]
        targets = meta.targets if mesh.unit == LLM else None
        loads.update(_loads(mesh, _slots(mesh, sizes.replica, sizes.index), sizes.tokens, targets))
    for src, dst in pairs:
        mesh, items = graph.mesh(src), meta.items[dst if src == LLM else src]
        if src == LLM:
            slot = _slots(mesh, meta.replica, meta.index)[items.sample]
        else:
            slot = _slots(mesh, items.replica, items.index)
        rows_out.update(zip(_microbatches(mesh), _sums(mesh, slot, items.features).tolist(), strict=True))
    return StepLoads(loads, routes, rows_out)


def _microbatches(mesh: UnitMesh) -> list[Microbatch]:
    """Return all microbatches of a unit in the order of their slots."""
    return [Microbatch(mesh.unit, r, i) for r in range(mesh.num_replicas) for i in range(mesh.num_microbatches)]


def _slots(mesh: UnitMesh, replica: IntArray, index: IntArray) -> IntArray:
    """Number microbatches by (replica, index)."""
    return replica * mesh.num_microbatches + index


def _sums(mesh: UnitMesh, slot: IntArray, values: IntArray) -> IntArray:
    sums = np.zeros(mesh.num_replicas * mesh.num_microbatches, dtype=np.int64)
    np.add.at(sums, slot, values)
    return sums


def _loads(mesh: UnitMesh, slot: IntArray, lengths: IntArray, targets: IntArray | None) -> dict[Microbatch, TokenLoad]:
    longest = np.zeros(mesh.num_replicas * mesh.num_microbatches, dtype=np.int64)
    np.maximum.at(longest, slot, lengths)
    columns = (_sums(mesh, slot, lengths), _sums(mesh, slot, lengths * lengths), longest)
    counts = [_sums(mesh, slot, np.ones_like(lengths))]
    if targets is not None:
        counts.append(_sums(mesh, slot, targets))
    rows = zip(*(column.tolist() for column in (*columns, *counts)), strict=True)
    return {mb: TokenLoad(*row) for mb, row in zip(_microbatches(mesh), rows, strict=True)}


def _route(graph: StageGraph, src: str, dst: str, meta: BatchMeta, splits: Splits) -> Route:
    """Return the route from an encoder to the LLM, or from the LLM to a unit after it.

    splits: of the LLM's microbatches among the replicas that share them; empty where none do.
    """
    unit = dst if src == LLM else src
    items, llm = meta.items[unit], graph.mesh(LLM)
    if splits:
        item, llm_slot, rows = feature_runs(llm, meta, items, splits)
    else:
        item, rows = np.arange(len(items.sample)), items.features
        llm_slot = _slots(llm, meta.replica, meta.index)[items.sample]
    unit_slot = _slots(graph.mesh(unit), items.replica, items.index)[item]
    per_block, llm_per_block = microbatches_per_block(
        graph.mesh(unit).num_microbatches, graph.mesh(LLM).num_microbatches
    )
    in_block = items.index // per_block == meta.index[items.sample] // llm_per_block
    assert in_block.all(), "the batch was laid out for other numbers of microbatches"
    by_sample = np.lexsort((items.position[item], items.sample[item]))
    place = np.empty_like(by_sample)
    place[by_sample] = np.arange(len(by_sample))
    ends = [
        (unit_slot, _offsets(unit_slot, np.arange(len(unit_slot)), rows)),
        (llm_slot, _offsets(llm_slot, place, rows)),
    ]
    (src_slot, src_offset), (dst_slot, dst_offset) = ends if unit == src else reversed(ends)
    filled = rows > 0
    columns = np.stack([src_slot, dst_slot, src_offset, dst_offset, rows], axis=1)[filled]
    columns = columns[np.lexsort((columns[:, 3], columns[:, 1], columns[:, 0]))]
    columns = _joined_spans(columns)
    cuts = np.flatnonzero((np.diff(columns[:, :2], axis=0) != 0).any(axis=1)) + 1
    sources, destinations = _microbatches(graph.mesh(src)), _microbatches(graph.mesh(dst))
    of_pairs = [rows for rows in np.split(columns, cuts) if len(rows)]
    return Route({(sources[rows[0, 0]], destinations[rows[0, 1]]): rows[:, 2:] for rows in of_pairs})


def _offsets(slot: IntArray, place: IntArray, rows: IntArray) -> IntArray:
    """Return the first row of each item inside its microbatch, whose items are in the order of `place`."""
    order = np.lexsort((place, slot))
    start = np.cumsum(rows[order]) - rows[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.diff(slot[order]) != 0
    base = np.maximum.accumulate(np.where(first, start, 0))
    offsets = np.empty_like(start)
    offsets[order] = start - base
    return offsets


def _joined_spans(columns: IntArray) -> IntArray:
    """Merge rows (src slot, dst slot, src offset, dst offset, length) that continue the row before them."""
    if len(columns) == 0:
        return columns
    ends = columns[:, 2:4] + columns[:, 4:]
    follows = (columns[1:, :2] == columns[:-1, :2]).all(axis=1) & (columns[1:, 2:4] == ends[:-1]).all(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    merged = columns[starts].copy()
    merged[:, 4] = np.add.reduceat(columns[:, 4], starts)
    return merged
