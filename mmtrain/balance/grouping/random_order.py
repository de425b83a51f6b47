"""Order the groups of a window at random, so that the steps cut from it vary no more than shuffled samples would.

Packing puts alike samples together: where two or three samples fill a group, those of one size meet, and some groups
stay emptier than others. A step of such groups varies more than one of as many single samples, although it is drawn by
chance.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray, SampleTokens
from mmtrain.balance.grouping.pack_groups import SampleGroups
from mmtrain.balance.matched.group_exchange import ROUNDING

MAX_RATIO = 1.1  # of a step's variance over that of shuffled samples, above which groups are dealt by strata
MAX_FULLNESS_RATIO = 0.05  # the same of the part that comes from some groups being emptier than others


@dataclass(frozen=True)
class _Excess:
    """By how much steps of groups in random order would vary more than steps of shuffled samples."""

    stratified_share: float  # of the groups, to be dealt by strata of `surplus`
    surplus: FloatArray  # (G,) of the load that varies most, beyond what is usual for as many LLM tokens
    by_fullness: bool  # whether all groups are to be dealt by strata of their LLM tokens as well
    left_share: float  # of the variance of a step, that is left behind this


def random_order(
    groups: SampleGroups, tokens: IntArray | SampleTokens, step_size: int, num_before: int, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """Return an order (G,) of groups, in steps of `step_size`, for which no load varies more than by chance.

    Also returns what share of the variance of groups in random order is left, at least, for any load.

    tokens: (n, m) of each sample under each unit, the LLM's first. num_before: groups of the stream before these; they
    may end inside a step.

    The variance of a step in shuffled samples is that of what its samples have more of a load than is usual for their
    LLM tokens. If groups in random order would exceed it r times, a random share of 1 - 1/r of the groups is sorted and
    dealt to the steps in turns. That takes away the variance of this share. Every group may still come into any step.
    """
    order = rng.permutation(len(groups)).astype(np.int64)
    in_groups = groups.loads(tokens)
    excess = _excess(tokens[groups.samples].astype(np.float64), in_groups.astype(np.float64), in_groups.sum(axis=0))
    if not excess.stratified_share and not excess.by_fullness:
        return order, 1.0
    places = _places_in_turns(len(groups), step_size, num_before, rng)
    num_stratified = round(excess.stratified_share * len(groups))
    stratified, others = order[:num_stratified], order[num_stratified:]
    fullness = in_groups[:, 0]
    stratified = stratified[np.argsort(excess.surplus[stratified], kind="stable")]
    if excess.by_fullness:
        num_slices = math.isqrt(round(excess.stratified_share * step_size))  # each has as many strata of fullness
        slices = np.arange(num_stratified) * num_slices // max(num_stratified, 1)
        stratified = stratified[np.lexsort((fullness[stratified], slices))]
        others = others[np.argsort(fullness[others], kind="stable")]
    in_steps = np.empty(len(groups), dtype=np.int64)
    in_steps[places] = np.concatenate([stratified, others])
    return in_steps, excess.left_share


def _excess(of_samples: FloatArray, of_groups: FloatArray, totals: IntArray) -> _Excess:
    """Compare groups (G, m) with their samples (k, m), load by load; totals: (m,).

    Sums are exact, so that all machines find the same.
    """
    sums = totals.tolist()
    loads = []  # of each encoder: the density, what shuffled samples vary by, and what groups have beyond the usual
    for column in range(1, len(sums)) if sums[0] else ():
        density = sums[column] / sums[0]
        chance = _sum_of_squares(of_samples[:, column] - density * of_samples[:, 0])
        if chance > ROUNDING * _sum_of_squares(of_samples[:, column]):
            loads.append((density, chance, of_groups[:, column] - density * of_groups[:, 0]))
    excess = _Excess(0.0, np.zeros(len(of_groups)), False, 1.0)
    if not loads:
        return excess
    emptiness = _sum_of_squares(of_groups[:, 0] - sums[0] / len(of_groups))
    by_fullness = any(density**2 * emptiness > MAX_FULLNESS_RATIO * chance for density, chance, _ in loads)
    largest_ratio, left_share = MAX_RATIO, 1.0
    for density, chance, surplus in loads:
        ratio = _sum_of_squares(surplus) / chance
        left_share = min(left_share, 1 / max(ratio + density**2 * emptiness / chance, 1.0))
        if ratio > largest_ratio:
            largest_ratio = ratio
            excess = replace(excess, stratified_share=1 - 1 / ratio, surplus=surplus)
    if not excess.stratified_share and not by_fullness:
        return excess
    return replace(excess, by_fullness=by_fullness, left_share=left_share)


def _sum_of_squares(values: FloatArray) -> float:
    return math.fsum((values**2).tolist())


def _places_in_turns(num_groups: int, step_size: int, num_before: int, rng: np.random.Generator) -> IntArray:
    """Return all places (G,) of the window, at random, but such that any run of them is spread over all steps."""
    step = (num_before % step_size + np.arange(num_groups)) // step_size
    counts = np.bincount(step)
    shuffled = rng.permutation(num_groups)
    by_step = shuffled[np.argsort(step[shuffled], kind="stable")]
    number_in_step = np.arange(num_groups) - np.repeat(np.cumsum(counts) - counts, counts)
    turn = (number_in_step + rng.random(num_groups)) / np.repeat(counts, counts)
    places: IntArray = by_step[np.argsort(turn, kind="stable")]
    return places
