"""The endless stream of groups: which samples train together and when, the same for every plan, rank and worker."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, isqrt

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta, Grouping, IntArray, SampleGroups, SampleLengths, StepTargets, assign, pack_groups
from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.columns import Lengths, SampleValues, SourceValues, block_slices
from mmtrain.balance.dispatch.dispatch_samples import dispatch_samples
from mmtrain.balance.dispatch.phase_loads import stream_groups_of
from mmtrain.balance.grouping.methods import (
    GROUPING_VERSIONS,
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
from mmtrain.data.index.shared_arrays import SharedArrays, SignedArray
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
    of each anew. A window has the same number of groups in every epoch. It is counted when it is first needed: the
    first epoch counts one window after the other, and later ones find any position by arithmetic. Only the groups of a
    position's window are computed. The order in which samples were dealt, and the counts, are shared by the processes
    of a machine, and kept for the next run, where the index is cached.

    An epoch uses a sample of integer weight w exactly w times; the fraction of a weight is the probability of one more
    use, drawn in every epoch. Groups never mix epochs. If long samples have steps of their own
    (`data.long_sample_tokens`), they also have epochs of their own, which end a few steps before or after those of the
    others.

    With `whole_epochs`, an epoch has a whole number of steps: groups of the window that it visits last are divided
    until it does. There are no whole epochs where long samples have steps of their own, where samples wait for the next
    epoch, with a mixture, or if that window has too few samples.

    With a mixture, `MixtureStream` draws the samples by shares, and an epoch is as many groups as hold the tokens of
    all samples.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        grouping: Grouping,
        seed: int,
        weights: SampleValues | None = None,
        mixture: Mixture | None = None,
        shared: SharedArrays | None = None,
    ) -> None:
        """Group samples of these lengths by the method and settings of `grouping`; a mixture replaces `weights`.

        shared: where arrays of this index are kept for all processes; None: each has its own.
        """
        shared = shared or SharedArrays(None, "")
        whole_epochs, grouping = grouping.whole_epochs, replace(grouping, whole_epochs=False)
        self._lengths = lengths
        self._grouping = grouping
        self._seed = seed
        self._sizes = grouping_sizes(lengths, grouping)
        self._cached_cycle: tuple[int, IntArray] | None = None  # its number and its step table
        self._groups_per_step = grouping.global_batch
        self._substreams: tuple[_SubStream | MixtureStream, ...]
        if mixture is not None:
            self._substreams = (MixtureStream(lengths, self._sizes, grouping, seed, mixture, shared),)
            return
        if isinstance(weights, SourceValues) and (weights.values == 1).all():
            weights = None
        # One sub-stream, or two where long samples have steps of their own.
        parts = [_Entries(lengths.tokens, weights, grouping.long_tokens, is_long) for is_long in (False, True)]
        substreams = [
            _SubStream(entries, self._sizes, grouping, (seed, number), shared)
            for number, entries in enumerate(parts)
            if entries.num_samples
        ]
        if len(substreams) == 1 and whole_epochs and not grouping.leaves_remainder:
            substreams[0].end_epochs_with_steps()
        self._substreams = tuple(substreams)

    @classmethod
    def of(cls, recipe: Recipe, index: DataIndex) -> "GroupStream":
        """Return the order in which a recipe trains on its samples."""
        whole_epochs = recipe.train.epochs is not None
        grouping = Grouping.of(recipe.data, recipe.train.num_groups, whole_epochs=whole_epochs)
        shared = None if index.folder is None else SharedArrays(index.folder, index.fingerprint)
        return cls(index.lengths, grouping, recipe.train.seed, index.weights, index.mixture, shared)

    @property
    def groups_per_epoch(self) -> int:
        """The number of groups in each epoch; counts all windows that have not been counted."""
        return sum(substream.num_groups for substream in self._substreams)

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in each epoch, which may end inside of one; counts all windows."""
        return self.groups_per_epoch / self._groups_per_step

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
        epoch = int(self.epochs_done(first))
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
            as_padded = targets.balance_as_padded.get(LLM)
            return dispatch_samples(groups, num_replicas, self._sizes, cost, pad, not targets.dispatch, as_padded)
        if not targets.loads:
            return groups
        samples = np.concatenate(groups)
        loads = SampleWork(self._lengths, samples).loads(targets)
        weights = [load.weight for load in targets.loads]
        tokens, budgets = self._sizes.tokens[samples], self._sizes.budgets
        return match_step(groups, tokens, budgets, loads, weights, num_replicas)

    def epochs_done(self, num_groups: int) -> float:
        """Return the passes over the data that the first `num_groups` groups of the stream make.

        Inside an epoch, windows count alike, whether they have many groups or few.
        """
        substream = self._substreams[0]
        if len(self._substreams) == 1 and isinstance(substream, _SubStream):
            return substream.epochs_done(num_groups)
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


