"""The endless stream of groups: which samples train together and when, whatever plan, rank or worker asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import ceil

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta, Grouping, IntArray, SampleGroups, SampleLengths, StepTargets, assign, pack_groups
from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.even_groups import even_out_groups
from mmtrain.balance.methods import (
    GroupingSizes,
    arrange_window,
    group_window,
    grouping_sizes,
    num_spare_groups,
    split_to_count,
)
from mmtrain.balance.step_targets import LLM, SampleWork
from mmtrain.data.index.data_index import DataIndex
from mmtrain.errors import DataError
from mmtrain.recipe.schema import Recipe

Float64Array = npt.NDArray[np.float64]

# What a generator is for; first in its seed, since numpy takes no notice of zeros at the end of one.
_LAYOUT, _COUNT, _WINDOWS, _WINDOW, _STEPS = range(1, 6)
_ROWS_AT_ONCE = 256  # of groups side by side that exchange samples at once: more would take much memory
_KEPT = 4  # windows kept in memory: the one in use, the one begun ahead, and the same of another reader


class GroupStream:
    """Groups over epochs, a pure function of (seed, epoch, position).

    Samples are dealt into windows once; an epoch visits the windows in a new order and shuffles and groups the samples
    of each anew. A window has the same number of groups in every epoch, so any place in the stream is found by
    arithmetic and needs the groups of its own window alone.

    An epoch uses a sample of weight w exactly w times; the fraction of a broken weight decides by chance, anew each
    epoch. Groups never mix epochs. Where long samples have steps of their own, they have epochs of their own too,
    which end a few steps before or after those of the others.
    """

    def __init__(
        self, lengths: SampleLengths, grouping: Grouping, seed: int, weights: npt.NDArray[np.float64] | None = None
    ) -> None:
        """Group samples of these lengths as `grouping` says."""
        self._lengths, self._grouping, self._seed = lengths, grouping, seed
        weights = np.ones(len(lengths)) if weights is None else weights
        sizes = self._sizes = grouping_sizes(lengths, grouping)
        limit = grouping.long_tokens
        is_long = np.zeros(len(lengths), dtype=bool) if limit is None else lengths.tokens > limit
        kinds = [np.flatnonzero(is_long == kind) for kind in (False, True)]
        self._strands = tuple(
            _Strand(samples, weights[samples], sizes, grouping, (seed, number))
            for number, samples in enumerate(kinds)
            if len(samples)
        )
        self._turns: tuple[int, IntArray] | None = None

    @classmethod
    def of(cls, recipe: Recipe, index: DataIndex) -> "GroupStream":
        """The order in which a recipe trains on its samples."""
        grouping = Grouping.of(recipe.data, recipe.train.global_batch)
        return cls(index.lengths, grouping, recipe.train.seed, index.weights)

    @property
    def groups_per_epoch(self) -> int:
        """Groups in each epoch."""
        return sum(strand.num_groups for strand in self._strands)

    def groups(self, first: int, count: int) -> list[IntArray]:
        """Sample numbers of groups [first, first + count) of the stream."""
        return [self._group(place) for place in range(first, first + count)]

    def batch(
        self,
        step: int,
        global_batch: int,
        dp: Mapping[str, int],
        num_microbatches: Mapping[str, int],
        targets: StepTargets = NO_TARGETS,
    ) -> BatchMeta:
        """Groups [step, step + 1) * global_batch, laid out over the replicas and microbatches of every unit.

        Which samples these are hangs on nothing else; who computes which, beside which and when, is what `targets` ask
        for. Samples change groups for their sake where the method is `matched`.
        """
        first = step * global_batch
        groups = self.groups(first, global_batch)
        groups = self._evened(groups, dp[LLM], targets)
        return assign(step, first // self.groups_per_epoch, groups, self._lengths, dp, num_microbatches, targets)

    def epoch(self, epoch: int, num_replicas: int = 1, targets: StepTargets = NO_TARGETS) -> SampleGroups:
        """All groups of one epoch, evened for replicas that compute so many in a row side by side."""
        total = self.groups_per_epoch
        groups = self.groups(epoch * total, total)
        rows = [groups[i : i + num_replicas] for i in range(0, total // num_replicas * num_replicas, num_replicas)]
        groups[: len(rows) * num_replicas] = [
            group
            for lo in range(0, len(rows), _ROWS_AT_ONCE)
            for group in self._evened(list(chain(*rows[lo : lo + _ROWS_AT_ONCE])), num_replicas, targets)
        ]
        sizes = np.array([0, *map(len, groups)], dtype=np.int64)
        return SampleGroups(np.cumsum(sizes), np.concatenate(groups))

    def _evened(self, groups: list[IntArray], num_replicas: int, targets: StepTargets) -> list[IntArray]:
        if not targets.loads or self._grouping.method != "matched":
            return groups
        samples = np.concatenate(groups)
        loads = SampleWork(self._lengths, samples).loads(targets)
        weights = [load.weight for load in targets.loads]
        return even_out_groups(groups, self._sizes.tokens[samples], self._sizes.budgets, loads, weights, num_replicas)

    def epochs_done(self, num_groups: int) -> float:
        """Passes over the data that the first `num_groups` groups of the stream make."""
        return num_groups / self.groups_per_epoch

    def _group(self, place: int) -> IntArray:
        if len(self._strands) == 1:
            return self._strands[0].group(place)
        step, index = divmod(place, self._grouping.global_batch)
        strand, turn = self._turn(step)
        return self._strands[strand].group(turn * self._grouping.global_batch + index)

    def _turn(self, step: int) -> tuple[int, int]:
        """Whose turn a step is, and the number of its turns before.

        In a cycle of as many steps as an epoch has groups, which is a whole number of epochs for everyone, each strand
        has a step for every group of its own, evenly spread and in random order.
        """
        cycle, slot = divmod(step, self.groups_per_epoch)
        known = self._turns
        if known is None or known[0] != cycle:
            rng = _rng(_STEPS, self._seed, 0, cycle)
            times = [np.arange(strand.num_groups) for strand in self._strands]
            when = np.concatenate([(time + rng.random(len(time))) / len(time) for time in times])
            strand = np.repeat(np.arange(len(times)), [len(time) for time in times])
            table = np.stack([strand, np.concatenate(times)], axis=1)[np.argsort(when, kind="stable")]
            known = self._turns = cycle, table
        number, time = known[1][slot].tolist()
        return number, cycle * self._strands[number].num_groups + time


@dataclass(frozen=True)
class _Window:
    """Samples that are shuffled and grouped together in every epoch."""

    samples: IntArray  # (k,) one that an epoch may use twice is named twice
    chance: Float64Array  # (k,) that an epoch uses it
    num_groups: int


class _Strand:
    """The samples that may share steps with each other: all of them, or the long ones, or the others."""

    def __init__(
        self, samples: IntArray, weights: Float64Array, sizes: GroupingSizes, grouping: Grouping, key: tuple[int, int]
    ) -> None:
        self._sizes, self._grouping, self._key = sizes, grouping, key
        self._windows = self._dealt(samples, weights)
        self.num_groups = sum(window.num_groups for window in self._windows)  # in each epoch
        self._visits: tuple[int, IntArray, IntArray] | None = None
        self._made: dict[tuple[int, int], SampleGroups] = {}

    def group(self, place: int) -> IntArray:
        """Sample numbers of a group of the endless stream."""
        epoch, within = divmod(place, self.num_groups)
        order, starts = self._visit(epoch)
        turn = int(np.searchsorted(starts, within, side="right")) - 1
        window, start = int(order[turn]), int(starts[turn])
        groups = self._made.get((epoch, window))
        if groups is None:
            groups = self._make(epoch, window, (place - within + start) % self._grouping.row_size)
            while len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)), None)
            self._made[epoch, window] = groups
        return groups[within - start]

    def _dealt(self, samples: IntArray, weights: Float64Array) -> list[_Window]:
        """Deal the samples into windows at random, once for all epochs."""
        whole = np.floor(weights).astype(np.int64)
        fraction = weights - whole
        broken = fraction > 0
        entries = np.concatenate([np.repeat(samples, whole), samples[broken]])
        chance = np.concatenate([np.ones(int(whole.sum())), fraction[broken]])
        order = _rng(_LAYOUT, *self._key).permutation(len(entries))
        parts = np.array_split(order, ceil(len(entries) / self._grouping.window))
        return [self._counted(w, entries[part], chance[part]) for w, part in enumerate(parts)]

    def _counted(self, w: int, samples: IntArray, chance: Float64Array) -> _Window:
        groups = self._reference(w, samples, chance)
        tokens = self._sizes.tokens[samples, 0].astype(np.float64)
        deviation = float(np.sqrt((chance * (1 - chance) * tokens**2).sum()))
        spare = num_spare_groups(len(groups), self._grouping) + ceil(2 * deviation / self._grouping.seq_len)
        return _Window(samples, chance, min(len(groups) + spare, len(groups.samples)))

    def _visit(self, epoch: int) -> tuple[IntArray, IntArray]:
        """The windows in the order of an epoch, and the places at which they start."""
        known = self._visits
        if known is None or known[0] != epoch:
            order = _rng(_WINDOWS, *self._key, epoch).permutation(len(self._windows))
            sizes = np.array([self._windows[w].num_groups for w in order.tolist()], dtype=np.int64)
            known = self._visits = epoch, order, np.cumsum(sizes) - sizes
        return known[1], known[2]

    def _make(self, epoch: int, w: int, offset: int) -> SampleGroups:
        """The groups of a window in an epoch.

        Should a shuffle need more groups than the window has, or leave fewer samples, the epoch uses the samples and
        groups they were counted with.
        """
        window, rng = self._windows[w], _rng(_WINDOW, *self._key, epoch, w)
        groups = self._composed(window.samples[rng.random(len(window.samples)) < window.chance], rng)
        if len(groups) > window.num_groups or len(groups.samples) < window.num_groups:
            groups = self._reference(w, window.samples, window.chance)
        groups = split_to_count(groups, window.num_groups)
        return arrange_window(self._sizes, groups, self._grouping, offset, rng, exchanged=False)

    def _reference(self, w: int, samples: IntArray, chance: Float64Array) -> SampleGroups:
        """The groups that decide how many a window has."""
        rng = _rng(_COUNT, *self._key, 0, w)
        drawn = samples[rng.random(len(samples)) < chance]
        return self._composed(drawn if len(drawn) else samples, rng)

    def _composed(self, samples: IntArray, rng: np.random.Generator) -> SampleGroups:
        return group_window(self._sizes, rng.permutation(samples), self._grouping, rng)


def _rng(purpose: int, *key: int) -> np.random.Generator:
    return np.random.default_rng([purpose, *key])


def validation_batches(
    index: DataIndex, grouping: Grouping, dp: Mapping[str, int], num_microbatches: Mapping[str, int], limit: int
) -> list[BatchMeta]:
    """At most `limit` global batches of held-out groups, always the same ones; `step` counts them from 0.

    When they fit into fewer, every sample is used exactly once: groups are halved until their number fills the last
    batch. Raises `DataError` if there are fewer samples than one batch has groups.
    """
    per_batch = dp["llm"] * num_microbatches["llm"]
    order = np.random.default_rng(0).permutation(len(index.lengths))
    sizes = grouping_sizes(index.lengths, grouping)
    packed = pack_groups(sizes.tokens, sizes.budgets, order, grouping.window)
    groups = [packed[i] for i in range(len(packed))][: limit * per_batch]
    while len(groups) % per_batch:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        whole = groups[largest]
        if len(whole) == 1:
            raise DataError(
                f"data.validation: {len(index.lengths)} usable samples, but a global batch needs {per_batch} groups: "
                "add samples or lower train.global_batch"
            )
        groups[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return [
        assign(i, 0, groups[i * per_batch : (i + 1) * per_batch], index.lengths, dp, num_microbatches)
        for i in range(len(groups) // per_batch)
    ]
