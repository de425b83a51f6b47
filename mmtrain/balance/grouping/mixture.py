"""Which share of training each source of samples makes up, from which step on.

Shares are of tokens or of samples. Either way samples are drawn by the tokens: a share of samples is turned into one of
tokens by the mean length of a source's samples, which is exact over every pass through the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from mmtrain.balance.columns import FloatArray, Lengths, SourceValues, block_slices

ShareUnit = Literal["tokens", "samples"]


@dataclass(frozen=True)
class MixturePhase:
    """Steps with the same shares, up to the first step of the next phase."""

    first_step: int  # from 0
    shares: tuple[float, ...]  # of each source, in `unit`; they add up to 1


@dataclass(frozen=True)
class Mixture:
    """The shares of a run's sources over its steps."""

    sources: Lengths  # (S,) the number of each sample's source
    phases: tuple[MixturePhase, ...]  # by first step; the first starts at 0
    unit: ShareUnit = "tokens"

    def token_shares(self, tokens: Lengths) -> FloatArray:
        """Return (phases, sources) shares of the tokens, which add up to 1; tokens: (S,) LLM tokens of each sample."""
        shares = np.array([phase.shares for phase in self.phases], dtype=np.float64)
        if self.unit == "samples":
            num_samples, total = count_by_source(self.sources, shares.shape[1], tokens)
            shares = shares * total / np.maximum(num_samples, 1)
        normalized: FloatArray = shares / shares.sum(axis=1, keepdims=True)
        return normalized

    def uses(self, tokens: Lengths, num_steps: int) -> SourceValues:
        """Return (S,) how often `num_steps` steps use each sample, in proportion; tokens: (S,) its LLM tokens."""
        first_steps = [min(phase.first_step, num_steps) for phase in self.phases]
        steps_of_phase = np.array([end - first for first, end in pairwise([*first_steps, num_steps])], dtype=np.float64)
        shares = steps_of_phase @ self.token_shares(tokens) / num_steps
        _, source_tokens = count_by_source(self.sources, len(shares), tokens)
        return SourceValues(self.sources, shares / np.maximum(source_tokens, 1.0))


def count_by_source(sources: Lengths, num_sources: int, tokens: Lengths) -> tuple[FloatArray, FloatArray]:
    """Return (sources,) the samples of each source, and their tokens; sources, tokens: (S,) of each sample."""
    num_samples, total = np.zeros(num_sources), np.zeros(num_sources)
    for rows in block_slices(len(sources)):
        numbers = sources[rows]
        num_samples += np.bincount(numbers, minlength=num_sources)
        total += np.bincount(numbers, weights=tokens[rows], minlength=num_sources)
    return num_samples, total


def mixture_phases(shares: Sequence[dict[int, float]]) -> tuple[MixturePhase, ...]:
    """Return the phases of shares by first step, one mapping for each source; they are made to add up to exactly 1.

    >>> mixture_phases([{0: 0.7, 100: 0.3}, {0: 0.3, 100: 0.7}])[1]
    MixturePhase(first_step=100, shares=(0.3, 0.7))
    """
    phases = []
    for first_step in sorted({step for schedule in shares for step in schedule}):
        values = [share_at(schedule, first_step) for schedule in shares]
        phases.append(MixturePhase(first_step, tuple(value / sum(values) for value in values)))
    return tuple(phases)


def share_at(schedule: dict[int, float], step: int) -> float:
    """Return the share that a schedule (first step -> share) sets for a step; it has an entry at or before the step."""
    return schedule[max(first for first in schedule if first <= step)]
