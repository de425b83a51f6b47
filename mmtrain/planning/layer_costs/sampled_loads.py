"""Loads of the sampled batches under a split: what each microbatch holds, and which rows travel between units."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from mmtrain.balance import BatchMeta
from mmtrain.balance.context_split import MAX_IMBALANCE
from mmtrain.balance.dispatch.phase_loads import PhaseLoad, mean_phase_loads, phase_loads
from mmtrain.costs import TokenLoad
from mmtrain.costs.layer_arithmetic import context_parallel_load
from mmtrain.planning.artifact.layout import MeshSize, disaggregated_units
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.planning.space.budget import DEFAULT_BUDGET, SearchBudget
from mmtrain.planning.space.load_arrays import LoadArrays, load_arrays, loads_of_parts
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.planning.space.sample_batches import (
    BatchSplit,
    SampledBatches,
    UnitSplit,
    batch_of_group,
    num_groups_of,
    num_microbatches_of,
    split_of_group,
)
from mmtrain.program.ir.context_loads import part_loads, split_microbatches
from mmtrain.program.ir.graph import LLM, StageGraph, UnitMesh
from mmtrain.program.ir.step_loads import StepLoads, step_loads

LoadSplit = tuple[BatchSplit, int]  # what a unit's loads depend on, see `load_split`
# What Python holds of one entry of `StepLoads` besides arrays, by `sys.getsizeof` of key, value and place in the table.
BYTES_PER_LOAD = 300
BYTES_PER_ROUTE = 700  # with the sums that simulations ask for


class SampledLoads:
    """Loads of the sampled batches; those of units stay for long, those of whole steps for a while."""

    def __init__(self, problem: PlanningProblem, budget: SearchBudget = DEFAULT_BUDGET) -> None:
        """Take shapes and batches from the problem."""
        self._shape = problem.shape
        self._batches = problem.batches
        self._seq_len = problem.seq_len
        self._unsampled_load_ratio = budget.sampling.unsampled_load_ratio
        kept = budget.evaluation
        self._loads: RecentlyUsed[LoadArrays] = RecentlyUsed(kept.max_kept_load_bytes, lambda loads: loads.num_bytes)
        # Samples, items and routes of a step take many times the memory of its loads.
        self._laid_out: RecentlyUsed[list[BatchMeta]] = RecentlyUsed(kept.max_kept_batch_bytes, _num_bytes)
        # Sizes are capped, so that a few are kept however large.
        largest = kept.max_kept_step_bytes // kept.min_kept_steps
        self._step_loads: RecentlyUsed[StepLoads] = RecentlyUsed(
            kept.max_kept_step_bytes, lambda loads: min(_bytes_of_step(loads), largest)
        )
        self._largest_loads: dict[tuple[str, LoadSplit], TokenLoad] = {}

    def of_step(self, split: BatchSplit, batch: int) -> StepLoads:
        """Return loads and routes of a sampled batch under this split."""

        def compute_loads() -> StepLoads:
            return step_loads(self._graph_of(split), self.lay_out(split)[batch])

        return self._step_loads.get((split, batch), compute_loads)

    def of_group(self, split: BatchSplit, batch: int, group: int) -> StepLoads:
        """Return loads and routes of one replica group in a sampled batch, its replicas numbered from 0.

        Only for units that do not dispatch items, which would leave their replica group.
        """

        def compute_loads() -> StepLoads:
            of_group = batch_of_group(self.lay_out(split)[batch], split, group)
            return step_loads(self._graph_of(split_of_group(split)), of_group)

        return self._step_loads.get((split, batch, group), compute_loads)

    def _graph_of(self, split: BatchSplit) -> StageGraph:
        """Return a graph with this split; loads depend on nothing else of a graph."""
        meshes = {entry.unit: _mesh_of(entry) for entry in split}
        one_stage = {unit.name: (0, len(unit.layers)) for unit in self._shape.units}
        return build_stage_graph(disaggregated_units(meshes, one_stage), num_microbatches_of(split), self._shape)

    def lay_out(self, split: BatchSplit) -> list[BatchMeta]:
        """Return every sampled batch as this split arranges it."""
        return self._laid_out.get(split, partial(_lay_out, self._batches, split))

    def of_phases(self, split: BatchSplit) -> dict[str, PhaseLoad]:
        """Return by unit how evenly sharded units fill the ranks, mean over the sampled batches."""
        numbers, llm = num_microbatches_of(split), split_of_unit(LLM, split)
        return mean_phase_loads([phase_loads(batch, llm.dp, numbers, llm.cp) for batch in self.lay_out(split)])

    def of_unit(self, unit: str, split: BatchSplit) -> LoadArrays:
        """Return the loads of a unit's microbatches: arrays of (batches, dp * cp, microbatches)."""
        return self._loads.get((unit, load_split(unit, split)), partial(self._compute_loads, unit, split))

    def _compute_loads(self, unit: str, split: BatchSplit) -> LoadArrays:
        of_unit = split_of_unit(unit, split)
        if unit == LLM:
            return _llm_loads(of_unit, _lay_out(self._batches.with_items_of(()), (of_unit,)))
        # All encoders together take longer, and most splits of them are never simulated.
        is_whole = split in self._laid_out or len(split) <= 2
        batches = self.lay_out(split) if is_whole else _lay_out(self._batches.with_items_of([unit]), split)
        return load_arrays(unit, batches, of_unit.dp, of_unit.num_microbatches)

    @cached_property
    def undivided(self) -> BatchSplit:
        """One replica of each unit, with a microbatch for each group of the sampled batches."""
        return tuple(UnitSplit(unit.name, 1, self._batches.global_batch) for unit in self._shape.units)

    def even_microbatches(self, unit: str, num_microbatches: int) -> tuple[int, TokenLoad]:
        """Return how many microbatches of a step hold anything of the unit, and the load of one, if all are even.

        num_microbatches: of all replicas; those beyond the number of items are empty.
        """
        loads = self.of_unit(unit, self.undivided)
        totals = [loads.total(batch) for batch in range(len(self._batches.groups))]
        count = round(float(np.mean([total.num_sequences for total in totals])))
        num_filled = max(1, min(num_microbatches, count))
        tokens, squares = (
            round(float(np.mean(of_batches)) / num_filled)
            for of_batches in ([total.tokens for total in totals], [total.sum_sq for total in totals])
        )
        longest = min(tokens, max(total.max_len for total in totals))
        return num_filled, TokenLoad(tokens, squares, longest, round(count / num_filled))

    def largest(self, unit: str, split: BatchSplit) -> TokenLoad:
        """Return the largest microbatch that memory is planned for: a little more than the largest sampled one.

        The LLM's microbatches never exceed `seq_len`, and one of them may hold the data's longest sample alone.
        """
        key = (unit, load_split(unit, split))
        if key not in self._largest_loads:
            self._largest_loads[key] = self._find_largest(unit, split)
        return self._largest_loads[key]

    def _find_largest(self, unit: str, split: BatchSplit) -> TokenLoad:
        largest = self.of_unit(unit, split).largest()
        surplus = self._unsampled_load_ratio
        if unit != LLM:
            return _scaled(largest, surplus)
        cp = split_of_unit(LLM, split).cp
        longest = min(self._seq_len, self._longest_sample)
        most_tokens = max(largest.tokens, math.ceil(MAX_IMBALANCE * self._seq_len / cp)) if cp > 1 else self._seq_len
        packed = _scaled(largest, min(surplus, most_tokens / max(1, largest.tokens)))
        alone = TokenLoad(longest, longest**2, longest, 1)
        most_targets = max(packed.num_targets, min(longest, int(self._batches.lengths.targets.max())))
        if cp > 1:
            alone, most_targets = context_parallel_load(alone, cp), min(most_targets, alone.tokens)
        largest = max(packed, alone, key=lambda load: (load.tokens, load.sum_sq))
        return replace(largest, targets=min(most_targets, largest.tokens))

    @cached_property
    def _longest_sample(self) -> int:
        """Tokens of the longest sample."""
        return int(self._batches.lengths.tokens.max())

    def tokens(self) -> float:
        """Return the LLM tokens of a step, mean over the batches."""
        lengths = self._batches.lengths.tokens
        totals = [sum(int(lengths[group].sum()) for group in groups) for groups in self._batches.groups]
        return float(np.mean(totals))