class _Entries:
    """The uses of samples in one epoch, by weight, of all samples or only the long ones, or only the others.

    A sample of weight w has floor(w) entries that every epoch uses, and one more if w has a fraction, which is then the
    probability that an epoch uses it. An entry is the number of its sample, or -1 minus that for a use by chance.
    """

    def __init__(self, tokens: Lengths, weights: SampleValues | None, long_tokens: int | None, is_long: bool) -> None:
        """Count the entries of samples above `long_tokens` or, with `is_long` off, of the others."""
        self._tokens = tokens
        self._weights = weights
        self._long_tokens = long_tokens
        self._is_long = is_long
        self.num_samples, self._num_sure, self._num_by_chance = 0, 0, 0
        if weights is None and long_tokens is None:  # without looking at a billion samples
            self.num_samples = self._num_sure = 0 if is_long else len(tokens)
            return
        for samples, sure_uses, fractions in self._blocks():
            self.num_samples += len(samples)
            self._num_sure += int(sure_uses.sum())
            self._num_by_chance += int(np.count_nonzero(fractions))

    def __len__(self) -> int:
        return self._num_sure + self._num_by_chance

    @property
    def largest(self) -> int:
        """Return what no entry, or its negative, is above."""
        return len(self._tokens)

    @property
    def description(self) -> str:
        """Return what these are of an index whose weights are known."""
        return f"{self._long_tokens} {self._is_long}"

    def fill(self, entries: SignedArray) -> None:
        """Write all entries: those that every epoch uses by sample, then the others by sample."""
        sure, by_chance = 0, self._num_sure
        for samples, sure_uses, fractions in self._blocks():
            repeated = np.repeat(samples, sure_uses)
            entries[sure : sure + len(repeated)] = repeated
            sure += len(repeated)
            drawn = samples[fractions > 0]
            entries[by_chance : by_chance + len(drawn)] = -1 - drawn
            by_chance += len(drawn)

    def resolve(self, entries: IntArray) -> tuple[IntArray, Float64Array]:
        """Return for entries (k,) their samples, and the probabilities that an epoch uses them."""
        is_sure = entries >= 0
        samples = np.where(is_sure, entries, -1 - entries)
        return samples, np.where(is_sure, 1.0, self._uses(samples)[1])

    def _blocks(self) -> Iterator[tuple[IntArray, IntArray, Float64Array]]:
        """Yield samples, block by block, with their sure uses and the fractions of their weights."""
        for rows in block_slices(len(self._tokens)):
            samples = np.arange(rows.start, rows.stop, dtype=np.int64)
            if self._long_tokens is not None:
                samples = samples[(self._tokens[rows] > self._long_tokens) == self._is_long]
            elif self._is_long:
                samples = samples[:0]
            yield samples, *self._uses(samples)

    def _uses(self, samples: IntArray) -> tuple[IntArray, Float64Array]:
        if self._weights is None:
            return np.ones(len(samples), dtype=np.int64), np.zeros(len(samples))
        weights = self._weights[samples]
        sure_uses = np.floor(weights).astype(np.int64)
        return sure_uses, weights - sure_uses


@dataclass
class _EpochOrder:
    """The order in which an epoch visits the windows, and where their groups end, as far as that is known."""

    epoch: int
    windows: IntArray  # (W,)
    ends: IntArray  # (W,) position behind the last group of each, in this order
    num_known: int = 0  # of `ends`


@dataclass(frozen=True)
class _Place:
    """Where a group of the stream is."""

    epoch: int
    turn: int  # of its window in the epoch
    window: int
    group: int  # in the window
    first_group: int  # of the window, in the epoch


