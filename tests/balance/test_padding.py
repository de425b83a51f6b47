"""Padded baselines: mini-batches that stay within `seq_len` with their padding, and what padding adds to a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.grouping.methods import GroupingMethod
from mmtrain.balance.grouping.pack_groups import group_randomly
from mmtrain.balance.grouping.padding import pad_microbatches, without_padding
from mmtrain.data import GroupStream
from mmtrain.planning.space.sample_batches import sample_batches

BASELINES: tuple[GroupingMethod, ...] = ("random", "length", "device")


def padded_size(tokens: np.ndarray, samples: np.ndarray) -> int:
    return int(tokens[samples, 0].max()) * len(samples)


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 3), st.integers(1, 6))
def test_a_padded_mini_batch_closes_before_its_padding_would_pass_the_budget(
    seed: int, num_samples: int, num_budgets: int, batch: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 30, (num_samples, num_budgets))
    budgets = rng.integers(30, 80, num_budgets)
    groups = group_randomly(tokens, budgets, batch, np.random.default_rng(seed), pad=True)

    def fits(samples: np.ndarray) -> bool:
        others = (tokens[samples, 1:].sum(axis=0) <= budgets[1:]).all()
        return len(samples) <= batch and padded_size(tokens, samples) <= budgets[0] and bool(others)

    assert groups.samples.tolist() == np.random.default_rng(seed).permutation(num_samples).tolist()
    for i in range(len(groups)):
        assert fits(groups[i])
        assert i + 1 == len(groups) or not fits(np.append(groups[i], groups[i + 1][0])), "closed too early"


@pytest.mark.parametrize("method", BASELINES)
def test_batches_of_training_and_planning_count_the_padding(method: GroupingMethod) -> None:
    tokens = np.random.default_rng(0).integers(5, 120, 400)
    lengths = SampleLengths(tokens, tokens, {})
    grouping = Grouping(400, 400, 8, method, pad=True)
    dp, num_microbatches = {"llm": 4}, {"llm": 2}
    trained = GroupStream(lengths, grouping, 0).batch(0, 8, dp, num_microbatches)
    planned = sample_batches(lengths, grouping, 0).lay_out(dp, num_microbatches)
    for meta in (trained, *planned):
        assert meta.padding is not None
        assert meta.sample_tokens.tolist() == tokens[meta.sample_id].tolist()
        assert without_padding(meta).tokens.tolist() == meta.sample_tokens.tolist()
        for replica, index in np.ndindex(4, 2):
            rows = meta.microbatch(replica, index)
            assert set(meta.tokens[rows].tolist()) == {int(meta.sample_tokens[rows].max())}
            assert meta.tokens[rows].sum() <= 400
    total = sum(int(meta.padding.sum()) for meta in planned if meta.padding is not None)
    assert total > 0
    unpadded = sample_batches(lengths, Grouping(400, 400, 8, method), 0).lay_out(dp, num_microbatches)
    assert all(meta.padding is None for meta in unpadded)
    again = pad_microbatches(without_padding(planned[0]))
    assert again.tokens.tolist() == planned[0].tokens.tolist()
