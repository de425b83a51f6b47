"""Place encoder batches so that little leaves a node: as well as any placement can."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import ItemTable, StepTargets, assign
from mmtrain.balance.dispatch.node_placement import place_batches
from tests.balance.test_assign import make_groups, make_lengths


def _largest_sender(volume: np.ndarray, node_of: list[int], placed: list[int]) -> int:
    return max(int(volume[j].sum() - volume[j, node_of[r]]) for j, r in enumerate(placed))


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
def test_no_placement_has_a_smaller_largest_sender(seed: int, d: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    volume = rng.integers(0, 30, (d, nodes))
    node_of = rng.integers(0, nodes, d).tolist()
    placed = place_batches(volume, node_of).tolist()
    assert sorted(placed) == list(range(d))
    best = min(_largest_sender(volume, node_of, list(p)) for p in itertools.permutations(range(d)))
    assert _largest_sender(volume, node_of, placed) == best
    if _largest_sender(volume, node_of, list(range(d))) == best:
        assert placed == list(range(d)), "no batch moves without need"


@given(st.integers(0, 10_000), st.sampled_from([(3, 2), (4, 1), (6, 4), (4, 2)]), st.sampled_from([1, 3]))
def test_a_layout_sends_no_more_off_its_nodes_and_keeps_its_loads(seed: int, dp: tuple[int, int], num: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups = dp[1] * num
    lengths = make_lengths(rng, 3 * num_groups)
    groups = make_groups(rng, 3 * num_groups, num_groups)
    nodes = {"vision": tuple(rng.integers(0, 3, dp[0]).tolist()), "llm": tuple(rng.integers(0, 3, dp[1]).tolist())}
    sizes, counts = {"vision": dp[0], "llm": dp[1]}, {"vision": num, "llm": num}
    plain, near = (
        assign(0, 0, groups, lengths, sizes, counts, a) for a in (StepTargets(), StepTargets(replica_nodes=nodes))
    )
    per_group = dp[0] // int(np.gcd(*dp))
    llm_node = np.array(nodes["llm"])

    def senders(table: ItemTable) -> np.ndarray:
        """Return for each group, (groups,), the most that one of its encoder replicas sends off its node."""
        leaves = np.array(nodes["vision"])[table.replica] != llm_node[plain.replica[table.sample]]
        sent = np.zeros(dp[0], dtype=np.int64)
        np.add.at(sent, table.replica[leaves], table.features[leaves])
        largest: np.ndarray = sent.reshape(-1, per_group).max(axis=1)
        return largest

    def loads(table: ItemTable) -> list[list[int]]:
        tokens = np.zeros((dp[0], num), dtype=np.int64)
        np.add.at(tokens, (table.replica, table.index), table.tokens)
        return sorted(map(sorted, tokens.reshape(-1, per_group * num).tolist()))

    tables = plain.items["vision"], near.items["vision"]
    assert plain.sample_id.tolist() == near.sample_id.tolist()
    assert (senders(tables[1]) <= senders(tables[0])).all()
    assert loads(tables[0]) == loads(tables[1])


@pytest.mark.parametrize("size", [200])
def test_many_replicas_are_placed_exactly(size: int) -> None:
    rng = np.random.default_rng(0)
    home = rng.permutation(size)
    volume = np.zeros((size, size), dtype=np.int64)
    volume[np.arange(size), home] = 5
    volume += 1
    placed = place_batches(volume, list(range(size)))
    assert placed.tolist() == home.tolist()
