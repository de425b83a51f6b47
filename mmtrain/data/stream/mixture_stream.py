"""The stream of groups in which every source makes up the share of the tokens that the recipe sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from mmtrain.balance import Grouping, IntArray, SampleGroups, SampleLengths
from mmtrain.balance.columns import Lengths, StoredColumn, block_slices
from mmtrain.balance.grouping.methods import arrange_window, group_window, num_spare_groups, split_to_count
from mmtrain.balance.grouping.mixture import Mixture
from mmtrain.balance.grouping.pack_groups import GroupingSizes
from mmtrain.data.index.shared_arrays import SharedArrays, SignedArray

_SEED_SOURCE_ORDER = 6  # shuffles a source for each pass; 1 to 5 are those of `group_stream`
_SEED_BLOCK = 7  # shuffles and groups the samples of a block
_SEED_MIXTURE_MEASUREMENT = 8  # likewise for measuring how many tokens fit
_MIN_MEASURED_GROUPS = 256  # in all measurements, so that small blocks vary little around their result
_MAX_MEASUREMENTS = 8
_MAX_CACHED_PASSES = 2  # of each source: a block may reach from one into the next
_ROWS_PER_SUM = 4096  # of a pass: how many samples lie between places whose token is known
_MAX_CACHED_BLOCKS = 4  # as for the windows of `group_stream`


class MixtureStream:
    """Groups of samples by shares, a pure function of (seed, position): no step depends on how many were trained.

    The samples of a source are an endless line: pass after pass, each in a new order, each with every sample once. A
    step takes from every source's line the same number of tokens, its share, as long as shares stay the same; so what
    a step takes is found by arithmetic. Steps are grouped in blocks of about `Grouping.window` samples. A sample
    belongs to the block in which its first token lies, which leaves each source within one sample of its share.

    A block has a fixed number of groups. How many tokens they hold is measured on a few blocks. Should one need more
    groups, its emptiest groups are left out of this pass; should it have fewer samples than groups, it also takes
    samples of the next one.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        sizes: GroupingSizes,
        grouping: Grouping,
        seed: int,
        mixture: Mixture,
        shared: SharedArrays,
    ) -> None:
        """Mix samples of these lengths; `sizes` are what `grouping_sizes` makes of them.

        shared: where the orders of passes are kept for all processes.
        """
        self._sizes = sizes
        self._grouping = grouping
        self._seed = seed
        num_sources = len(mixture.phases[0].shares)
        self._lines = [
            _SourceLine(mixture.sources, rows, lengths.tokens, (seed, source), shared)
            for source, rows in enumerate(_rows_of_sources(mixture.sources, num_sources))
        ]
        self._phases: list[_Phase] = []
        starts = (0,) * num_sources
        shares_by_phase = mixture.token_shares(lengths.tokens).tolist()
        first_steps = [phase.first_step for phase in mixture.phases]
        for number, shares in enumerate(shares_by_phase):
            num_steps = first_steps[number + 1] - first_steps[number] if number + 1 < len(first_steps) else None
            self._phases.append(self._plan_phase(number, first_steps[number], num_steps, tuple(shares), starts))
            if num_steps is not None:
                starts = self._phases[-1].starts_at(num_steps)
        tokens_per_step = max(1, sum(self._phases[0].step_tokens))
        total_tokens = sum(line.num_tokens for line in self._lines)
        # Groups with as many tokens as all sources have: what counts as an epoch.
        self.num_groups = max(1, ceil(total_tokens * grouping.global_batch / tokens_per_step))
        self._cached_blocks: dict[tuple[int, int], SampleGroups] = {}  # (phase, block) -> groups

    def group(self, position: int) -> IntArray:
        """Return the sample numbers of a group of the endless stream."""
        step, place = divmod(position, self._grouping.global_batch)
        number = max(i for i, phase in enumerate(self._phases) if phase.first_step <= step)
        phase = self._phases[number]
        block, step_in_block = phase.block_of(step - phase.first_step)
        groups = self._cached_blocks.get((number, block))
        if groups is None:
            groups = self._group_block(number, block)
            while len(self._cached_blocks) >= _MAX_CACHED_BLOCKS:
                oldest = next(iter(self._cached_blocks))
                self._cached_blocks.pop(oldest, None)
            self._cached_blocks[number, block] = groups
        return groups[step_in_block * self._grouping.global_batch + place]

    def passes(self, num_steps: int) -> list[float]:
        """Return how often the first `num_steps` steps pass through each source."""
        phase = max((phase for phase in self._phases if phase.first_step <= num_steps), key=lambda p: p.first_step)
        ends = phase.starts_at(num_steps - phase.first_step)
        return [end / max(line.num_tokens, 1) for end, line in zip(ends, self._lines, strict=True)]

    def _plan_phase(
        self, number: int, first_step: int, num_steps: int | None, shares: tuple[float, ...], starts: tuple[int, ...]
    ) -> "_Phase":
        """Measure how many tokens the steps of a phase hold; num_steps: None for the last phase, which has no end."""
        global_batch = self._grouping.global_batch
        samples_per_token = sum(
            share / line.mean_tokens for share, line in zip(shares, self._lines, strict=True) if share
        )
        samples_per_step = global_batch * self._grouping.seq_len * samples_per_token
        steps_per_block = max(1, int(self._grouping.window / samples_per_step))
        if num_steps is not None:
            steps_per_block = min(steps_per_block, num_steps)
        num_groups = steps_per_block * global_batch
        tokens_per_group = self._measure_group_tokens(number, num_groups, shares)
        tokens_per_step = tokens_per_group * num_groups / steps_per_block
        step_tokens = tuple(round(tokens_per_step * share) for share in shares)
        return _Phase(first_step, num_steps, steps_per_block, step_tokens, starts)

    def _measure_group_tokens(self, phase: int, num_groups: int, shares: tuple[float, ...]) -> float:
        """Return how many tokens a group may hold on average so that a block needs at most `num_groups` groups."""
        tokens = num_groups * self._grouping.seq_len
        num_measurements = min(_MAX_MEASUREMENTS, ceil(_MIN_MEASURED_GROUPS / num_groups))
        most_groups, fewest_samples = 0, 0
        for i in range(num_measurements):
            rng = np.random.default_rng([_SEED_MIXTURE_MEASUREMENT, self._seed, phase, i])
            samples = np.concatenate(
                [
                    line.take(i * round(tokens * share), (i + 1) * round(tokens * share))
                    for share, line in zip(shares, self._lines, strict=True)
                ]
            )
            groups = len(self._shuffle_and_group(samples, rng))
            if groups > most_groups:
                most_groups, fewest_samples = groups, len(samples)
        # Spare groups are filled by halving others, which takes samples that share a group.
        num_spare = min(num_spare_groups(num_groups, self._grouping), fewest_samples - most_groups)
        return tokens / max(most_groups, 1) * max(num_groups - num_spare, 1) / num_groups

    def _group_block(self, number: int, block: int) -> SampleGroups:
        phase = self._phases[number]
        first_step, num_steps = phase.steps_of(block)
        num_groups = num_steps * self._grouping.global_batch
        rng = np.random.default_rng([_SEED_BLOCK, self._seed, number, block])
        samples = self._samples_of(phase, first_step, first_step + num_steps)
        last_step = first_step + num_steps
        while len(samples) < num_groups:
            samples = np.concatenate([samples, self._samples_of(phase, last_step, last_step + 1)])
            last_step += 1
        groups = self._shuffle_and_group(samples, rng)
        if len(groups) > num_groups:
            groups = _fullest(groups, self._sizes.tokens[groups.samples][:, 0], num_groups)
        groups = split_to_count(groups, num_groups)
        return arrange_window(self._sizes, groups, self._grouping, 0, rng)

    def _samples_of(self, phase: "_Phase", first_step: int, end_step: int) -> IntArray:
        """Return the samples of the steps [first_step, end_step) of a phase, source by source."""
        bounds = zip(phase.starts_at(first_step), phase.starts_at(end_step), strict=True)
        return np.concatenate([line.take(start, end) for line, (start, end) in zip(self._lines, bounds, strict=True)])

    def _shuffle_and_group(self, samples: IntArray, rng: np.random.Generator) -> SampleGroups:
        return group_window(self._sizes, rng.permutation(samples), self._grouping, rng)


