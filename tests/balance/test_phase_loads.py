"""Loads of phases before and after balancing, against layouts that are made without it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchMeta, IntArray, SequenceCost, StepTargets, assign
from mmtrain.balance.dispatch.phase_loads import (
    OffNodeVolume,
    PhaseLoad,
    mean_off_node_volumes,
    mean_phase_loads,
    off_node_volumes,
    phase_loads,
    stream_groups_of,
)
from tests.balance.test_assign import make_groups, make_lengths

BALANCED = StepTargets(item_costs={"vision": SequenceCost(1)}, dispatch=True)
AS_STREAMED = StepTargets(reorder=False)


def _fullest(tokens: IntArray, replica: IntArray, index: IntArray) -> int:
    """Sum over the mini-batches the tokens of the fullest rank, one by one."""
    total = 0
    for of_index in np.unique(index):
        total += max(int(tokens[(index == of_index) & (replica == rank)].sum()) for rank in range(replica.max() + 1))
    return total


def _step(seed: int, num_ranks: int, num: dict[str, int], targets: StepTargets) -> BatchMeta:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 40)
    groups = make_groups(rng, 40, num_ranks * num["llm"])
    batch = assign(0, 0, groups, lengths, dict.fromkeys(num, num_ranks), num, targets)
    return replace(batch, stream_group=stream_groups_of(batch.sample_id, groups))


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1), (4, 4)]))
def test_loads_before_are_those_of_the_layout_without_balancing(
    seed: int, num_ranks: int, microbatches: tuple[int, int]
) -> None:
    num = dict(zip(("llm", "vision"), microbatches, strict=True))
    plain, balanced = (_step(seed, num_ranks, num, targets) for targets in (AS_STREAMED, BALANCED))
    loads = phase_loads(balanced, num_ranks, num)
    for unit, before, after in (
        ("llm", plain, balanced),
        ("vision", plain.items["vision"], balanced.items["vision"]),
    ):
        assert loads[unit].mean == pytest.approx(before.tokens.sum() / num_ranks)
        assert loads[unit].max_before == _fullest(before.tokens, before.replica, before.index)
        assert loads[unit].max_after == _fullest(after.tokens, after.replica, after.index)
    of_plain = phase_loads(plain, num_ranks, num)
    assert [(load.max_before, load.max_after) for load in of_plain.values()] == [
        (load.max_before, load.max_before) for load in loads.values()
    ]


@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (2, 2), (4, 2)]), st.sampled_from([1, 2, 4]))
def test_volumes_between_nodes_are_those_of_items_away_from_home(
    seed: int, microbatches: tuple[int, int], ranks_per_node: int
) -> None:
    num = dict(zip(("llm", "vision"), microbatches, strict=True))
    batch = _step(seed, 4, num, BALANCED)
    items = batch.items["vision"]
    volume = off_node_volumes(batch, ranks_per_node, dict.fromkeys(batch.items, 10))["vision"]
    total, fullest = 0, 0
    for index in range(num["vision"]):
        sent, received = [0] * 4, [0] * 4
        for row in np.flatnonzero(items.index == index).tolist():
            encoder, home = int(items.replica[row]), int(batch.replica[items.sample[row]])
            if encoder // ranks_per_node != home // ranks_per_node:
                sent[encoder] += 10 * int(items.features[row])
                received[home] += 10 * int(items.features[row])
        total += sum(sent)
        fullest += max(*sent, *received)
    assert (volume.total, volume.fullest) == (total, fullest)
    in_groups = off_node_volumes(batch, 2 * ranks_per_node, dict.fromkeys(batch.items, 10), tp=2)["vision"]
    assert (in_groups.total, in_groups.fullest) == (2 * total, fullest)  # each rank of a TP group moves all rows
    assert ranks_per_node < 4 or total == 0
    doubled = OffNodeVolume(2.0 * total, 2.0 * fullest)
    assert mean_off_node_volumes([{"vision": volume}, {"vision": doubled}])["vision"].total == 1.5 * total


def test_padding_counts_in_no_load() -> None:
    num = {"llm": 2, "vision": 2}
    batch = _step(3, 2, num, BALANCED)
    padded = replace(batch, tokens=batch.tokens + 5, padding=np.full_like(batch.tokens, 5))
    assert phase_loads(padded, 2, num) == phase_loads(batch, 2, num)


def test_a_sample_used_twice_is_found_in_both_groups() -> None:
    groups = [np.array([4, 7]), np.array([], dtype=np.int64), np.array([7, 1])]
    found = stream_groups_of(np.array([7, 1, 4, 7]), groups)
    assert found[1] == 2
    assert found[2] == 0
    assert sorted(found[[0, 3]].tolist()) == [0, 2]


def test_a_phase_without_work_is_even() -> None:
    assert PhaseLoad(0.0, 0.0, 0.0).over_mean == (1.0, 1.0)
    assert PhaseLoad(2.0, 3.0, 2.5).over_mean == (1.5, 1.25)
    steps = [{"llm": PhaseLoad(2.0, 3.0, 2.5)}, {"llm": PhaseLoad(4.0, 7.0, 4.5)}]
    assert mean_phase_loads(steps) == {"llm": PhaseLoad(3.0, 5.0, 3.5)}
