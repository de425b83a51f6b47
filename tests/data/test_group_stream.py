import hashlib
import pickle
import tracemalloc
from collections import Counter
from dataclasses import replace
from math import ceil, isqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, IntArray, ItemLengths, SampleGroups, SampleLengths, dist_ratio
from mmtrain.balance.columns import CellRule, FilePlace, GridColumn, SourceValues, StoredColumn
from mmtrain.balance.grouping.methods import (
    GROUPING_VERSIONS,
    GroupingMethod,
    IsfRules,
    arrange_window,
    group_window,
    grouping_sizes,
    num_spare_groups,
    split_to_count,
    token_targets,
    unit_tokens,
)
from mmtrain.balance.grouping.pack_groups import GroupingSizes
from mmtrain.data import DataIndex, GroupStream, validation_batches
from mmtrain.data.index.shared_arrays import SharedArrays
from mmtrain.errors import DataError
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.sample_batches import sample_batches

METHODS: tuple[GroupingMethod, ...] = ("matched", "isf", "random", "length", "device")


def make_lengths(seed: int, num_samples: int, longest: int = 40) -> SampleLengths:
    """Return the lengths of samples of which two thirds have images, at most two each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, longest + 1, num_samples)
    first = np.concatenate([[0], np.cumsum(rng.integers(0, 3, num_samples))])
    sides = rng.integers(1, 4, first[-1])
    items = ItemLengths(first, sides, sides, sides**2, sides)
    return SampleLengths(tokens, np.ones_like(tokens), {"vision": items})


def images(lengths: SampleLengths) -> np.ndarray:
    """Return the vision tokens of each sample."""
    return unit_tokens(lengths)[1][:, 1]


def make_stream(seed: int, num_samples: int, grouping: Grouping) -> GroupStream:
    return GroupStream(make_lengths(seed, num_samples), grouping, seed)


def contents(stream: GroupStream, first: int, count: int) -> list[list[int]]:
    return [g.tolist() for g in stream.groups(first, count)]


@given(
    st.integers(0, 1000), st.integers(1, 60), st.integers(1, 30), st.sampled_from(METHODS), st.sampled_from([1, 2, 4])
)
def test_an_epoch_uses_every_sample_once_and_epochs_follow_each_other(
    seed: int, num_samples: int, window: int, method: GroupingMethod, global_batch: int
) -> None:
    lengths = make_lengths(seed, num_samples)
    grouping = Grouping(40, window, global_batch, method, {"vision": 20})
    stream = GroupStream(lengths, grouping, seed)
    per_epoch = stream.groups_per_epoch
    groups = contents(stream, 0, 3 * per_epoch)
    for e in range(3):
        of_epoch = groups[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(s for g in of_epoch for s in g) == list(range(num_samples))
    assert all(lengths.tokens[g].sum() <= 40 for g in groups)
    vision_tokens = images(lengths)
    assert all(vision_tokens[g].sum() <= 20 or np.count_nonzero(vision_tokens[g]) == 1 for g in groups)


def test_samples_that_isf_leaves_over_wait_for_the_next_epoch() -> None:
    grouping = Grouping(120, 500, 4, "isf", isf=IsfRules(remainder="next_epoch"))
    lengths = make_lengths(0, 1000)
    stream = GroupStream(lengths, grouping, seed=0)
    tokens = unit_tokens(lengths)[1]
    budgets = grouping_sizes(lengths, grouping).budgets
    least = grouping.isf.least_loads(budgets)
    used: set[int] = set()
    for epoch in range(4):
        groups = stream.epoch(epoch)
        samples = groups.samples.tolist()
        assert 0.8 * 1000 < len(samples) < 1000
        assert len(set(samples)) == len(samples)
        assert (groups.loads(np.minimum(tokens, budgets)) >= least).any(axis=1).all(), "all groups are full"
        used |= set(samples)
    assert len(used) == 1000
    again = GroupStream(lengths, grouping, seed=0)
    middle = stream.groups_per_epoch + 7
    assert contents(again, middle, 5) == contents(stream, middle, 5)


@given(st.integers(0, 1000), st.integers(0, 80), st.integers(1, 20), st.sampled_from(METHODS), st.booleans())
def test_seeking_equals_iterating(seed: int, first: int, count: int, method: GroupingMethod, long_apart: bool) -> None:
    grouping = Grouping(40, 16, 2, method, long_tokens=20 if long_apart else None)
    iterated = contents(make_stream(seed, 50, grouping), 0, first + count)[first:]
    assert contents(make_stream(seed, 50, grouping), first, count) == iterated
    revisited = make_stream(seed, 50, grouping)
    contents(revisited, first + 200, 1)
    assert contents(revisited, first, count) == iterated, "going back gives the same groups"


class EagerStream:
    """Oracle: a stream that deals all samples to windows and packs every window when it starts."""

    def __init__(self, lengths: SampleLengths, grouping: Grouping, seed: int, weights: np.ndarray | None) -> None:
        self.sizes, self.grouping, self.seed = grouping_sizes(lengths, grouping), grouping, seed
        weights = np.ones(len(lengths)) if weights is None else weights
        sure = np.floor(weights).astype(np.int64)
        fraction = weights - sure
        entries = np.concatenate([np.repeat(np.arange(len(lengths)), sure), np.flatnonzero(fraction)])
        probabilities = np.concatenate([np.ones(sure.sum()), fraction[fraction > 0]])
        order = np.random.default_rng([1, seed, 0]).permutation(len(entries))
        parts = np.array_split(order, ceil(len(entries) / grouping.window))
        self.windows = [(entries[part], probabilities[part]) for part in parts]
        self.counted = [self.shuffle_and_group([2, seed, 0, 0, w], w) for w in range(len(parts))]
        self.counts = [self.count(w) for w in range(len(parts))]

    def shuffle_and_group(self, key: list[int], w: int) -> SampleGroups:
        rng = np.random.default_rng(key)
        samples, probabilities = self.windows[w]
        used = samples[rng.random(len(samples)) < probabilities]
        self.rng = rng
        if key[0] == 2 and not len(used):
            used = samples
        return group_window(self.sizes, rng.permutation(used), self.grouping, rng)

    def count(self, w: int) -> int:
        samples, p = self.windows[w]
        groups = self.counted[w]
        deviation = np.sqrt((p * (1 - p) * self.sizes.tokens[samples][:, 0].astype(float) ** 2).sum())
        drawn = ceil(2 * deviation / self.grouping.seq_len)
        if self.grouping.leaves_remainder:
            return max(len(groups) - isqrt(len(groups)) // 8 - drawn, 1)
        return min(len(groups) + num_spare_groups(len(groups), self.grouping) + drawn, len(groups.samples))

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return all groups of an epoch."""
        groups_of_epoch: list[list[int]] = []
        for w in np.random.default_rng([3, self.seed, 0, epoch]).permutation(len(self.windows)).tolist():
            count = self.counts[w]
            groups = self.shuffle_and_group([4, self.seed, 0, epoch, w], w)
            if self.grouping.leaves_remainder:
                groups = groups if len(groups) >= count else self.counted[w]
                groups = groups.reordered(np.arange(count))
            elif len(groups) > count or len(groups.samples) < count:
                groups = self.counted[w]
            offset = (epoch * sum(self.counts) + len(groups_of_epoch)) % self.grouping.global_batch
            arranged = arrange_window(self.sizes, split_to_count(groups, count), self.grouping, offset, self.rng)
            groups_of_epoch += [arranged[i].tolist() for i in range(len(arranged))]
        return groups_of_epoch


