"""When each microbatch of a step runs: ordering in time (`order.across_time`) for the pipeline that a plan has."""

import math
from collections.abc import Mapping

import numpy as np

from mmtrain.balance.aims import LLM, Place, Price, StepAims, Work
from mmtrain.balance.batch import FloatArray, IntArray
from mmtrain.balance.order import across_time, makespans

ROUNDS = 2  # of swaps: most of what can be had, in a few milliseconds


def in_turn(
    work: Work, replica: IntArray, index: IntArray, aims: StepAims, dp: Mapping[str, int], num: Mapping[str, int]
) -> IntArray:
    """(num_llm,) which microbatch runs at each turn, on all replicas alike.

    replica, index: (k,) LLM replica and microbatch of each sample of `work`. Blocks of microbatches that any unit
    merges move together. By the recurrence of 1F1B no step takes longer than in the order given.
    """
    given = np.arange(num[LLM])
    num_blocks = math.gcd(*num.values())
    if len(aims.places) < 2 or num_blocks < 3:  # of two, one order is as long as the other or nearly
        return given
    forward, backward = stage_costs(work, replica, index, aims.places, dp, num[LLM])
    together, back = (_by_block(costs.sum(axis=0), num_blocks)[None] for costs in (forward, backward))
    blocks = across_time(together, back, np.arange(num_blocks), ROUNDS, np.random.default_rng(0))
    found: IntArray = given.reshape(num_blocks, -1)[blocks].ravel()
    spans = makespans(forward, backward, np.stack([given, found]))
    return found if spans[1] < spans[0] else given


def stage_costs(
    work: Work, replica: IntArray, index: IntArray, places: tuple[Place, ...], dp: Mapping[str, int], num: int
) -> tuple[FloatArray, FloatArray]:
    """(dp_llm, places, num) forward and backward of every LLM replica's microbatches.

    A replica group's encoders share the items of its LLM replicas evenly, so each LLM replica waits for the mean.
    """
    slot = replica * num + index

    def costs(prices: Mapping[str, Price]) -> IntArray:
        total = np.zeros((dp[LLM], num), dtype=np.int64)
        for unit, price in prices.items():
            each = np.zeros(dp[LLM] * num, dtype=np.int64)
            np.add.at(each, slot, work.costs({unit: price}))
            own = each.reshape(dp[LLM], num)
            if unit != LLM:
                groups = own.reshape(math.gcd(*dp.values()), -1, num)
                shared = groups.sum(axis=1, keepdims=True) * len(groups) // dp[unit]
                own = np.broadcast_to(shared, groups.shape).reshape(own.shape)
            total += own
        return total

    forward, backward = (np.stack([costs(getattr(p, way)) for p in places], axis=1) for way in ("forward", "backward"))
    return forward.astype(np.float64), backward.astype(np.float64)


def _by_block(costs: FloatArray, num_blocks: int) -> FloatArray:
    """(places, blocks) sums over the microbatches of each block."""
    total: FloatArray = costs.reshape(len(costs), num_blocks, -1).sum(axis=2)
    return total
