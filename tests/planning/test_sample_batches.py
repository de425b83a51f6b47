"""Sampled batches are whole, fit their groups, and represent the steps of a run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, ItemLengths, SampleLengths
from mmtrain.balance.batch_meta import mean_tokens
from mmtrain.balance.columns import SourceValues
from mmtrain.balance.grouping.methods import unit_tokens
from mmtrain.errors import PlanError
from mmtrain.planning.space.budget import SamplingBudget
from mmtrain.planning.space.sample_batches import sample_batches
from tests.planning.factory import lengths, text_lengths


@given(
    st.integers(1, 40), st.sampled_from([1, 2, 8]), st.sampled_from(["matched", "isf", "random", "length", "device"])
)
def test_batches_are_whole_and_groups_fit(num_samples: int, global_batch: int, method: str) -> None:
    samples = lengths(num_samples)
    grouping = Grouping(384, 64, global_batch, method)  # type: ignore[arg-type]
    sampled = sample_batches(samples, grouping, seed=3)
    assert [len(groups) for groups in sampled.groups] == [global_batch] * 3
    assert all(0 < samples.tokens[g].sum() <= 384 for groups in sampled.groups for g in groups)
    again = sample_batches(samples, grouping, seed=3)
    assert [[g.tolist() for g in b] for b in sampled.groups] == [[g.tolist() for g in b] for b in again.groups]


def test_a_few_sampled_batches_represent_the_variation_of_steps() -> None:
    """Sample few steps, although groups of a step are alike and three random steps often misjudge images."""
    samples = lengths(2000)
    work = unit_tokens(samples)[1].astype(np.float64)
    share = work.sum(axis=0) / work[:, 0].sum()
    for seed in range(8):
        sampled = sample_batches(samples, Grouping(384, 4096, 4), seed)
        mean = work[np.concatenate([g for groups in sampled.groups for g in groups])].sum(axis=0)
        assert mean / mean[0] == pytest.approx(share, rel=0.08)


@pytest.mark.parametrize(("method", "num_batches"), [("matched", 2), ("isf", 2), ("device", 3)])
def test_of_steps_with_very_many_samples_fewer_are_taken(method: str, num_batches: int) -> None:
    """Such steps hardly differ, but those of `device`, whose groups are alike."""
    samples = lengths(2000)
    grouping = Grouping(384, 4096, 64, method)  # type: ignore[arg-type]
    per_step = 64 * 384 / mean_tokens(samples)[0]
    budget = SamplingBudget(max_samples=int(2.5 * per_step))
    assert len(sample_batches(samples, grouping, 0, budget).groups) == num_batches
    least = sample_batches(samples, grouping, 0, SamplingBudget(max_samples=1))
    assert len(least.groups) == (3 if method == "device" else 1)


@pytest.mark.parametrize(("change", "num_batches"), [("none", 1), ("text", 3), ("picture", 3), ("count", 3)])
def test_one_step_stands_for_all_where_samples_are_alike(change: str, num_batches: int) -> None:
    tokens, sizes = np.full(60, 100), np.full(60, 4)
    first = np.arange(61)
    if change == "text":
        tokens[::2] = 90
    elif change == "picture":
        sizes[::2] = 2
    elif change == "count":
        first = np.minimum(2 * ((first + 1) // 2), 60)  # two pictures in every other sample
    items = ItemLengths(first, sizes, sizes, sizes * sizes, sizes * sizes // 4)
    samples = SampleLengths(tokens, tokens // 2, {"vision": items})
    sampled = sample_batches(samples, Grouping(384, 64, 4), seed=0)
    assert len(sampled.groups) == len(sampled.unmatched) == num_batches


def test_of_many_samples_few_are_drawn_as_often_as_training_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtrain.balance.grouping.groups_per_step.MAX_SHUFFLED_SAMPLES", 100)
    samples, grouping = lengths(2000), Grouping(384, 256, 4)
    drawn = np.concatenate([group for groups in sample_batches(samples, grouping, 0).groups for group in groups])
    assert len(set(drawn.tolist())) == len(drawn), "each once"
    sources = np.repeat([0, 1], [1900, 100])
    uses = SourceValues(sources, np.array([0.1, 1.9]))
    sampled = sample_batches(replace(samples, uses=uses), grouping, 0)
    drawn = np.concatenate([group for groups in sampled.groups for group in groups])
    assert np.mean(sources[drawn]) == pytest.approx(0.5, abs=0.15), "half of all uses are of the second source"


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_tokens_are_those_of_all_blocks(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = lengths(100)
    uses = np.random.default_rng(0).random(100) if weighted else None
    monkeypatch.setattr("mmtrain.balance.columns.BLOCK_ROWS", 7)
    expected = np.average(unit_tokens(samples)[1], axis=0, weights=uses)
    assert mean_tokens(replace(samples, uses=uses)) == pytest.approx(expected)


def test_no_samples_are_an_error_of_the_data() -> None:
    with pytest.raises(PlanError, match=r"data\.sources: no usable sample"):
        sample_batches(text_lengths(0), Grouping(384, 64, 2), seed=0)