@dataclass(frozen=True)
class _Phase:
    """Steps that take the same number of tokens from each source. Steps are counted from the phase's first."""

    first_step: int  # in the run
    num_steps: int | None  # None: without end
    steps_per_block: int
    step_tokens: tuple[int, ...]  # that a step takes of each source
    starts: tuple[int, ...]  # where its first step starts in each source's line, in tokens

    def starts_at(self, step: int) -> tuple[int, ...]:
        """Return where a step starts in each source's line."""
        return tuple(start + step * tokens for start, tokens in zip(self.starts, self.step_tokens, strict=True))

    def block_of(self, step: int) -> tuple[int, int]:
        """Return the block of a step, and which of its steps it is."""
        if self.num_steps is None:
            return divmod(step, self.steps_per_block)
        block = step * self._num_blocks(self.num_steps) // self.num_steps
        while self.steps_of(block)[0] > step:
            block -= 1
        while sum(self.steps_of(block)) <= step:
            block += 1
        return block, step - self.steps_of(block)[0]

    def steps_of(self, block: int) -> tuple[int, int]:
        """Return the first step of a block, and how many it has: equally many, or one fewer."""
        if self.num_steps is None:
            return block * self.steps_per_block, self.steps_per_block
        num_blocks = self._num_blocks(self.num_steps)
        first, end = (number * self.num_steps // num_blocks for number in (block, block + 1))
        return first, end - first

    def _num_blocks(self, num_steps: int) -> int:
        return ceil(num_steps / self.steps_per_block)


@dataclass(frozen=True)
class _Pass:
    """One pass through a source: its samples in order, and where some of them start, counted in tokens."""

    samples: StoredColumn  # (n,)
    starts: StoredColumn  # of each `_ROWS_PER_SUM`-th sample


class _SourceLine:
    """The endless line of a source's samples, whose places are counted in tokens."""

    def __init__(
        self, sources: Lengths, rows: slice, tokens: Lengths, key: tuple[int, int], shared: SharedArrays
    ) -> None:
        """Line up those samples in `rows` whose entry in `sources` (S,) is the source's number; tokens: (S,)."""
        self._sources = sources
        self._rows = rows
        self._tokens = tokens
        self._key = key  # seed and number of the source
        self._shared = shared
        self._num_samples = 0
        self.num_tokens = 0  # of a pass
        for samples in self._blocks():
            self._num_samples += len(samples)
            self.num_tokens += int(self._lengths(samples).sum())
        self.mean_tokens = self.num_tokens / max(self._num_samples, 1)
        self._cached_passes: dict[int, _Pass] = {}

    def take(self, start: int, end: int) -> IntArray:
        """Return the samples whose first token is at [start, end) of the line; a sample may occur several times."""
        parts = [np.empty(0, dtype=np.int64)]
        position = start
        while position < end:
            number, offset = divmod(position, self.num_tokens)
            pass_start = number * self.num_tokens
            parts.append(self._take_of_pass(self._pass(number), offset, end - pass_start))
            position = pass_start + self.num_tokens
        return np.concatenate(parts)

    def _take_of_pass(self, of_pass: _Pass, start: int, end: int) -> IntArray:
        """Return the samples whose first token is at [start, end) of a pass."""
        starts = np.asarray(of_pass.starts)
        first, last = np.maximum(np.searchsorted(starts, [start, end]) - 1, 0).tolist()
        samples = of_pass.samples[first * _ROWS_PER_SUM : (last + 1) * _ROWS_PER_SUM]
        lengths = self._lengths(samples)
        first_tokens = starts[first] + np.cumsum(lengths) - lengths
        taken: IntArray = samples[(first_tokens >= start) & (first_tokens < end)]
        return taken

    def _pass(self, number: int) -> _Pass:
        """Return the samples in the order of a pass; earlier passes are forgotten."""
        if number not in self._cached_passes:
            name, num_samples = f"pass of {self._key}: {number}", self._num_samples
            samples = self._shared.column(
                name, num_samples, num_samples, len(self._tokens), lambda rows: self._shuffle(number, rows)
            )
            num_sums = ceil(num_samples / _ROWS_PER_SUM)
            starts = self._shared.column(
                f"starts of {name}", num_sums, num_samples, self.num_tokens, lambda rows: self._sum(samples, rows)
            )
            while len(self._cached_passes) >= _MAX_CACHED_PASSES:
                oldest = next(iter(self._cached_passes))
                self._cached_passes.pop(oldest, None)
            self._cached_passes[number] = _Pass(samples, starts)
            outdated = f"pass of {self._key}: {number - _MAX_CACHED_PASSES}"
            self._shared.remove(outdated)
            self._shared.remove(f"starts of {outdated}")
        return self._cached_passes[number]

    def _shuffle(self, number: int, rows: SignedArray) -> None:
        """Write the samples in the order of a pass."""
        done = 0
        for samples in self._blocks():
            rows[done : done + len(samples)] = samples
            done += len(samples)
        np.random.default_rng([_SEED_SOURCE_ORDER, *self._key, number]).shuffle(rows)

    def _sum(self, samples: StoredColumn, starts: SignedArray) -> None:
        """Write the first token of each `_ROWS_PER_SUM`-th of the `samples`."""
        position = 0
        for rows in block_slices(len(samples)):
            sums = np.concatenate([[0], np.cumsum(self._lengths(samples[rows]))])
            of_block = sums[: rows.stop - rows.start : _ROWS_PER_SUM]
            first = rows.start // _ROWS_PER_SUM
            starts[first : first + len(of_block)] = position + of_block
            position += int(sums[-1])

    def _blocks(self) -> Iterator[IntArray]:
        """Yield the source's samples in blocks."""
        for block in block_slices(self._rows.stop - self._rows.start):
            rows = slice(self._rows.start + block.start, self._rows.start + block.stop)
            yield rows.start + np.flatnonzero(self._sources[rows] == self._key[1])

    def _lengths(self, samples: IntArray) -> IntArray:
        return np.maximum(self._tokens[samples], 1)  # a sample without tokens has a place too


def _rows_of_sources(sources: Lengths, num_sources: int) -> list[slice]:
    """Return for each source rows of `sources` (S,) that hold all of its samples; in an index they hold no others."""
    bounds: dict[int, tuple[int, int]] = {}
    for rows in block_slices(len(sources)):
        numbers = sources[rows]
        for source in np.unique(numbers).tolist():
            of_source = rows.start + np.flatnonzero(numbers == source)
            first, _ = bounds.get(source, (int(of_source[0]), 0))
            bounds[source] = first, int(of_source[-1]) + 1
    return [slice(*bounds.get(source, (0, 0))) for source in range(num_sources)]


def _fullest(groups: SampleGroups, tokens: IntArray, count: int) -> SampleGroups:
    """Keep the `count` groups with most tokens, in their order; tokens: (n,) of each of their samples."""
    loads: IntArray = np.add.reduceat(tokens, groups.first[:-1])
    return groups.reordered(np.sort(np.argsort(-loads, kind="stable")[:count]))