class _SubStream:
    """The stream over samples that may share a step: all samples, or only the long ones, or only the others."""

    def __init__(
        self, entries: _Entries, sizes: GroupingSizes, grouping: Grouping, key: tuple[int, int], shared: SharedArrays
    ) -> None:
        self._sizes = sizes
        self._grouping = grouping
        self._key = key  # seed and number of the sub-stream
        self._entries = entries
        name = f"order of {key}: {entries.description}"
        self._order = shared.column(name, len(entries), len(entries), entries.largest, self._deal)
        self._num_windows = ceil(len(entries) / grouping.window)
        name = f"groups of {name}, {grouping}, version {GROUPING_VERSIONS[grouping.method]}"
        self._counts = shared.counts(name, self._num_windows, len(entries))
        self._first_order: _EpochOrder | None = None
        self._cached_order: _EpochOrder | None = None
        self._cached_groups: dict[tuple[int, int], SampleGroups] = {}  # (epoch, window) -> groups
        self._num_added = 0  # groups of the last window of each epoch, besides those that are counted

    def end_epochs_with_steps(self) -> None:
        """Let each epoch have a whole number of steps; count all windows for that.

        Groups are added to the window that an epoch visits last: any window, so the one with fewest samples to spare
        decides whether that can be. Where it cannot, epochs end inside of steps.
        """
        num_added = -self.num_groups % self._grouping.global_batch
        sizes = [self._fewest_samples(w) - self._num_groups_of(w) for w in range(self._num_windows)]
        if num_added <= min(sizes):
            self._num_added = num_added
            del self.num_groups  # counted anew

    def _fewest_samples(self, w: int) -> int:
        """Return how many samples an epoch surely uses of a window."""
        _, probabilities = self._window(w)
        return int((probabilities == 1).sum())

    @cached_property
    def num_groups(self) -> int:
        """Count the groups of an epoch, and for that the windows that nobody has counted."""
        for window in self._counts.missing():
            self._num_groups_of(window)
        return int(self._counts.all().sum()) + self._num_added

    def group(self, position: int) -> IntArray:
        """Return the sample numbers of a group of the endless stream."""
        place = self._locate(position)
        key = place.epoch, place.window
        groups = self._cached_groups.get(key)
        if groups is None:
            offset = (position - place.group) % self._grouping.global_batch
            groups = self._group_window(*key, offset, self._num_groups_in_turn(place.window, place.turn))
            while len(self._cached_groups) >= _MAX_CACHED_WINDOWS:
                oldest = next(iter(self._cached_groups))
                self._cached_groups.pop(oldest, None)
            self._cached_groups[key] = groups
        return groups[place.group]

    def epochs_done(self, position: int) -> float:
        """Return how many epochs end before a position, with the share of the windows that the next one has behind."""
        place = self._locate(position)
        share_of_window = place.group / self._num_groups_in_turn(place.window, place.turn)
        return place.epoch + (place.turn + share_of_window) / self._num_windows

    def _locate(self, position: int) -> _Place:
        """Find a group; in the first epoch, windows behind it need not be counted."""
        place = self._locate_in_epoch(0, position)
        if place is not None:
            return place
        epoch, in_epoch = divmod(position, self.num_groups)
        place = self._locate_in_epoch(epoch, in_epoch)
        assert place is not None, "an epoch has as many groups as its windows"
        return place

    def _locate_in_epoch(self, epoch: int, position: int) -> _Place | None:
        """Find a group of an epoch, counting windows up to it; None if the epoch has fewer.

        Threads may share this object: each writes the same ends.
        """
        order = self._window_order(epoch)
        known = order.num_known
        while not known or order.ends[known - 1] <= position:
            if known == self._num_windows:
                return None
            count = self._num_groups_in_turn(int(order.windows[known]), known)
            order.ends[known] = count + (order.ends[known - 1] if known else 0)
            known += 1
            order.num_known = max(order.num_known, known)
        turn = int(np.searchsorted(order.ends[:known], position, side="right"))
        first_group = int(order.ends[turn - 1]) if turn else 0
        return _Place(epoch, turn, int(order.windows[turn]), position - first_group, first_group)

    def _window_order(self, epoch: int) -> _EpochOrder:
        """Return the windows in the order of an epoch."""
        cached = self._cached_order if epoch else self._first_order
        if cached is not None and cached.epoch == epoch:
            return cached
        windows = _random_generator(_SEED_WINDOW_ORDER, *self._key, epoch).permutation(self._num_windows)
        order = _EpochOrder(epoch, windows, np.zeros(self._num_windows, dtype=np.int64))
        if epoch:
            self._cached_order = order
        else:
            self._first_order = order
        return order

    def _deal(self, entries: SignedArray) -> None:
        """Write the entries in the order in which they are dealt to windows, at random, once for all epochs."""
        self._entries.fill(entries)
        _random_generator(_SEED_LAYOUT, *self._key).shuffle(entries)

    def _window(self, w: int) -> tuple[IntArray, Float64Array]:
        """Return (k,) the samples of a window, twice where an epoch may use them twice, and (k,) their probabilities.

        Windows are equal parts of the order; the first ones have an entry more where it cannot be divided.
        """
        size, num_larger = divmod(len(self._order), self._num_windows)
        start = w * size + min(w, num_larger)
        return self._entries.resolve(self._order[start : start + size + (w < num_larger)])

    def _num_groups_in_turn(self, w: int, turn: int) -> int:
        """Return the groups of a window that an epoch visits as number `turn`."""
        is_last = turn == self._num_windows - 1
        return self._num_groups_of(w) + (self._num_added if is_last else 0)

    def _num_groups_of(self, w: int) -> int:
        """Return the groups of a window: those of one shuffle, and some spare ones for epochs that need more.

        With `isf.remainder: next_epoch` there are fewer instead, so that every epoch has as many.
        """
        if not self._counts[w]:
            self._counts[w] = self._count_groups(w)
        return self._counts[w]

    def _count_groups(self, w: int) -> int:
        samples, probabilities = self._window(w)
        groups = self._counted_groups(w, samples, probabilities)
        tokens = self._sizes.tokens[samples][:, 0].astype(np.float64)
        deviation = float(np.sqrt((probabilities * (1 - probabilities) * tokens**2).sum()))
        num_drawn = ceil(2 * deviation / self._grouping.seq_len)
        if self._grouping.leaves_remainder:
            num_missing = isqrt(len(groups)) // _MISSING_GROUPS_DIVISOR + num_drawn
            return max(len(groups) - num_missing, 1)
        num_spare = num_spare_groups(len(groups), self._grouping) + num_drawn
        return min(len(groups) + num_spare, len(groups.samples))

    def _group_window(self, epoch: int, w: int, offset: int, num_groups: int) -> SampleGroups:
        """Group the samples of a window into as many groups; `offset` is the place of its first group in a step.

        If a shuffle needs more groups than the window has, or draws fewer samples than that, the epoch uses the groups
        by which the window's groups were counted. With `isf.remainder: next_epoch`, extra groups wait for the next
        epoch too; if there are too few, the epoch uses the counted groups instead.
        """
        samples, probabilities = self._window(w)
        rng = _random_generator(_SEED_WINDOW, *self._key, epoch, w)
        is_used = rng.random(len(samples)) < probabilities
        groups = self._shuffle_and_group(samples[is_used], rng)
        if self._grouping.leaves_remainder:
            if len(groups) < num_groups:
                groups = self._counted_groups(w, samples, probabilities)
            groups = groups.reordered(np.arange(num_groups))  # ISF returns them in random order
        elif len(groups) > num_groups or len(groups.samples) < num_groups:
            groups = self._counted_groups(w, samples, probabilities)
        groups = split_to_count(groups, num_groups)
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
    setting: str = "data.validation",
) -> list[BatchMeta]:
    """Return at most `limit` global batches of held-out groups, always the same; `step` counts them from 0.

    dispatch: whether any replica may compute an item, see `StepTargets`. setting: holds the samples out, for messages.

    If all groups fit into fewer batches, every sample is used exactly once: groups are halved until their number fills
    the last batch. Raises `DataError` if there are fewer samples than one batch has groups.
    """
    per_batch = dp["llm"] * num_microbatches["llm"]
    order = np.random.default_rng(0).permutation(len(index.lengths))
    sizes = grouping_sizes(index.lengths, grouping)
    packed = pack_groups(sizes.tokens[np.arange(len(order))], sizes.budgets, order, grouping.window)
    groups = [packed[i] for i in range(len(packed))][: limit * per_batch]
    while len(groups) % per_batch:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        samples = groups[largest]
        if len(samples) == 1:
            raise DataError(
                f"{setting}: {len(index.lengths)} usable samples, but a global batch needs {per_batch} groups: "
                "add samples or lower train.global_batch"
            )
        groups[largest : largest + 1] = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    targets = StepTargets(dispatch=dispatch)
    return [
        assign(i, 0, groups[i * per_batch : (i + 1) * per_batch], index.lengths, dp, num_microbatches, targets)
        for i in range(len(groups) // per_batch)
    ]
