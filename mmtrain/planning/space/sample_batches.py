"""A few global batches like those of the run, so that candidates are compared on real lengths and not on their mean.

`UnitSplit` says how a step is divided over the replicas of each unit, and into how many microbatches.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta, Grouping, IntArray, ItemTable, SampleLengths, StepTargets, assign
from mmtrain.balance.assign import COST_PER_TOKEN, NO_TARGETS
from mmtrain.balance.batch_meta import SampleTokens, item_rows, mean_tokens
from mmtrain.balance.dispatch.dispatch_samples import dispatch_samples
from mmtrain.balance.dispatch.phase_loads import stream_groups_of
from mmtrain.balance.grouping.groups_per_step import draw_samples
from mmtrain.balance.grouping.methods import arrange_window, group_window, grouping_sizes
from mmtrain.balance.grouping.pack_groups import GroupingSizes
from mmtrain.balance.grouping.padding import pad_microbatches
from mmtrain.balance.matched.regroup_step import match_step
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.space.budget import DEFAULT_BUDGET, SamplingBudget
from mmtrain.program.ir.graph import (
    LLM,
    ContextMethod,
    CutSequences,
    DispatchMode,
    StageGraph,
    UnitMesh,
    num_independent_groups,
)

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SampledBatches:
    """Groups of some global batches. They depend on no plan, as the stream of groups in training does not."""

    lengths: SampleLengths
    groups: tuple[Sequence[IntArray], ...]  # per batch
    targets: StepTargets = NO_TARGETS
    pad: bool = False  # samples to the longest of their microbatch
    unmatched: tuple[Sequence[IntArray], ...] = ()  # the same steps as the stream has them, where `groups` are matched
    ranks_per_node: int | None = None  # None: batches of items are placed without regard to nodes
    sizes: GroupingSizes | None = None  # of all samples, where replicas that dispatch exchange some of them

    @property
    def global_batch(self) -> int:
        """Groups in one batch."""
        return len(self.groups[0])

    @property
    def samples_per_batch(self) -> float:
        """Samples in one batch, mean: a group holds several."""
        return sum(len(group) for groups in self.groups for group in groups) / len(self.groups)

    def lay_out(
        self,
        dp: Mapping[str, int],
        num_microbatches: Mapping[str, int],
        dispatch: DispatchMode | None = None,
        ranks_per_replica: int = 1,
    ) -> list[BatchMeta]:
        """Assign every batch to replicas and microbatches as a plan with these data-parallel degrees would.

        dispatch: what sharded replicas balance, one on each `ranks_per_replica` ranks. Costs are taken in proportion to
        tokens, here and in `targets`. With it, batches name the groups of the stream.
        """
        steps, targets = self.groups, replace(self.targets, dispatch=dispatch == "all")
        if dispatch == "all" and self.ranks_per_node is not None:
            starts = {unit: range(0, dp[unit] * ranks_per_replica, ranks_per_replica) for unit in dp}
            nodes = {unit: tuple(rank // self.ranks_per_node for rank in starts[unit]) for unit in dp}
            targets = replace(targets, replica_nodes=nodes)
        if dispatch == "none":
            steps, targets = self.unmatched or self.groups, replace(targets, reorder=False)
        elif dispatch is not None and self.sizes is not None:
            with_items = dispatch == "llm"
            as_padded = targets.balance_as_padded.get(LLM)
            steps = tuple(
                dispatch_samples(groups, dp[LLM], self.sizes, COST_PER_TOKEN, self.pad, with_items, as_padded)
                for groups in steps
            )
        batches = [
            assign(step, 0, groups, self.lengths, dp, num_microbatches, targets) for step, groups in enumerate(steps)
        ]
        if dispatch is not None:
            stream_groups = self.unmatched or self.groups
            batches = [
                replace(batch, stream_group=stream_groups_of(batch.sample_id, groups))
                for batch, groups in zip(batches, stream_groups, strict=True)
            ]
        return [pad_microbatches(batch) for batch in batches] if self.pad else batches

    def with_items_of(self, units: Collection[str]) -> "SampledBatches":
        """Return the same batches with the items of these units alone: others do not change how they are laid out."""
        items = {unit: of_unit for unit, of_unit in self.lengths.items.items() if unit in units}
        return replace(self, lengths=replace(self.lengths, items=items))


def sample_batches(
    lengths: SampleLengths, grouping: Grouping, seed: int, budget: SamplingBudget = DEFAULT_BUDGET.sampling
) -> SampledBatches:
    """Draw samples at random, group them as training does, and take steps that stand for all.

    Steps differ, most of all where grouping makes the groups of one step alike (`device`). Ordered by their work, the
    steps in the middle of `num_batches` equal parts are taken. Of steps with very many samples, which hardly differ,
    fewer are taken, and one where all samples are alike. A dataset with too few samples is repeated, as further epochs
    would. Long samples that train in steps of their own are drawn among the others, so the mean cost of a step is
    right.

    Raises:
        PlanError: there are no samples.
    """
    if len(lengths) == 0:
        raise PlanError("data.sources: no usable sample, so there is nothing to plan for")
    global_batch = grouping.global_batch
    samples_per_group = grouping.seq_len / max(float(mean_tokens(lengths)[0]), 1.0)
    num_batches = budget.num_batches
    if grouping.method != "device":
        num_batches = min(num_batches, max(1, int(budget.max_samples / (global_batch * samples_per_group))))
    num_needed = int(np.ceil(budget.sample_surplus_ratio * num_batches * global_batch * samples_per_group))
    num_samples = max(num_needed, min(budget.min_samples_to_group, grouping.window))
    rng = np.random.default_rng(seed)
    sizes = grouping_sizes(lengths, grouping)
    order = draw_samples(lengths, num_samples, rng)
    groups = arrange_window(sizes, group_window(sizes, order, grouping, rng), grouping, 0, rng, by_chance=True)
    num_steps = max(num_batches, len(groups) // global_batch)
    steps = [
        [groups[i % len(groups)] for i in range(step * global_batch, (step + 1) * global_batch)]
        for step in range(num_steps)
    ]
    work = SampleTokens(lengths)
    steps.sort(key=lambda step: int(work[np.concatenate(step)].sum()))
    middles = [(2 * part + 1) * num_steps // (2 * num_batches) for part in range(num_batches)]
    chosen = [steps[middle] for middle in middles]
    if _are_alike(chosen, lengths):
        chosen = chosen[:1]
    unmatched = tuple(chosen)
    if grouping.method == "matched" and grouping.reorder:
        chosen = [_match(step, sizes, grouping) for step in chosen]
    return SampledBatches(
        lengths,
        tuple(chosen),
        StepTargets(reorder=grouping.reorder),
        grouping.pad,
        unmatched,
        sizes=sizes if grouping.reorder and grouping.method != "matched" else None,
    )


def _are_alike(steps: Sequence[Sequence[IntArray]], lengths: SampleLengths) -> bool:
    """Return whether all groups of these steps hold as many samples, all of the same lengths."""
    groups = [group for step in steps for group in step]
    samples = np.concatenate(groups).astype(np.int64)
    columns = [np.array([len(group) for group in groups]), lengths.tokens[samples], lengths.targets[samples]]
    for items in lengths.items.values():
        columns.append(items.first[samples + 1] - items.first[samples])
        _, rows = item_rows(items, samples)
        columns += [column[rows] for column in (items.rows, items.cols, items.tokens, items.features)]
    return all(len(column) == 0 or bool((column == column[0]).all()) for column in columns)


def _match(groups: list[IntArray], sizes: GroupingSizes, grouping: Grouping) -> list[IntArray]:
    """Match the groups of a step for some number of replicas, as training does for that of the plan."""
    tokens = sizes.tokens[np.concatenate(groups)]
    loads = (tokens @ sizes.load_matrix.T).astype(np.int64)
    return match_step(groups, tokens, sizes.budgets, loads, sizes.weights, grouping.row_size)


class UnitSplit(NamedTuple):
    """How a unit's part of a step is divided; see `UnitMesh`."""

    unit: str
    dp: int
    num_microbatches: int  # of a replica
    dispatch: DispatchMode | None = None
    cp: int = 1
    cp_method: ContextMethod = "ulysses"
    cp_split: CutSequences = "auto"
    ep: int = 1
    ranks_per_replica: int = 1  # which decide on which node a replica is, where items are dispatched


