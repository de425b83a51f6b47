"""Which share of training each source of samples makes up, from which step on.

Shares are of tokens or of samples. Either way samples are drawn by the tokens: a share of samples is turned into one of
tokens by the mean length of a source's samples, which is exact over every pass through the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

ShareUnit = Literal["tokens", "samples"]


@dataclass(frozen=True)
class MixturePhase:
    """Steps with the same shares, up to the first step of the next phase."""

    first_step: int  # from 0
    shares: tuple[float, ...]  # of each source, in `unit`; they add up to 1


@dataclass(frozen=True)
class Mixture:
    """The shares of a run's sources over its steps."""

    sources: IntArray  # (S,) the number of each sample's source
    phases: tuple[MixturePhase, ...]  # by first step; the first starts at 0
    unit: ShareUnit = "tokens"

    def token_shares(self, tokens: IntArray) -> FloatArray:
        """Return (phases, sources) shares of the tokens, which add up to 1; tokens: (S,) LLM tokens of each sample."""
        shares = np.array([phase.shares for phase in self.phases], dtype=np.float64)
        if self.unit == "samples":
            num_sources = shares.shape[1]
            num_samples = np.bincount(self.sources, minlength=num_sources)
            total = np.bincount(self.sources, weights=tokens, minlength=num_sources)
            shares = shares * total / np.maximum(num_samples, 1)
        normalized: FloatArray = shares / shares.sum(axis=1, keepdims=True)
        return normalized

    def uses(self, tokens: IntArray, num_steps: int) -> FloatArray:
        """Return (S,) how often `num_steps` steps use each sample, in proportion; tokens: (S,) its LLM tokens."""
        first_steps = [min(phase.first_step, num_steps) for phase in self.phases]
        steps_of_phase = np.array([end - first for first, end in pairwise([*first_steps, num_steps])], dtype=np.float64)
        shares = steps_of_phase @ self.token_shares(tokens) / num_steps
        source_tokens = np.bincount(self.sources, weights=tokens, minlength=len(shares))
        uses: FloatArray = (shares / np.maximum(source_tokens, 1.0))[self.sources]
        return uses


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