def _lay_out(batches: SampledBatches, split: BatchSplit) -> list[BatchMeta]:
    dp = {entry.unit: entry.dp for entry in split}
    return batches.lay_out(dp, num_microbatches_of(split), split[0].dispatch, split[0].ranks_per_replica)


def _num_bytes(batches: Sequence[BatchMeta]) -> int:
    """Return the bytes of samples and items."""
    tables = [table for batch in batches for table in (batch, *batch.items.values())]
    columns = (column for table in tables for column in vars(table).values())
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def _bytes_of_step(loads: StepLoads) -> int:
    """Return the bytes of a step's loads and routes, nearly."""
    spans = [array for route in loads.routes.values() for array in route.spans.values()]
    num_entries = len(loads.loads) + len(loads.rows_out)
    return BYTES_PER_LOAD * num_entries + sum(BYTES_PER_ROUTE + array.nbytes for array in spans)


def _llm_loads(split: UnitSplit, batches: Sequence[BatchMeta]) -> LoadArrays:
    """Return the loads of the LLM's microbatches, of each part by itself where replicas share them."""
    if split.cp == 1:
        return load_arrays(LLM, batches, split.dp, split.num_microbatches)
    mesh = UnitMesh(
        unit=LLM,
        tp=1,
        pp=1,
        dp=split.dp,
        ranks=tuple(range(split.dp * split.cp)),
        num_microbatches=split.num_microbatches,
        cp=split.cp,
        cp_method=split.cp_method,
        cp_split=split.cp_split,
    )
    return loads_of_parts(mesh, [part_loads(mesh, batch, split_microbatches(mesh, batch)) for batch in batches])


def split_of_unit(unit: str, split: BatchSplit) -> UnitSplit:
    """Return how one unit's part of a step is divided."""
    return next(entry for entry in split if entry.unit == unit)


def _mesh_of(split: UnitSplit) -> MeshSize:
    """Return the mesh of a unit that is divided like this, whose replicas are single ranks."""
    return MeshSize(1, 1, split.dp, cp=split.cp, cp_method=split.cp_method, cp_split=split.cp_split, ep=split.ep)


def load_split(unit: str, split: BatchSplit) -> LoadSplit:
    """Return what decides about a unit's loads: how it and the LLM are divided, and the number of replica groups.

    The LLM's loads depend on no other unit. Those of an encoder depend on others only by the replica groups, which
    items do not leave (`assign`).
    """
    of_llm = tuple(entry for entry in split if entry.unit == LLM)
    return (of_llm, 1) if unit == LLM else ((*of_llm, split_of_unit(unit, split)), num_groups_of(split))


def _scaled(load: TokenLoad, factor: float) -> TokenLoad:
    """Return a load of as many sequences, each longer by a factor."""
    tokens, longest = round(load.tokens * factor), round(load.max_len * factor)
    num_targets = None if load.targets is None else min(tokens, round(load.targets * factor))
    num_exchanged = min(tokens, round(load.exchanged * factor))
    return TokenLoad(tokens, round(load.sum_sq * factor**2), longest, load.num_sequences, num_targets, num_exchanged)
