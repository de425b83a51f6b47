"""Items of a step over all replicas: as even as post-balancing makes them, and near the replicas that read them."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchCost, IntArray, SequenceCost, StepTargets, assign, rebalance
from mmtrain.balance.dispatch.dispatch_items import (
    DispatchSizes,
    dispatch_items,
    place_batches_near,
    place_near,
    replicas_per_node,
)
from mmtrain.balance.dispatch.node_placement import off_node_bytes
from tests.balance.test_assign import make_groups, make_lengths

COST = SequenceCost(3, 2)


def _largest(costs: IntArray, slot: IntArray) -> int:
    return int(np.bincount(slot, costs).max(initial=0))


@pytest.mark.parametrize("as_padded", [False, True])
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 2), st.integers(0, 6), st.sampled_from([None, 1]))
def test_the_largest_batch_is_near_the_least_by_the_cost_of_the_policy(
    as_padded: bool, seed: int, dp: int, per_block: int, n: int, per_node: int | None
) -> None:
    """Within four thirds of it where items are packed, and the least itself where they count as padded."""
    rng = np.random.default_rng(seed)
    tokens, home = rng.integers(1, 30, n), rng.integers(0, dp, n)
    block, sizes = np.zeros(n, dtype=np.int64), DispatchSizes(dp, per_block, per_node)
    replica, index = dispatch_items(tokens, tokens, home, block, COST, sizes, as_padded)
    assert ((replica >= 0) & (replica < dp) & (index >= 0) & (index < per_block)).all()

    def largest(slot: IntArray) -> int:
        if not as_padded:
            return _largest(COST.of(tokens), slot)
        batches = [tokens[slot == number] for number in range(dp * per_block)]
        return max(len(batch) * int(COST.of(batch.max(initial=0))) for batch in batches)

    best = min(largest(np.array(slot, dtype=np.int64)) for slot in product(range(dp * per_block), repeat=n))
    bound = 1 + 1e-5 if as_padded else 4 / 3
    assert largest(replica * per_block + index) <= best * bound + 1e-9


def test_blocks_are_dispatched_by_themselves() -> None:
    rng = np.random.default_rng(0)
    tokens, home, block = rng.integers(1, 30, 40), np.zeros(40, dtype=np.int64), np.arange(40) // 20
    replica, index = dispatch_items(tokens, tokens, home, block, COST, DispatchSizes(4, 3))
    assert (index // 3 == block).all()
    for number in range(2):
        alone = dispatch_items(
            *(array[block == number] for array in (tokens, tokens, home, 0 * block)), COST, DispatchSizes(4, 3)
        )
        assert replica[block == number].tolist() == alone[0].tolist()


def test_items_stay_at_home_where_that_is_as_even() -> None:
    tokens, home = np.array([5, 5, 5, 5]), np.array([2, 0, 3, 1])
    replica, index = dispatch_items(tokens, tokens, home, np.zeros(4, dtype=np.int64), COST, DispatchSizes(4, 1))
    assert replica.tolist() == home.tolist()
    assert index.tolist() == [0, 0, 0, 0]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 8))
def test_half_of_what_could_stay_on_its_replica_does(seed: int, dp: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    batch, home, features = rng.integers(0, dp, n), rng.integers(0, dp, n), rng.integers(0, 9, n)
    places = place_near(batch, home, features, dp)
    assert sorted(places.tolist()) == list(range(dp))

    def staying(places: IntArray) -> int:
        return int(features[places[batch] == home].sum())

    assert 2 * staying(places) >= max(staying(np.array(order)) for order in permutations(range(dp)))


@given(st.integers(0, 10_000), st.sampled_from([(2, 1), (4, 2), (6, 2), (6, 3), (16, 4)]), st.integers(0, 30))
def test_nodes_permute_whole_batches_and_relieve_the_fullest_receiver(
    seed: int, nodes: tuple[int, int], n: int
) -> None:
    dp, per_node = nodes
    rng = np.random.default_rng(seed)
    batch, home, features = rng.integers(0, dp, n), rng.integers(0, dp, n), rng.integers(0, 9, n)

    def most_received(places: IntArray) -> int:
        return int(off_node_bytes(home, batch, features, places, per_node).max())

    regardless, node_wise = (
        place_batches_near(batch, home, features, DispatchSizes(dp, 1, p)) for p in (None, per_node)
    )
    assert sorted(node_wise.tolist()) == list(range(dp))
    assert most_received(node_wise) <= most_received(regardless)
    if dp <= 4:
        best = min(most_received(np.array(order)) for order in permutations(range(dp)))
        assert most_received(node_wise) <= 2 * best


def test_little_is_received_from_other_nodes_of_many() -> None:
    """As many items as 640 replicas have of a mix with many texts, some images and a few samples of eight."""
    rng = np.random.default_rng(0)
    home = np.repeat(np.arange(640), rng.choice([0, 1, 8], 640, p=[0.5, 0.3, 0.2]))
    features = np.clip(rng.lognormal(6, 1, len(home)).astype(np.int64), 1, 8192)
    batch = rebalance(features, home, 640, BatchCost())
    places = [place_batches_near(batch, home, features, DispatchSizes(640, 1, per_node)) for per_node in (None, 8)]
    received = [off_node_bytes(home, batch, features, replica, 8) for replica in places]
    assert received[1].max() < 0.7 * received[0].max()
    assert received[1].sum() < 0.95 * received[0].sum()
    again = place_batches_near(batch, home, features, DispatchSizes(640, 1, 8))
    assert again.tolist() == places[1].tolist()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((0, 0, 1, 1), 2),
        ((3, 3, 3, 4, 4, 4), 3),
        ((0, 0, 0), None),
        ((0, 0, 1), None),
        ((0, 1, 0, 1), None),
        ((), None),
    ],
)
def test_nodes_count_where_all_are_full(nodes: tuple[int, ...], expected: int | None) -> None:
    assert replicas_per_node(nodes) == expected


def test_a_step_keeps_its_balance_and_leaves_its_nodes_less() -> None:
    rng = np.random.default_rng(1)
    lengths, dp, num = make_lengths(rng, 96), {"llm": 8, "vision": 8}, {"llm": 2, "vision": 2}
    groups = make_groups(rng, 96, 16)
    worst, most_received = [], []
    for node_of in ((), (0, 0, 1, 1, 2, 2, 3, 3)):
        targets = StepTargets(dispatch=True, replica_nodes=dict.fromkeys(dp, node_of))
        meta = assign(0, 0, groups, lengths, dp, num, targets)
        table = meta.items["vision"]
        worst.append(_largest(table.tokens, table.replica * 2 + table.index))
        home = meta.replica[table.sample]
        of_batches = (table.index == index for index in range(2))
        received = [
            off_node_bytes(home[of], table.replica[of], table.features[of], np.arange(8), 2) for of in of_batches
        ]
        most_received.append([int(by_rank.max()) for by_rank in received])
    assert worst[1] == worst[0]
    assert all(most_received[1][index] <= most_received[0][index] for index in range(2))
    assert sum(most_received[1]) < sum(most_received[0])


@pytest.mark.parametrize("num_vision", [2, 4, 8])
def test_a_step_is_dispatched_without_moving_a_sample(num_vision: int) -> None:
    rng = np.random.default_rng(1)
    lengths, dp, num = make_lengths(rng, 48), {"llm": 4, "vision": 4}, {"llm": 4, "vision": num_vision}
    groups = make_groups(rng, 48, 16)
    at_home, dispatched = (assign(0, 0, groups, lengths, dp, num, StepTargets(dispatch=d)) for d in (False, True))
    assert dispatched.sample_id.tolist() == at_home.sample_id.tolist()
    assert dispatched.replica.tolist() == at_home.replica.tolist()
    largest = []
    for meta in (at_home, dispatched):
        table = meta.items["vision"]
        blocks = np.gcd(4, num_vision)
        block_of_sample = meta.index[table.sample] * blocks // 4
        assert (table.index * blocks // num_vision == block_of_sample).all(), "an item waits for its own block"
        order = np.lexsort((table.position, table.sample))
        rows = [column[order].tolist() for column in (table.sample, table.position, table.tokens, table.features)]
        largest.append((rows, _largest(table.tokens, table.replica * num_vision + table.index)))
    assert largest[0][0] == largest[1][0], "no item is lost"
    assert largest[1][1] < largest[0][1]