@given(st.integers(0, 1000), st.integers(1, 90), st.sampled_from(METHODS), st.booleans(), st.booleans(), st.data())
def test_windows_that_are_counted_when_they_are_reached_make_the_same_groups(
    seed: int, num_samples: int, method: GroupingMethod, weighted: bool, leaves: bool, data: st.DataObject
) -> None:
    isf = IsfRules(remainder="next_epoch" if leaves else "keep")
    grouping = Grouping(40, 16, 4, method, {"vision": 20}, isf=isf)
    lengths = make_lengths(seed, num_samples)
    weights = np.random.default_rng(seed).choice([0.25, 1.0, 2.5], num_samples) if weighted else None
    oracle = EagerStream(lengths, grouping, seed, weights)
    expected = [group for epoch in range(3) for group in oracle.epoch(epoch)]
    stream = GroupStream(lengths, grouping, seed, weights)
    start = data.draw(st.integers(0, len(expected) - 1))
    assert contents(stream, start, len(expected) - start) == expected[start:], "as a run that resumes there"
    assert contents(stream, 0, start) == expected[:start], "and one that goes back"
    assert stream.groups_per_epoch == len(expected) // 3


def test_a_run_that_resumes_inside_a_window_groups_only_that_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmtrain.data.index.shared_arrays.MIN_SHARED_ROWS", 1)
    lengths, grouping = make_lengths(0, 4000), Grouping(400, 256, 8)
    weights = SourceValues(np.arange(4000) // 2000, np.array([1.0, 1.5]))

    def start() -> GroupStream:
        return GroupStream(lengths, grouping, 0, weights, shared=SharedArrays(tmp_path, "index"))

    without_files = GroupStream(lengths, grouping, 0, np.asarray(weights))
    stopped = start()
    position = 80  # inside a window: the groups before it are counted, too
    assert contents(stopped, 0, position) == contents(without_files, 0, position)
    grouped = []

    def counting(sizes: GroupingSizes, order: IntArray, grouping: Grouping, rng: np.random.Generator) -> SampleGroups:
        grouped.append(len(order))
        return group_window(sizes, order, grouping, rng)

    monkeypatch.setattr("mmtrain.data.stream.group_stream.group_window", counting)
    resumed = start()
    assert contents(resumed, position, 1) == contents(without_files, position, 1)
    assert len(grouped) == 1, "those before were counted by the run that stopped"
    received = pickle.loads(pickle.dumps(resumed))
    assert contents(received, position, 9) == contents(without_files, position, 9), "as workers of a loader have it"


def test_a_large_index_takes_little_memory_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As arrays these samples take 112 bytes each, and their windows 16."""
    num_samples = 1_200_000
    monkeypatch.setattr("mmtrain.balance.columns.BLOCK_ROWS", 1 << 16)
    numbers = np.arange(num_samples + 1)
    columns = {}
    for name, values in {
        "tokens": 10 + numbers[1:] % 500,
        "targets": 5 + numbers[1:] % 5,
        "first": numbers,
        "side": 2 + numbers[1:] % 3,
    }.items():
        narrow = StoredColumn.narrowed(name, values).stored
        (tmp_path / name).write_bytes(narrow.tobytes())
        place = FilePlace(tmp_path / name, 0, narrow.dtype.str, len(narrow))
        columns[name] = StoredColumn.mapped(place)
    del numbers, values, narrow
    first, side = columns["first"], columns["side"]
    items = ItemLengths(first, side, side, GridColumn(side, side, CellRule()), GridColumn(side, side, CellRule()))
    lengths = SampleLengths(columns["tokens"], columns["targets"], {"vision": items})
    grouping = Grouping(4096, 1000, 64)
    tracemalloc.start()
    try:
        stream = GroupStream(lengths, grouping, 0, shared=SharedArrays(tmp_path, "index"))
        stream.batch(0, 64, {"llm": 8, "vision": 8}, {"llm": 8, "vision": 8})
        _, stream_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sample_batches(lengths, grouping, 0, replace(DEFAULT_BUDGET.sampling, min_samples_to_group=1000))
        _, plan_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream_bytes < 4 * num_samples, stream_bytes
    assert plan_bytes < 12 * num_samples, "8 of them for the order in which samples are drawn"
    assert len(pickle.dumps(stream)) < 200_000
    assert contents(stream, 0, 3) == contents(GroupStream(lengths, grouping, 0), 0, 3)


def test_step_one_million_is_found_without_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(0, 4000, Grouping(400, 256, 8))
    iterated = contents(stream, 8 * 10**6 - 8, 16)
    composed = []

    def counting(sizes: GroupingSizes, order: IntArray, grouping: Grouping, rng: np.random.Generator) -> SampleGroups:
        composed.append(len(order))
        return group_window(sizes, order, grouping, rng)

    monkeypatch.setattr("mmtrain.data.stream.group_stream.group_window", counting)
    fresh = make_stream(0, 4000, Grouping(400, 256, 8))
    assert not composed, "a stream that starts groups nothing"
    assert contents(fresh, 8 * 10**6, 8) == iterated[8:]
    largest = max(composed)
    assert 4000 < sum(composed) <= 4000 + 2 * largest, "each window to count its groups, and the one or two of the step"
    composed.clear()
    contents(fresh, 8 * 10**6 + 8 * 10**5, 8)
    assert sum(composed) <= 2 * largest, "all windows are counted"


@given(st.integers(0, 1000), st.integers(0, 5), st.sampled_from(METHODS))
def test_all_plans_get_the_same_batches(seed: int, step: int, method: GroupingMethod) -> None:
    grouping = Grouping(40, 32, 12, method)
    expected = sorted(sorted(g) for g in contents(make_stream(seed, 80, grouping), step * 12, 12))
    for dp, num_microbatches in ((1, 12), (2, 6), (3, 4), (4, 3), (12, 1)):
        meta = make_stream(seed, 80, grouping).batch(
            step, 12, {"vision": 2, "llm": dp}, dict.fromkeys(("vision", "llm"), num_microbatches)
        )
        places = [(r, i) for r in range(dp) for i in range(num_microbatches)]
        got = sorted(sorted(meta.sample_id[meta.microbatch(r, i)].tolist()) for r, i in places)
        assert got == expected
        assert meta.step == step


@pytest.mark.parametrize("method", METHODS)
def test_seeds_and_epochs_change_the_order(method: GroupingMethod) -> None:
    grouping = Grouping(40, 64, 2, method)
    stream = GroupStream(make_lengths(0, 50), grouping, seed=1)
    first, second = (stream.epoch(e).samples.tolist() for e in range(2))
    other = GroupStream(make_lengths(0, 50), grouping, seed=2).epoch(0).samples.tolist()
    assert first != second
    assert first != other


def test_windows_hold_the_same_samples_and_come_in_a_new_order() -> None:
    stream = make_stream(0, 400, Grouping(200, 100, 1))
    starts = np.arange(0, stream.groups_per_epoch)
    epochs = [contents(stream, e * stream.groups_per_epoch, len(starts)) for e in range(6)]
    groups_by_epoch = [{frozenset(g) for g in groups} for groups in epochs]
    assert len(set.intersection(*groups_by_epoch)) < len(starts) / 4, "the groups of each epoch are new"
    (substream,) = stream._substreams
    orders, samples = [], []
    for epoch, groups in enumerate(epochs):
        substream._locate_in_epoch(epoch, len(groups) - 1)
        order = substream._window_order(epoch)
        ends = [0, *order.ends.tolist()]
        of_window = {
            window: {sample for group in groups[ends[i] : ends[i + 1]] for sample in group}
            for i, window in enumerate(order.windows.tolist())
        }
        orders.append(order.windows.tolist())
        samples.append(of_window)
    assert len(samples[0]) == 4
    assert len(set(map(tuple, orders))) > 1, "windows come in a new order"
    assert all(of_window == samples[0] for of_window in samples), "windows hold the same samples in every epoch"


def test_weights_repeat_samples_and_fractions_alternate_by_chance() -> None:
    lengths = make_lengths(0, 300)
    weights = np.repeat([1.0, 2.0, 0.25], 100)
    stream = GroupStream(lengths, Grouping(40, 64, 2), seed=0, weights=weights)
    per_epoch = [Counter(stream.epoch(e).samples.tolist()) for e in range(20)]
    assert all(c[s] == 1 for c in per_epoch for s in range(100))
    assert all(c[s] == 2 for c in per_epoch for s in range(100, 200))
    rare = [sum(c[s] for s in range(200, 300)) for c in per_epoch]
    assert abs(np.mean(rare) - 25) < 5
    assert len(set(rare)) > 1


def test_a_dataset_of_tiny_weights_still_trains() -> None:
    stream = GroupStream(make_lengths(0, 2), Grouping(40, 64, 4), seed=0, weights=np.full(2, 0.01))
    assert all(len(g) > 0 for g in contents(stream, 0, 40))


def test_a_batch_across_two_epochs_belongs_to_the_first() -> None:
    stream = make_stream(0, 31, Grouping(40, 64, 4))
    per_epoch = stream.groups_per_epoch
    step = per_epoch // 4
    assert per_epoch % 4, "the number of samples is chosen so that a batch crosses the border of epochs"
    assert [
        stream.batch(s, 4, {"llm": 1, "vision": 1}, {"llm": 4, "vision": 4}).epoch for s in (0, step, step + 1)
    ] == [0, 0, 1]
    assert stream.epochs_done(3 * per_epoch) == 3


def test_matched_steps_are_even_across_windows_and_epochs() -> None:
    lengths = make_lengths(0, 4000)
    tokens = unit_tokens(lengths)[1]

    def waits(method: GroupingMethod) -> np.ndarray:
        grouping = Grouping(400, 2000, 8, method)
        stream = GroupStream(lengths, grouping, 0)
        targets = token_targets(lengths, grouping)
        num_steps = 3 * stream.groups_per_epoch // 8
        loads = np.zeros((num_steps, 8, 2), dtype=np.int64)
        for step in range(num_steps):
            meta = stream.batch(step, 8, {"llm": 8, "vision": 1}, {"llm": 1, "vision": 1}, targets)
            np.add.at(loads[step], meta.replica, tokens[meta.sample_id])
        return dist_ratio(loads)

    even = waits("matched")
    assert (even < [0.002, 0.06]).all()
    for method in ("random", "length", "isf"):
        assert (even < waits(method) / 3).all()
    assert waits("device")[0] < waits("random")[0] / 2, "its rows start where steps start"


def test_steps_matched_inside_are_as_random_as_chance_and_even() -> None:
    lengths = make_lengths(0, 4000)
    tokens = unit_tokens(lengths)[1]
    dp, counts = {"llm": 8, "vision": 1}, {"llm": 4, "vision": 4}
    grouping = Grouping(400, 2000, 32)
    stream = GroupStream(lengths, grouping, 0)
    targets = token_targets(lengths, grouping)
    loads = np.zeros((10, 8, 2), dtype=np.int64)
    for step in range(10):
        meta = stream.batch(step, 32, dp, counts, targets)
        assert sorted(meta.sample_id) == sorted(np.concatenate(stream.groups(32 * step, 32)))
        np.add.at(loads[step], meta.replica, tokens[meta.sample_id])
    groups = SampleGroups.loads(stream.epoch(0), tokens)[:, 1]
    variance = groups[: len(groups) // 32 * 32].reshape(-1, 32).sum(axis=1).var() / (32 * groups.var())
    assert variance < 1.5
    assert (dist_ratio(loads) < [0.01, 0.02]).all()


@given(st.integers(0, 1000), st.sampled_from(METHODS), st.sampled_from([1, 2, 3, 6]))
def test_the_samples_of_a_step_do_not_depend_on_the_plan(seed: int, method: GroupingMethod, replicas: int) -> None:
    lengths = make_lengths(seed, 120)
    grouping = Grouping(60, 50, 6, method)
    stream = GroupStream(lengths, grouping, seed)
    dp, counts = {"llm": replicas, "vision": 1}, {"llm": 6 // replicas, "vision": 6 // replicas}
    for step in range(stream.groups_per_epoch // 6 + 1):
        meta = stream.batch(step, 6, dp, counts, token_targets(lengths, grouping))
        assert sorted(meta.sample_id) == sorted(np.concatenate(stream.groups(6 * step, 6)))
        for r, i in np.ndindex(replicas, 6 // replicas):
            assert len(meta.microbatch(r, i))
            assert method in ("random", "length", "device") or meta.tokens[meta.microbatch(r, i)].sum() <= 60


def test_an_epoch_is_evened_out_like_its_steps() -> None:
    lengths = make_lengths(3, 500)
    grouping = Grouping(60, 200, 4)
    stream = GroupStream(lengths, grouping, 0)
    targets = token_targets(lengths, grouping)
    epoch = stream.epoch(1, 4, targets)
    assert sorted(epoch.samples) == list(range(500))
    per_epoch = stream.groups_per_epoch
    assert [len(stream.epoch(0)), len(epoch)] == [per_epoch] * 2
    tokens = unit_tokens(lengths)[1]
    even, plain = (
        dist_ratio(g.loads(tokens)[: per_epoch // 4 * 4].reshape(-1, 4, 2)) for g in (epoch, stream.epoch(1))
    )
    assert (even < plain).all()


@pytest.mark.parametrize(
    ("global_batch", "alike"), [(1, 1), (48, 48), (64, 64), (96, 48), (67, 67), (268, 67), (512, 64)]
)
def test_rows_are_equal_parts_of_a_step(global_batch: int, alike: int) -> None:
    assert Grouping(40, 16, global_batch).row_size == alike


@given(st.integers(0, 1000), st.sampled_from(METHODS), st.sampled_from([1, 2, 3]))
def test_long_samples_have_steps_of_their_own(seed: int, method: GroupingMethod, global_batch: int) -> None:
    lengths = make_lengths(seed, 60)
    stream = GroupStream(lengths, Grouping(80, 32, global_batch, method, long_tokens=25), seed)
    num_steps = stream.groups_per_epoch  # this many steps are as many epochs as the global batch has groups
    uses = np.zeros(60, dtype=np.int64)
    kinds = []
    for step in range(num_steps):
        samples = np.concatenate(stream.groups(step * global_batch, global_batch))
        is_long = lengths.tokens[samples] > 25
        assert is_long.all() or not is_long.any()
        kinds.append(bool(is_long.all()))
        np.add.at(uses, samples, 1)
    assert (uses == global_batch).all()
    many = sum(kinds)
    for done in range(num_steps):
        assert abs(sum(kinds[:done]) - many * done / num_steps) < 2, "both kinds are spread evenly over the cycle"


def test_a_single_long_sample_works() -> None:
    lengths = SampleLengths(np.array([30, *[5] * 50]), np.ones(51, dtype=np.int64), {})
    stream = GroupStream(lengths, Grouping(40, 64, 4, long_tokens=20), 0)
    steps = [sorted(map(tuple, contents(stream, 4 * s, 4))) for s in range(stream.groups_per_epoch)]
    assert steps.count([(0,)] * 4) == 1


def make_index(lengths: SampleLengths) -> DataIndex:
    return DataIndex((), lengths, np.ones(len(lengths)), ())


@given(st.integers(0, 1000), st.integers(8, 60))
def test_validation_batches_are_fixed_and_use_each_sample_once(seed: int, num_samples: int) -> None:
    index = make_index(make_lengths(seed, num_samples, longest=20))
    batches = validation_batches(
        index, Grouping(40, 1000, 8), {"vision": 1, "llm": 2}, {"vision": 4, "llm": 4}, limit=100
    )
    other_plan = validation_batches(
        index, Grouping(40, 1000, 8), {"vision": 2, "llm": 4}, {"vision": 2, "llm": 2}, limit=100
    )
    used = [sorted(b.sample_id.tolist()) for b in batches]
    assert sorted(s for b in used for s in b) == list(range(num_samples))
    assert used == [sorted(b.sample_id.tolist()) for b in other_plan], "for every plan"
    assert [b.step for b in batches] == list(range(len(batches)))
    for b in batches:
        for r, i in ((r, i) for r in range(2) for i in range(4)):
            assert 0 < b.tokens[b.microbatch(r, i)].sum() <= 40
    limited = validation_batches(
        index, Grouping(40, 1000, 8), {"vision": 1, "llm": 2}, {"vision": 4, "llm": 4}, limit=1
    )
    assert len(limited) == 1


def test_a_step_names_the_group_that_the_stream_has_each_sample_in() -> None:
    """Also where samples change groups to make a step even."""
    lengths = make_lengths(0, 2000)
    grouping = Grouping(400, 2000, 16)
    stream, targets = GroupStream(lengths, grouping, 0), token_targets(lengths, grouping)
    num_moved = 0
    for step in range(3):
        batch = stream.batch(step, 16, {"llm": 4, "vision": 4}, {"llm": 4, "vision": 4}, targets)
        assert batch.stream_group is not None
        groups = stream.groups(16 * step, 16)
        assert all(s in groups[g] for s, g in zip(batch.sample_id, batch.stream_group, strict=True))
        together = batch.replica * 4 + batch.index
        num_moved += len(np.unique(np.stack([together, batch.stream_group]), axis=1).T) - 16
    assert num_moved > 0


def test_too_few_held_out_samples_are_an_error_of_the_data() -> None:
    index = make_index(make_lengths(0, 3))
    with pytest.raises(DataError, match=r"data\.validation: 3 usable samples, but a global batch needs 4 groups"):
        validation_batches(index, Grouping(100, 1000, 4), {"llm": 2, "vision": 1}, {"llm": 2, "vision": 2}, limit=1)


@pytest.mark.parametrize(
    ("method", "version", "digest"),
    [
        ("matched", 6, "8fe2a5bc2ed69127"),
        ("isf", 2, "12bbd97181b474a4"),
        ("random", 1, "bca347dc804b46d0"),
        ("length", 1, "6b9920986307803d"),
        ("device", 1, "3506f2e806b04405"),
    ],
)
def test_the_steps_change_only_with_the_version(method: GroupingMethod, version: int, digest: str) -> None:
    lengths = make_lengths(0, 600)
    grouping = Grouping(120, 256, 8, method)
    stream = GroupStream(lengths, grouping, 0)
    dp, counts = {"llm": 4, "vision": 4}, {"llm": 2, "vision": 2}
    content = hashlib.sha256()
    for step in range(6):
        batch = stream.batch(step, 8, dp, counts, token_targets(lengths, grouping))
        for replica in range(4):
            for index in range(2):
                samples = sorted(batch.sample_id[batch.microbatch(replica, index)].tolist())
                content.update(f"{step} {replica} {index} {samples}".encode())
    assert GROUPING_VERSIONS[method] == version
    assert content.hexdigest()[:16] == digest, "raise the method's GROUPING_VERSIONS, then pin these steps"
