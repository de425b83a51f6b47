"""When each microbatch of a step runs: `reorder_microbatches` for the pipeline that a plan has."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.makespan_1f1b import makespans_1f1b
from mmtrain.balance.reordering import reorder_microbatches
from mmtrain.balance.schedule_recurrence import schedule_recurrence
from mmtrain.balance.step_targets import LLM, SampleWork, ScheduleTable, SequenceCost, StepTargets

SWAP_ROUNDS = 2  # of swaps: most of what can be had, in a few milliseconds
CostsByUnit = Mapping[str, SequenceCost]  # by unit


def order_microbatches(
    work: SampleWork,
    replica: IntArray,
    index: IntArray,
    targets: StepTargets,
    dp: Mapping[str, int],
    num: Mapping[str, int],
) -> IntArray:
    """(num_llm,) which microbatch runs at each turn, on all replicas alike.

    replica, index: (k,) LLM replica and microbatch of each sample of `work`. Blocks of microbatches that any unit
    merges move together. By the recurrence of 1F1B, or of the plan's own timetable, no step takes longer than in the
    order given.
    """
    given = np.arange(num[LLM])
    num_blocks = math.gcd(*num.values())
    if num_blocks < 3:  # of two, one order is as long as the other or nearly
        return given

    def costs(prices: Sequence[CostsByUnit]) -> FloatArray:
        return stage_costs(work, replica, index, prices, dp, num[LLM])

    if targets.schedule_table is not None:
        return _by_timetable(
            targets.schedule_table, costs([{t.unit: t.cost} for t in targets.schedule_table.tasks]), num
        )
    if len(targets.pipeline) < 2:
        return given
    forward, backward = costs([p.forward for p in targets.pipeline]), costs([p.backward for p in targets.pipeline])
    together, back = (_by_block(seconds.sum(axis=0), num_blocks)[None] for seconds in (forward, backward))
    blocks = reorder_microbatches(together, back, np.arange(num_blocks), SWAP_ROUNDS, np.random.default_rng(0))
    found = _in_blocks(blocks[None], num[LLM])[0]
    spans = makespans_1f1b(forward, backward, np.stack([given, found]))
    return found if spans[1] < spans[0] else given


def _by_timetable(table: ScheduleTable, costs: FloatArray, num: Mapping[str, int]) -> IntArray:
    """(num_llm,) as `order_microbatches`; costs: (dp_llm, tasks, num_llm)."""
    num_blocks, given = math.gcd(*num.values()), np.arange(num[LLM])
    for t, unit in enumerate(task.unit for task in table.tasks):  # a turn stands for its share of a whole block
        shared = math.gcd(num[unit], num[LLM])
        by_block = costs[:, t].reshape(len(costs), shared, -1)
        by_block[:] = by_block.sum(axis=2, keepdims=True) // (num[unit] // shared)
    recurrence = schedule_recurrence(table, tuple(sorted(num.items())))
    together = costs.sum(axis=0)
    forward, backward = (_by_block(seconds, num_blocks)[None] for seconds in recurrence.rank_seconds(together))
    blocks = reorder_microbatches(
        forward,
        backward,
        np.arange(num_blocks),
        SWAP_ROUNDS,
        np.random.default_rng(0),
        score=lambda orders: recurrence.makespans(together[None], _in_blocks(orders, num[LLM])),
    )
    found = _in_blocks(blocks[None], num[LLM])[0]
    spans = recurrence.makespans(costs, np.stack([given, found]))
    return found if spans[1] < spans[0] else given


def stage_costs(
    work: SampleWork, replica: IntArray, index: IntArray, prices: Sequence[CostsByUnit], dp: Mapping[str, int], num: int
) -> FloatArray:
    """(dp_llm, len(prices), num) what every LLM replica's microbatches cost under each of some prices.

    A replica group's encoders share the items of its LLM replicas evenly, so each LLM replica waits for the mean.
    """
    slot, units = replica * num + index, {unit for by_unit in prices for unit in by_unit}
    moments = {unit: work.moments(unit, slot, dp[LLM] * num).reshape(2, dp[LLM], num) for unit in units}

    def costs(by_unit: CostsByUnit) -> IntArray:
        total = np.zeros((dp[LLM], num), dtype=np.int64)
        for unit, price in by_unit.items():
            tokens, squares = moments[unit]
            own = price.linear * tokens + price.quadratic * squares
            if unit != LLM:
                groups = own.reshape(math.gcd(*dp.values()), -1, num)
                shared = groups.sum(axis=1, keepdims=True) * len(groups) // dp[unit]
                own = np.broadcast_to(shared, groups.shape).reshape(own.shape)
            total += own
        return total

    return np.stack([costs(by_unit) for by_unit in prices], axis=1).astype(np.float64)


def _by_block(costs: FloatArray, num_blocks: int) -> FloatArray:
    """(places, blocks) sums over the microbatches of each block."""
    total: FloatArray = costs.reshape(len(costs), num_blocks, -1).sum(axis=2)
    return total


def _in_blocks(orders: IntArray, num: int) -> IntArray:
    """(k, num) orders of microbatches that orders (k, blocks) of equal blocks of them stand for."""
    inside = np.arange(num).reshape(orders.shape[1], -1)
    found: IntArray = inside[orders].reshape(len(orders), num)
    return found
