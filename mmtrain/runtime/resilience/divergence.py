"""Judge by loss and gradient norm whether training has left its course."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW_STEPS = 100  # normal steps that say what is usual
MIN_WINDOW_STEPS = 20  # fewer say nothing about the spread
RECOVERY_STEPS = 10  # normal steps in a row after which a stretch of unusual ones is over
MAX_DEVIATIONS = 8.0  # above the median, in standard deviations; gradient norms have heavier tails than a normal one
DEVIATION_PER_MAD = 1.4826  # standard deviation of a normal distribution, from its median absolute deviation
# A band this wide at least, relative to the median: early in a run the spread of a smooth loss is next to nothing.
MIN_GRAD_NORM_EXCESS = 2.0
MIN_LOSS_EXCESS = 0.2


@dataclass(frozen=True)
class CourseChange:
    """A stretch of unusual steps has started (with what was unusual) or ended."""

    step: int  # from 1: the first of the stretch, or the one that ended it
    reason: str | None  # None: the stretch is over


class CourseMonitor:
    """Compares each step with the last `WINDOW_STEPS` normal ones.

    A step is unusual if its gradient was not finite, or if loss or gradient norm lie above the median by more than
    the band of medians and median absolute deviations allows. Unusual steps do not enter the window, so a loss that
    stays high stays unusual. A checkpoint that is saved from the first unusual step on is suspect, until
    `RECOVERY_STEPS` normal steps in a row have passed.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Continue from what `to_state` returned, or start without knowing what is usual."""
        state = state or {}
        self._losses: deque[float] = deque(state.get("losses", ()), WINDOW_STEPS)
        self._grad_norms: deque[float] = deque(state.get("grad_norms", ()), WINDOW_STEPS)
        self._num_normal_steps: int = state.get("num_normal_steps", 0)  # in a row, within a stretch
        self.suspect_since: int | None = state.get("suspect_since")  # first unusual step, from 1

    def to_state(self) -> dict[str, Any]:
        """Return all that decides about later steps, as JSON values."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "num_normal_steps": self._num_normal_steps,
            "suspect_since": self.suspect_since,
        }

    def observe(self, step: int, loss: float, grad_norm: float) -> CourseChange | None:
        """Judge a step (from 1); return what changed with it."""
        reason = self._unusual(loss, grad_norm)
        if reason is not None:
            self._num_normal_steps = 0
            if self.suspect_since is not None:
                return None
            self.suspect_since = step
            return CourseChange(step, reason)
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        if self.suspect_since is None:
            return None
        self._num_normal_steps += 1
        if self._num_normal_steps < RECOVERY_STEPS:
            return None
        self._num_normal_steps = 0
        self.suspect_since = None
        return CourseChange(step, None)

    def _unusual(self, loss: float, grad_norm: float) -> str | None:
        for name, value, window, min_excess in (
            ("gradient norm", grad_norm, self._grad_norms, MIN_GRAD_NORM_EXCESS),
            ("loss", loss, self._losses, MIN_LOSS_EXCESS),
        ):
            if not math.isfinite(value):
                return f"{name} is {value}"
            if len(window) < MIN_WINDOW_STEPS:
                continue
            middle = median(window)
            deviation = DEVIATION_PER_MAD * median(abs(other - middle) for other in window)
            if value > middle + max(MAX_DEVIATIONS * deviation, min_excess * abs(middle)):
                return f"{name} {value:.4g} is far above the usual {middle:.4g}"
        return None
