"""Items of a step over all replicas: as even as post-balancing makes them, and near the replicas that read them."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import IntArray, SequenceCost, StepTargets, assign
from mmtrain.balance.dispatch_items import dispatch_items, place_near
from tests.balance.test_assign import make_groups, make_lengths

COST = SequenceCost(3, 2)


def _largest(costs: IntArray, slot: IntArray) -> int:
    return int(np.bincount(slot, costs).max(initial=0))


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 2), st.integers(0, 6))
def test_the_largest_batch_is_within_four_thirds_of_the_least(seed: int, dp: int, per_block: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, home = rng.integers(1, 30, n), rng.integers(0, dp, n)
    replica, index = dispatch_items(tokens, tokens, home, np.zeros(n, dtype=np.int64), COST, dp, per_block)
    assert ((replica >= 0) & (replica < dp) & (index >= 0) & (index < per_block)).all()
    costs = COST.of(tokens)
    slots = np.array(list(product(range(dp * per_block), repeat=n)), dtype=np.int64)
    best = min(_largest(costs, slot) for slot in slots)
    assert _largest(costs, replica * per_block + index) <= best * 4 / 3 + 1e-9


def test_blocks_are_dispatched_by_themselves() -> None:
    rng = np.random.default_rng(0)
    tokens, home, block = rng.integers(1, 30, 40), np.zeros(40, dtype=np.int64), np.arange(40) // 20
    replica, index = dispatch_items(tokens, tokens, home, block, COST, 4, 3)
    assert (index // 3 == block).all()
    for number in range(2):
        alone = dispatch_items(*(array[block == number] for array in (tokens, tokens, home, 0 * block)), COST, 4, 3)
        assert replica[block == number].tolist() == alone[0].tolist()


def test_items_stay_at_home_where_that_is_as_even() -> None:
    tokens, home = np.array([5, 5, 5, 5]), np.array([2, 0, 3, 1])
    replica, index = dispatch_items(tokens, tokens, home, np.zeros(4, dtype=np.int64), COST, 4, 1)
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
