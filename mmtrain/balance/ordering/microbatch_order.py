"""Order the microbatches of a step in time, for the pipeline that a plan has."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.reordering import reorder_microbatches
from mmtrain.balance.ordering.schedule_recurrence import schedule_recurrence
from mmtrain.balance.step_targets import LLM, CostsByUnit, SampleWork, ScheduleTable, StepTargets

# Of the search: most of what reordering can gain, in less than 10 ms for 64 microbatches over 10 stages. No clock ends
# the search, since all ranks must find the same order.
SEARCH_ROUNDS = 2


def order_microbatches(
    work: SampleWork,
    replica: IntArray,
    index: IntArray,
    targets: StepTargets,
    dp: Mapping[str, int],
    num_microbatches: Mapping[str, int],
) -> IntArray:
    """Return (l,) the LLM's microbatches in the order in which they run, the same on all replicas.

    replica, index: (k,) LLM replica and microbatch of each sample of `work`. dp, num_microbatches: by unit.
    Microbatches of a block that some unit merges move together. By the recurrence of 1F1B, or of the plan's own
    schedule, no step takes longer than in the given order 0, 1, 2, ...
    """
    num_llm = num_microbatches[LLM]
    given_order = np.arange(num_llm)
    num_blocks = math.gcd(*num_microbatches.values())
    if num_blocks < 3:  # two orders of two blocks take the same time, or nearly
        return given_order

    def costs(costs_by_unit: Sequence[CostsByUnit]) -> FloatArray:
        return stage_costs(work, replica, index, costs_by_unit, dp, num_llm)

    if targets.schedule_table is not None:
        task_costs = costs([{task.unit: task.cost} for task in targets.schedule_table.tasks])
        return _order_by_schedule(targets.schedule_table, task_costs, num_microbatches)
    if len(targets.pipeline) < 2:
        return given_order
    forward = costs([rank.forward for rank in targets.pipeline])
    backward = costs([rank.backward for rank in targets.pipeline])
    blocks = reorder_microbatches(
        _by_block(forward.sum(axis=0), num_blocks)[None],
        _by_block(backward.sum(axis=0), num_blocks)[None],
        np.arange(num_blocks),
        SEARCH_ROUNDS,
        np.random.default_rng(0),
    )
    reordered = _expand_blocks(blocks[None], num_llm)[0]
    before, after = makespans_1f1b(forward, backward, np.stack([given_order, reordered]))
    return reordered if after < before else given_order


def _order_by_schedule(table: ScheduleTable, costs: FloatArray, num_microbatches: Mapping[str, int]) -> IntArray:
    """Order microbatches as `order_microbatches` does, by a schedule table; costs: (dp_llm, tasks, l)."""
    num_llm = num_microbatches[LLM]
    given_order = np.arange(num_llm)
    num_blocks = math.gcd(*num_microbatches.values())
    for t, unit in enumerate(task.unit for task in table.tasks):  # an action stands for its share of a whole block
        num_shared_blocks = math.gcd(num_microbatches[unit], num_llm)
        by_block = costs[:, t].reshape(len(costs), num_shared_blocks, -1)
        by_block[:] = by_block.sum(axis=2, keepdims=True) // (num_microbatches[unit] // num_shared_blocks)
    recurrence = schedule_recurrence(table, tuple(sorted(num_microbatches.items())))
    all_replicas = costs.sum(axis=0)
    forward, backward = recurrence.rank_seconds(all_replicas)
    blocks = reorder_microbatches(
        _by_block(forward, num_blocks)[None],
        _by_block(backward, num_blocks)[None],
        np.arange(num_blocks),
        SEARCH_ROUNDS,
        np.random.default_rng(0),
        score=lambda orders: recurrence.makespans(all_replicas[None], _expand_blocks(orders, num_llm)),
    )
    reordered = _expand_blocks(blocks[None], num_llm)[0]
    before, after = recurrence.makespans(costs, np.stack([given_order, reordered]))
    return reordered if after < before else given_order


def stage_costs(
    work: SampleWork,
    replica: IntArray,
    index: IntArray,
    costs_by_unit: Sequence[CostsByUnit],
    dp: Mapping[str, int],
    num_llm: int,
) -> FloatArray:
    """Return (dp_llm, len(costs_by_unit), l) what the microbatches of every LLM replica cost.

    replica, index: (k,) LLM replica and microbatch of each sample of `work`. The encoders of a replica group share the
    items of its LLM replicas evenly, so each LLM replica waits for the mean.
    """
    slot = replica * num_llm + index
    units = {unit for costs in costs_by_unit for unit in costs}
    sums = {unit: work.slot_sums(unit, slot, dp[LLM] * num_llm).reshape(2, dp[LLM], num_llm) for unit in sorted(units)}

    def total_cost(costs: CostsByUnit) -> IntArray:
        total = np.zeros((dp[LLM], num_llm), dtype=np.int64)
        for unit, cost in costs.items():
            tokens, squares = sums[unit]
            unit_cost = cost.linear * tokens + cost.quadratic * squares
            if unit != LLM:
                by_group = unit_cost.reshape(math.gcd(*dp.values()), -1, num_llm)
                mean = by_group.sum(axis=1, keepdims=True) * len(by_group) // dp[unit]
                unit_cost = np.broadcast_to(mean, by_group.shape).reshape(unit_cost.shape)
            total += unit_cost
        return total

    return np.stack([total_cost(costs) for costs in costs_by_unit], axis=1).astype(np.float64)


def _by_block(costs: FloatArray, num_blocks: int) -> FloatArray:
    """(ranks, blocks) sums over the microbatches of each block, of (ranks, l)."""
    total: FloatArray = costs.reshape(len(costs), num_blocks, -1).sum(axis=2)
    return total


def _expand_blocks(orders: IntArray, num_microbatches: int) -> IntArray:
    """(k, l) orders of microbatches, from orders (k, blocks) of equal blocks of them."""
    by_block = np.arange(num_microbatches).reshape(orders.shape[1], -1)
    expanded: IntArray = by_block[orders].reshape(len(orders), num_microbatches)
    return expanded