BatchSplit = tuple[UnitSplit, ...]  # in the order of the model's units


def batch_split_of(graph: StageGraph) -> BatchSplit:
    """Return the graph's data-parallel degrees and microbatches, in the order of its units."""
    return tuple(unit_split(mesh.unit, mesh, mesh.num_microbatches, mesh.dispatch) for mesh in graph.meshes)


def unit_split(
    unit: str, mesh: MeshSize | UnitMesh, num_microbatches: int, dispatch: DispatchMode | None = None
) -> UnitSplit:
    """Return how the unit's part of a step is divided over a mesh."""
    ranks_per_replica = mesh.tp if dispatch == "all" else 1
    split = UnitSplit(unit, mesh.dp, num_microbatches, dispatch, ep=mesh.ep, ranks_per_replica=ranks_per_replica)
    if mesh.cp == 1:
        return split
    return split._replace(cp=mesh.cp, cp_method=mesh.cp_method, cp_split=mesh.cp_split)


def num_microbatches_of(split: BatchSplit) -> dict[str, int]:
    """Return the microbatches of each replica, by unit."""
    return {entry.unit: entry.num_microbatches for entry in split}


def num_groups_of(split: BatchSplit) -> int:
    """Return the number of replica groups."""
    return math.gcd(*(num_independent_groups(entry.dp, entry.cp, entry.ep) for entry in split))


def split_of_group(split: BatchSplit) -> BatchSplit:
    """Return how the part of a step is divided that one replica group computes."""
    return tuple(entry._replace(dp=entry.dp // num_groups_of(split)) for entry in split)


def batch_of_group(batch: BatchMeta, split: BatchSplit, group: int) -> BatchMeta:
    """Return the part of a batch that one replica group computes, its replicas numbered from 0.

    Units must not dispatch items, which then stay in their replica group.
    """
    num_replicas = {entry.unit: entry.dp for entry in split_of_group(split)}

    def rows_of_group(replica: IntArray, unit: str) -> tuple[BoolArray, IntArray]:
        is_in_group = replica // num_replicas[unit] == group
        return is_in_group, replica[is_in_group] - group * num_replicas[unit]

    of_llm, llm_replica = rows_of_group(batch.replica, LLM)
    row_in_group = np.cumsum(of_llm) - 1
    items = {}
    for unit, table in batch.items.items():
        of_unit, replica = rows_of_group(table.replica, unit)
        columns = {name: getattr(table, name)[of_unit] for name in (f.name for f in fields(table))}
        columns |= {"sample": row_in_group[columns["sample"]], "replica": replica}
        items[unit] = ItemTable(**columns)
    return replace(
        batch,
        sample_id=batch.sample_id[of_llm],
        tokens=batch.tokens[of_llm],
        targets=batch.targets[of_llm],
        replica=llm_replica,
        index=batch.index[of_llm],
        items=items,
        padding=None if batch.padding is None else batch.padding[of_llm],
        stream_group=None if batch.stream_group is None else batch.stream_group[of_llm],
    )
