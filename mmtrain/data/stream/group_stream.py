"""The endless stream of groups: which samples train together and when, the same for every plan, rank and worker."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isqrt

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta, Grouping, IntArray, SampleGroups, SampleLengths, StepTargets, assign, pack_groups
from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.dispatch.dispatch_samples import dispatch_samples
from mmtrain.balance.dispatch.phase_loads import stream_groups_of
from mmtrain.balance.grouping.methods import (
    arrange_window,
    group_window,
    grouping_sizes,
    num_spare_groups,
    split_to_count,
)
from mmtrain.balance.grouping.mixture import Mixture
from mmtrain.balance.grouping.pack_groups import GroupingSizes
from mmtrain.balance.grouping.padding import pad_microbatches
from mmtrain.balance.matched.regroup_step import match_step
from mmtrain.balance.step_targets import LLM, SampleWork
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.stream.mixture_stream import MixtureStream
from mmtrain.errors import DataError
from mmtrain.recipe.settings.schema import Recipe

Float64Array = npt.NDArray[np.float64]

# The purpose of a random generator, the first number of its seed: numpy ignores zeros at the end of a seed.
_SEED_LAYOUT = 1  # deals samples to windows
_SEED_COUNT = 2  # counts the groups of a window
_SEED_WINDOW_ORDER = 3
_SEED_WINDOW = 4  # shuffles and groups the samples of a window
_SEED_STEPS = 5  # distributes steps between long and other samples
_MISSING_GROUPS_DIVISOR = 8  # full groups of ISF vary by 1 to 6 between shuffles of 10,000 samples (demo data)
_MAX_CACHED_WINDOWS = 4  # the one in use and the next one, for each of two readers


class GroupStream:
    """Groups of samples over epochs, a pure function of (seed, epoch, position).

    Samples are dealt to windows once. An epoch visits the windows in a new order, and shuffles and groups the samples
    of each anew. A window has the same number of groups in every epoch, so any position of the stream is found by
    arithmetic, and only the groups of its window are computed.

    An epoch uses a sample of integer weight w exactly w times; the fraction of a weight is the probability of one more
    use, drawn in every epoch. Groups never mix epochs. If long samples have steps of their own
    (`data.long_sample_tokens`), they also have epochs of their own, which end a few steps before or after those of the
    others.

    With a mixture, `MixtureStream` draws the samples by shares, and an epoch is as many groups as hold the tokens of
    all samples.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        grouping: Grouping,
        seed: int,
        weights: npt.NDArray[np.float64] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Group samples of these lengths by the method and settings of `grouping`; a mixture replaces `weights`."""
        self._lengths = lengths
        self._grouping = grouping
        self._seed = seed
        self._sizes = grouping_sizes(lengths, grouping)
        self._cached_cycle: tuple[int, IntArray] | None = None  # its number and its step table
        self._substreams: tuple[_SubStream | MixtureStream, ...]
        if mixture is not None:
            self._substreams = (MixtureStream(lengths, self._sizes, grouping, seed, mixture),)
            return
        if weights is None:
            weights = np.ones(len(lengths))
        is_long = np.zeros(len(lengths), dtype=bool)
        if grouping.long_tokens is not None:
            is_long = lengths.tokens > grouping.long_tokens
        # One sub-stream, or two where long samples have steps of their own.
        self._substreams = tuple(
            _SubStream(samples, weights[samples], self._sizes, grouping, (seed, number))
            for number, samples in enumerate((np.flatnonzero(~is_long), np.flatnonzero(is_long)))
            if len(samples)
        )

    @classmethod
    def of(cls, recipe: Recipe, index: DataIndex) -> "GroupStream":
        """Return the order in which a recipe trains on its samples."""
        grouping = Grouping.of(recipe.data, recipe.train.global_batch)
        return cls(index.lengths, grouping, recipe.train.seed, index.weights, index.mixture)

    @property
    def groups_per_epoch(self) -> int:
        """The number of groups in each epoch."""
        return sum(substream.num_groups for substream in self._substreams)

    def groups(self, first: int, count: int) -> list[IntArray]:
        """Return the sample numbers of groups [first, first + count) of the stream."""
        return [self._group(position) for position in range(first, first + count)]

    def batch(
        self,
        step: int,
        global_batch: int,
        dp: Mapping[str, int],
        num_microbatches: Mapping[str, int],
        targets: StepTargets = NO_TARGETS,
    ) -> BatchMeta:
        """Lay out groups [step, step + 1) * global_batch over the replicas and microbatches of every unit.

        Which samples a step has depends on nothing else. `targets` decide which replica computes which sample, in which
        group and in which order; samples change groups for this only with the grouping method `matched`, or where
        replicas dispatch.
        """
        first = step * global_batch
        stream_groups = self.groups(first, global_batch)
        groups = self._even_out(list(stream_groups), dp[LLM], targets)
        epoch = first // self.groups_per_epoch
        batch = assign(step, epoch, groups, self._lengths, dp, num_microbatches, targets)
        batch = replace(batch, stream_group=stream_groups_of(batch.sample_id, stream_groups))
        return pad_microbatches(batch) if self._grouping.pad else batch

    def epoch(self, epoch: int, num_replicas: int = 1, targets: StepTargets = NO_TARGETS) -> SampleGroups:
        """Return all groups of one epoch, each row of `num_replicas` groups evened out for replicas side by side."""
        total = self.groups_per_epoch
        groups = self.groups(epoch * total, total)
        num_rows = total // num_replicas
        rows_at_a_time = max(self._grouping.global_batch // num_replicas, 1)
        for first_row in range(0, num_rows, rows_at_a_time):
            rows = slice(first_row * num_replicas, min(first_row + rows_at_a_time, num_rows) * num_replicas)
            groups[rows] = self._even_out(groups[rows], num_replicas, targets)
        ends = np.cumsum(np.array([0, *map(len, groups)], dtype=np.int64))
        return SampleGroups(ends, np.concatenate(groups))

    def _even_out(self, groups: list[IntArray], num_replicas: int, targets: StepTargets) -> list[IntArray]:
        """Exchange samples between the groups of a row where the grouping method permits it, or replicas dispatch."""
        if self._grouping.method != "matched":
            cost, pad = targets.sample_cost, self._grouping.pad
            if cost is None:
                return groups
            return dispatch_samples(groups, num_replicas, self._sizes, cost, pad, with_items=not targets.dispatch)
        if not targets.loads:
            return groups
        samples = np.concatenate(groups)
        loads = SampleWork(self._lengths, samples).loads(targets)
        weights = [load.weight for load in targets.loads]
        tokens, budgets = self._sizes.tokens[samples], self._sizes.budgets
        return match_step(groups, tokens, budgets, loads, weights, num_replicas)

    def epochs_done(self, num_groups: int) -> float:
        """Return the passes over the data that the first `num_groups` groups of the stream make."""
        return num_groups / self.groups_per_epoch

    def source_passes(self, num_steps: int) -> list[float]:
        """Return how often the first `num_steps` steps pass through each source of a mixture."""
        (mixture_stream,) = self._substreams
        assert isinstance(mixture_stream, MixtureStream), "without a mixture all samples share epochs"
        return mixture_stream.passes(num_steps)

    def _group(self, position: int) -> IntArray:
        if len(self._substreams) == 1:
            return self._substreams[0].group(position)
        step, place = divmod(position, self._grouping.global_batch)
        number, substream_step = self._substream_step(step)
        return self._substreams[number].group(substream_step * self._grouping.global_batch + place)

    def _substream_step(self, step: int) -> tuple[int, int]:
        """Return the sub-stream that a step belongs to, and how many of the steps before belong to it.

        A cycle has as many steps as an epoch has groups, so it is a whole number of epochs of every sub-stream. In it,
        each sub-stream has one step for each of its groups, evenly spread and in random order.
        """
        cycle, step_in_cycle = divmod(step, self.groups_per_epoch)
        if self._cached_cycle is None or self._cached_cycle[0] != cycle:
            self._cached_cycle = cycle, self._step_table(cycle)
        number, steps_before = self._cached_cycle[1][step_in_cycle].tolist()
        return number, cycle * self._substreams[number].num_groups + steps_before

    def _step_table(self, cycle: int) -> IntArray:
        """Return (steps of a cycle, 2): the sub-stream of each step, and the sub-stream's steps before it."""
        rng = _random_generator(_SEED_STEPS, self._seed, 0, cycle)
        counts = [substream.num_groups for substream in self._substreams]
        steps = [np.arange(count) for count in counts]
        times = np.concatenate([(own_steps + rng.random(len(own_steps))) / len(own_steps) for own_steps in steps])
        table = np.stack([np.repeat(np.arange(len(counts)), counts), np.concatenate(steps)], axis=1)
        return table[np.argsort(times, kind="stable")]


