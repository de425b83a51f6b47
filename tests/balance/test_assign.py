"""The layout of a global batch: every sample and item once, in the declared order, and loads even."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import (
    BalancedLoad,
    BatchMeta,
    IntArray,
    ItemLengths,
    SampleLengths,
    SequenceCost,
    StepTargets,
    assign,
)
from mmtrain.balance.assign import longest_first


def make_lengths(rng: np.random.Generator, num_samples: int) -> SampleLengths:
    counts = rng.integers(0, 4, num_samples)
    rows, cols = rng.integers(1, 9, counts.sum()), rng.integers(1, 9, counts.sum())
    first = np.concatenate([[0], np.cumsum(counts)])
    items = ItemLengths(first, rows, cols, rows * cols + 1, rows * cols)
    features = np.array([items.features[a:b].sum() for a, b in itertools.pairwise(first)], dtype=np.int64)
    text = rng.integers(3, 50, num_samples)
    return SampleLengths(features + text, text - 1, {"vision": items})


def make_groups(rng: np.random.Generator, num_samples: int, num_groups: int) -> list[IntArray]:
    cuts = np.sort(rng.choice(np.arange(1, num_samples), num_groups - 1, replace=False))
    return np.split(rng.permutation(num_samples), cuts)


def test_without_reordering_groups_run_as_they_come() -> None:
    rng = np.random.default_rng(0)
    lengths, dp, num = make_lengths(rng, 40), {"llm": 2, "vision": 2}, {"llm": 4, "vision": 4}
    groups = make_groups(rng, 40, 8)
    loads = (BalancedLoad({"llm": SequenceCost(1)}),)
    meta = assign(0, 0, groups, lengths, dp, num, StepTargets(loads, reorder=False))
    for position, group in enumerate(groups):
        index, replica = divmod(position, 2)
        assert meta.sample_id[meta.microbatch(replica, index)].tolist() == group.tolist()
    assert len(meta.items["vision"].tokens) == sum(np.diff(lengths.items["vision"].first))


cases = st.tuples(  # seed, dp of vision and of the llm, microbatches of each
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.integers(1, 4),
)


def laid_out(case: tuple[int, int, int, int, int]) -> tuple[SampleLengths, list[IntArray], BatchMeta]:
    seed, dp_vision, dp_llm, num_vision, num_microbatches = case
    rng = np.random.default_rng(seed)
    num_groups = dp_llm * num_microbatches
    lengths = make_lengths(rng, 3 * num_groups)
    groups = make_groups(rng, 3 * num_groups, num_groups)
    dp, counts = {"vision": dp_vision, "llm": dp_llm}, {"vision": num_vision, "llm": num_microbatches}
    return lengths, groups, assign(7, 2, groups, lengths, dp, counts)


@given(cases)
def test_a_batch_holds_every_sample_and_item_once_in_declared_order(case: tuple[int, int, int, int, int]) -> None:
    _, _, dp_llm, _, num_microbatches = case
    lengths, groups, meta = laid_out(case)

    assert (meta.step, meta.epoch) == (7, 2)
    placed = [meta.sample_id[meta.microbatch(r, i)].tolist() for r in range(dp_llm) for i in range(num_microbatches)]
    assert sorted(placed) == sorted(g.tolist() for g in groups), "groups stay whole and keep their inner order"
    assert list(itertools.chain.from_iterable(placed)) == meta.sample_id.tolist(), "rows ordered by (replica, index)"
    assert meta.total_targets == lengths.targets.sum()
    place_in_stream = {tuple(g.tolist()): p for p, g in enumerate(groups)}
    for r in range(dp_llm):
        of_replica = [place_in_stream[tuple(placed[r * num_microbatches + i])] for i in range(num_microbatches)]
        assert of_replica == sorted(of_replica)

    table = meta.items["vision"]
    source = lengths.items["vision"]
    seen = list(zip(table.sample.tolist(), table.position.tolist(), strict=True))
    expected = [
        (s, p) for s, sid in enumerate(meta.sample_id) for p in range(source.first[sid + 1] - source.first[sid])
    ]
    assert sorted(seen) == expected, "every item once"
    row = source.first[meta.sample_id[table.sample]] + table.position
    for name in ("rows", "cols", "tokens", "features"):
        assert getattr(table, name).tolist() == getattr(source, name)[row].tolist()
    keys = list(zip(table.replica, table.index, table.sample, table.position, strict=True))
    assert keys == sorted(keys), "rows ordered by (replica, index, sample, position)"
    assert table.microbatch(0, 0).tolist() == [j for j, k in enumerate(keys) if k[:2] == (0, 0)]


@given(cases)
def test_items_stay_in_their_block_and_are_spread_evenly(case: tuple[int, int, int, int, int]) -> None:
    _, dp_vision, dp_llm, num_vision, num_microbatches = case
    _, _, meta = laid_out(case)
    table = meta.items["vision"]
    g = math.gcd(dp_vision, dp_llm)

    blocks = math.gcd(num_vision, num_microbatches)
    assert (table.index * blocks // num_vision == meta.index[table.sample] * blocks // num_microbatches).all()
    assert (table.replica // (dp_vision // g) == meta.replica[table.sample] // (dp_llm // g)).all()
    for q in range(g):
        of_group = range(q * dp_vision // g, (q + 1) * dp_vision // g)
        for b in range(blocks):
            of_block = range(b * num_vision // blocks, (b + 1) * num_vision // blocks)
            loads = [int(table.tokens[table.microbatch(r, i)].sum()) for r in of_group for i in of_block]
            tokens = [int(t) for r in of_group for i in of_block for t in table.tokens[table.microbatch(r, i)]]
            assert max(loads) - min(loads) <= max(tokens, default=0)


@given(cases)
def test_items_are_assigned_by_cost_and_blocks_make_up_for_each_other(
    case: tuple[int, int, int, int, int],
) -> None:
    seed, dp_vision, dp_llm, num_vision, num = case
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3 * dp_llm * num)
    groups = make_groups(rng, 3 * dp_llm * num, dp_llm * num)
    dp, counts = {"vision": dp_vision, "llm": dp_llm}, {"vision": num_vision, "llm": num}
    item_cost = SequenceCost(1, 5)
    table = assign(0, 0, groups, lengths, dp, counts, StepTargets(item_costs={"vision": item_cost})).items["vision"]
    costs = item_cost.of(table.tokens)
    loads = np.zeros((dp_vision, num_vision), dtype=np.int64)
    np.add.at(loads, (table.replica, table.index), costs)
    g, blocks = math.gcd(dp_vision, dp_llm), math.gcd(num_vision, num)
    of_block = loads.reshape(g, dp_vision // g, blocks, num_vision // blocks)
    largest = int(costs.max(initial=0))
    assert (of_block.max(axis=(1, 3)) - of_block.min(axis=(1, 3)) <= largest).all()
    step_loads = of_block.sum(axis=(2, 3))  # (groups, replicas)
    block_loads = of_block.sum(axis=3)  # (groups, replicas, blocks)
    block_spread = (block_loads.max(axis=1) - block_loads.min(axis=1)).max(initial=0)
    step_spread = step_loads.max(axis=1) - step_loads.min(axis=1)
    assert (step_spread <= block_spread).all(), "replicas differ in a step no more than in one block"


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 5))
def test_replicas_are_even_in_the_targeted_cost(seed: int, dp: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3 * dp * num)
    groups = make_groups(rng, 3 * dp * num, dp * num)
    targets = StepTargets((BalancedLoad({"llm": SequenceCost(1, 3)}),))
    meta = assign(0, 0, groups, lengths, {"vision": 1, "llm": dp}, {"vision": num, "llm": num}, targets)
    loads = np.zeros((num, dp), dtype=np.int64)
    np.add.at(loads, (meta.index, meta.replica), SequenceCost(1, 3).of(meta.tokens))
    total = loads.sum(axis=0)
    microbatch_spread = loads.max(axis=1) - loads.min(axis=1)
    assert total.max() - total.min() <= microbatch_spread.max() + 1e-6 * total.max()


def _best_partition(sizes: list[int], num_bins: int) -> int:
    """Return the least possible largest load, by trying every partition."""
    choices = itertools.product(range(num_bins), repeat=len(sizes))
    return min(int(np.bincount(choice, weights=sizes, minlength=num_bins).max()) for choice in choices)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_keeps_grahams_bound(sizes: list[int], num_bins: int) -> None:
    sizes = sorted(sizes, reverse=True)
    bins = longest_first(sizes, num_bins)
    largest = max(np.bincount(bins, weights=sizes, minlength=num_bins))
    assert largest <= (4 / 3 - 1 / (3 * num_bins)) * _best_partition(sizes, num_bins) + 1e-9


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6))
def test_neighbors_in_the_stream_run_side_by_side_and_replicas_stay_even(seed: int, dp: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3 * dp * num)
    groups = make_groups(rng, 3 * dp * num, dp * num)
    meta = assign(0, 0, groups, lengths, {"vision": 1, "llm": dp}, {"vision": num, "llm": num})
    tokens = np.array([lengths.tokens[g].sum() for g in groups]).reshape(num, dp)
    loads = np.zeros((num, dp), dtype=np.int64)
    for i, r in itertools.product(range(num), range(dp)):
        rows = meta.microbatch(r, i)
        loads[i, r] = meta.tokens[rows].sum()
        assert set(meta.sample_id[rows].tolist()) in [set(g.tolist()) for g in groups[i * dp : (i + 1) * dp]]
    assert np.sort(loads).tolist() == np.sort(tokens).tolist()
    total = loads.sum(axis=0)
    microbatch_spread = tokens.max(axis=1) - tokens.min(axis=1)
    assert total.max() - total.min() <= microbatch_spread.max(), "a microbatch makes up for the one before it"


def test_a_text_only_batch_has_an_empty_item_table() -> None:
    none = np.empty(0, dtype=np.int64)
    lengths = SampleLengths(
        np.array([5, 6]), np.array([1, 2]), {"vision": ItemLengths(np.zeros(3, dtype=np.int64), none, none, none, none)}
    )
    meta = assign(0, 0, [np.array([1]), np.array([0])], lengths, {"vision": 1, "llm": 2}, {"vision": 1, "llm": 1})
    assert len(meta.items["vision"].sample) == 0
    assert len(meta.items["vision"].microbatch(0, 0)) == 0
    assert sorted(meta.sample_id.tolist()) == [0, 1]


def test_the_number_of_groups_must_match() -> None:
    lengths = make_lengths(np.random.default_rng(0), 4)
    with pytest.raises(ValueError, match="3 groups for 2 replicas"):
        assign(0, 0, [np.array([i]) for i in range(3)], lengths, {"vision": 1, "llm": 2}, {"vision": 2, "llm": 2})


def test_groups_of_an_evaluation_may_be_empty() -> None:
    tokens = np.array([5, 7, 11], dtype=np.int64)
    groups = [np.array([0, 2]), np.array([], dtype=np.int64), np.array([1]), np.array([], dtype=np.int64)]
    meta = assign(0, 0, groups, SampleLengths(tokens, tokens, {}), {"llm": 2}, {"llm": 2})
    assert sorted(meta.sample_id.tolist()) == [0, 1, 2]
    assert sorted(meta.microbatch(r, i).size for r in range(2) for i in range(2)) == [0, 0, 1, 2]
