from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.data import DataIndex, GroupStream, validation_batches
from mmtrain.errors import DataError


def make_lengths(seed: int, num_samples: int, longest: int = 40) -> SampleLengths:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, longest + 1, num_samples)
    none = np.empty(0, dtype=np.int64)
    items = ItemLengths(np.zeros(num_samples + 1, dtype=np.int64), none, none, none, none)
    return SampleLengths(tokens, np.ones_like(tokens), {"vision": items})


def contents(stream: GroupStream, first: int, count: int) -> list[list[int]]:
    return [g.tolist() for g in stream.groups(first, count)]


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_an_epoch_uses_every_sample_once_and_epochs_follow_each_other(seed: int, num_samples: int, window: int) -> None:
    lengths = make_lengths(seed, num_samples)
    stream = GroupStream(lengths, seq_len=40, window=window, seed=seed)
    sizes = [len(stream.epoch(e)) for e in range(3)]
    groups = contents(stream, 0, sum(sizes))
    for e in range(3):
        of_epoch = groups[sum(sizes[:e]) : sum(sizes[: e + 1])]
        assert sorted(s for g in of_epoch for s in g) == list(range(num_samples))
    assert all(lengths.tokens[g].sum() <= 40 for g in groups)


@given(st.integers(0, 1000), st.integers(0, 80), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_seeking_equals_iterating(seed: int, first: int, count: int) -> None:
    lengths = make_lengths(seed, 50)
    iterated = contents(GroupStream(lengths, 40, 16, seed), 0, first + count)[first:]
    assert contents(GroupStream(lengths, 40, 16, seed), first, count) == iterated
    revisited = GroupStream(lengths, 40, 16, seed)
    contents(revisited, first + 200, 1)
    assert contents(revisited, first, count) == iterated, "going back gives the same groups"


@given(st.integers(0, 1000), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_plan_sees_the_same_batches(seed: int, step: int) -> None:
    lengths = make_lengths(seed, 80)
    expected = sorted(sorted(g) for g in contents(GroupStream(lengths, 40, 32, seed), step * 12, 12))
    for dp, num_microbatches in ((1, 12), (2, 6), (3, 4), (4, 3), (12, 1)):
        stream = GroupStream(lengths, 40, 32, seed)
        meta = stream.batch(step, 12, {"vision": 2, "llm": dp}, num_microbatches)
        places = [(r, i) for r in range(dp) for i in range(num_microbatches)]
        got = sorted(sorted(meta.sample_id[meta.microbatch(r, i)].tolist()) for r, i in places)
        assert got == expected
        assert meta.step == step


def test_seeds_and_epochs_shuffle_anew() -> None:
    lengths = make_lengths(0, 50)
    stream = GroupStream(lengths, 40, 64, seed=1)
    first, second = (stream.epoch(e).samples.tolist() for e in range(2))
    other = GroupStream(lengths, 40, 64, seed=2).epoch(0).samples.tolist()
    assert first != second
    assert first != other


def test_weights_repeat_samples_and_fractions_alternate_by_chance() -> None:
    lengths = make_lengths(0, 300)
    weights = np.repeat([1.0, 2.0, 0.25], 100)
    stream = GroupStream(lengths, 40, 64, seed=0, weights=weights)
    per_epoch = [Counter(stream.epoch(e).samples.tolist()) for e in range(20)]
    assert all(c[s] == 1 for c in per_epoch for s in range(100))
    assert all(c[s] == 2 for c in per_epoch for s in range(100, 200))
    rare = [sum(c[s] for s in range(200, 300)) for c in per_epoch]
    assert abs(np.mean(rare) - 25) < 5
    assert len(set(rare)) > 1


def test_a_batch_across_two_epochs_belongs_to_the_first() -> None:
    lengths = make_lengths(0, 31)
    stream = GroupStream(lengths, 40, 64, seed=0)
    per_epoch = len(stream.epoch(0))
    step = per_epoch // 4
    assert per_epoch % 4, "the number of samples is chosen so that a batch straddles"
    assert [stream.batch(s, 4, {"llm": 1, "vision": 1}, 4).epoch for s in (0, step, step + 1)] == [0, 0, 1]


def make_index(lengths: SampleLengths) -> DataIndex:
    return DataIndex((), lengths, np.ones(len(lengths)), ())


@given(st.integers(0, 1000), st.integers(8, 60))
@settings(max_examples=50, deadline=None)
def test_validation_is_always_the_same_and_uses_each_sample_once(seed: int, num_samples: int) -> None:
    index = make_index(make_lengths(seed, num_samples, longest=20))
    batches = validation_batches(index, 40, 1000, {"vision": 1, "llm": 2}, 4, limit=100)
    again = validation_batches(index, 40, 1000, {"vision": 2, "llm": 4}, 2, limit=100)
    used = [sorted(b.sample_id.tolist()) for b in batches]
    assert sorted(s for b in used for s in b) == list(range(num_samples))
    assert used == [sorted(b.sample_id.tolist()) for b in again], "whatever the plan"
    assert [b.step for b in batches] == list(range(len(batches)))
    for b in batches:
        for r, i in ((r, i) for r in range(2) for i in range(4)):
            assert 0 < b.tokens[b.microbatch(r, i)].sum() <= 40
    limited = validation_batches(index, 40, 1000, {"vision": 1, "llm": 2}, 4, limit=1)
    assert len(limited) == 1


def test_too_few_held_out_samples_are_an_error_of_the_data() -> None:
    index = make_index(make_lengths(0, 3))
    with pytest.raises(DataError, match=r"data\.validation: 3 usable samples, but a global batch needs 4 groups"):
        validation_batches(index, 100, 1000, {"llm": 2, "vision": 1}, 2, limit=1)