@dataclass(frozen=True)
class _ShuffleWindow:
    """Samples that are shuffled and grouped together in every epoch."""

    samples: IntArray  # (k,) a sample that an epoch may use twice is listed twice
    probabilities: Float64Array  # (k,) that an epoch uses the entry
    num_groups: int  # in every epoch


class _SubStream:
    """The stream over samples that may share a step: all samples, or only the long ones, or only the others."""

    def __init__(
        self, samples: IntArray, weights: Float64Array, sizes: GroupingSizes, grouping: Grouping, key: tuple[int, int]
    ) -> None:
        self._sizes = sizes
        self._grouping = grouping
        self._key = key  # seed and number of the sub-stream
        self._windows = self._deal_to_windows(samples, weights)
        self.num_groups = sum(window.num_groups for window in self._windows)  # in each epoch
        self._cached_order: tuple[int, IntArray, IntArray] | None = None  # epoch, order of windows, first groups
        self._cached_groups: dict[tuple[int, int], SampleGroups] = {}  # (epoch, window) -> groups

    def group(self, position: int) -> IntArray:
        """Return the sample numbers of a group of the endless stream."""
        epoch, place = divmod(position, self.num_groups)
        order, starts = self._window_order(epoch)
        turn = int(np.searchsorted(starts, place, side="right")) - 1
        window = int(order[turn])
        start = int(starts[turn])
        groups = self._cached_groups.get((epoch, window))
        if groups is None:
            groups = self._group_window(epoch, window, (position - place + start) % self._grouping.global_batch)
            while len(self._cached_groups) >= _MAX_CACHED_WINDOWS:
                oldest = next(iter(self._cached_groups))
                self._cached_groups.pop(oldest, None)
            self._cached_groups[epoch, window] = groups
        return groups[place - start]

    def _deal_to_windows(self, samples: IntArray, weights: Float64Array) -> list[_ShuffleWindow]:
        """Deal the samples to windows at random, once for all epochs."""
        sure_uses = np.floor(weights).astype(np.int64)
        fraction = weights - sure_uses
        has_fraction = fraction > 0
        entries = np.concatenate([np.repeat(samples, sure_uses), samples[has_fraction]])
        probabilities = np.concatenate([np.ones(int(sure_uses.sum())), fraction[has_fraction]])
        order = _random_generator(_SEED_LAYOUT, *self._key).permutation(len(entries))
        parts = np.array_split(order, ceil(len(entries) / self._grouping.window))
        return [self._make_window(w, entries[part], probabilities[part]) for w, part in enumerate(parts)]

    def _make_window(self, w: int, samples: IntArray, probabilities: Float64Array) -> _ShuffleWindow:
        """Count the groups of a window: those of one shuffle, and some spare ones for epochs that need more.

        With `isf.remainder: next_epoch` there are fewer instead, so that every epoch has as many.
        """
        groups = self._counted_groups(w, samples, probabilities)
        tokens = self._sizes.tokens[samples, 0].astype(np.float64)
        deviation = float(np.sqrt((probabilities * (1 - probabilities) * tokens**2).sum()))
        num_drawn = ceil(2 * deviation / self._grouping.seq_len)
        if self._grouping.leaves_remainder:
            num_missing = isqrt(len(groups)) // _MISSING_GROUPS_DIVISOR + num_drawn
            return _ShuffleWindow(samples, probabilities, max(len(groups) - num_missing, 1))
        num_spare = num_spare_groups(len(groups), self._grouping) + num_drawn
        return _ShuffleWindow(samples, probabilities, min(len(groups) + num_spare, len(groups.samples)))

    def _window_order(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the windows in the order of an epoch, and the position of the first group of each."""
        if self._cached_order is None or self._cached_order[0] != epoch:
            order = _random_generator(_SEED_WINDOW_ORDER, *self._key, epoch).permutation(len(self._windows))
            counts = np.array([self._windows[w].num_groups for w in order.tolist()], dtype=np.int64)
            self._cached_order = epoch, order, np.cumsum(counts) - counts
        return self._cached_order[1], self._cached_order[2]

    def _group_window(self, epoch: int, w: int, offset: int) -> SampleGroups:
        """Group the samples of a window in an epoch; `offset` is the place of its first group in a step.

        If a shuffle needs more groups than the window has, or draws fewer samples than that, the epoch uses the groups
        by which the window's groups were counted. With `isf.remainder: next_epoch`, extra groups wait for the next
        epoch too; if there are too few, the epoch uses the counted groups instead.
        """
        window = self._windows[w]
        rng = _random_generator(_SEED_WINDOW, *self._key, epoch, w)
        is_used = rng.random(len(window.samples)) < window.probabilities
        groups = self._shuffle_and_group(window.samples[is_used], rng)
        if self._grouping.leaves_remainder:
            if len(groups) < window.num_groups:
                groups = self._counted_groups(w, window.samples, window.probabilities)
            groups = groups.reordered(np.arange(window.num_groups))  # ISF returns them in random order
        elif len(groups) > window.num_groups or len(groups.samples) < window.num_groups:
            groups = self._counted_groups(w, window.samples, window.probabilities)
        groups = split_to_count(groups, window.num_groups)
        return arrange_window(self._sizes, groups, self._grouping, offset, rng)

    def _counted_groups(self, w: int, samples: IntArray, probabilities: Float64Array) -> SampleGroups:
        """Group the samples of a window once, to count its groups."""
        rng = _random_generator(_SEED_COUNT, *self._key, 0, w)
        used = samples[rng.random(len(samples)) < probabilities]
        return self._shuffle_and_group(used if len(used) else samples, rng)

    def _shuffle_and_group(self, samples: IntArray, rng: np.random.Generator) -> SampleGroups:
        return group_window(self._sizes, rng.permutation(samples), self._grouping, rng)


def _random_generator(purpose: int, *key: int) -> np.random.Generator:
    return np.random.default_rng([purpose, *key])


def validation_batches(
    index: DataIndex,
    grouping: Grouping,
    dp: Mapping[str, int],
    num_microbatches: Mapping[str, int],
    limit: int,
    dispatch: bool = False,
) -> list[BatchMeta]:
    """Return at most `limit` global batches of held-out groups, always the same; `step` counts them from 0.

    dispatch: whether any replica may compute an item, see `StepTargets`.

    If all groups fit into fewer batches, every sample is used exactly once: groups are halved until their number fills
    the last batch. Raises `DataError` if there are fewer samples than one batch has groups.
    """
    per_batch = dp["llm"] * num_microbatches["llm"]
    order = np.random.default_rng(0).permutation(len(index.lengths))
    sizes = grouping_sizes(index.lengths, grouping)
    packed = pack_groups(sizes.tokens, sizes.budgets, order, grouping.window)
    groups = [packed[i] for i in range(len(packed))][: limit * per_batch]
    while len(groups) % per_batch:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        samples = groups[largest]
        if len(samples) == 1:
            raise DataError(
                f"data.validation: {len(index.lengths)} usable samples, but a global batch needs {per_batch} groups: "
                "add samples or lower train.global_batch"
            )
        groups[largest : largest + 1] = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    targets = StepTargets(dispatch=dispatch)
    return [
        assign(i, 0, groups[i * per_batch : (i + 1) * per_batch], index.lengths, dp, num_microbatches, targets)
        for i in range(len(groups) // per_batch)
    ]
