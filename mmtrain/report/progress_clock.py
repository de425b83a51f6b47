"""The time that a run has taken so far, and an estimate of the time it still needs."""

import math
from collections.abc import Callable


class ProgressClock:
    """Time passed, and time left at the mean pace so far."""

    def __init__(self, num_steps: int, first_step: int, clock: Callable[[], float]) -> None:
        self.num_steps = num_steps
        self._done_before = first_step - 1
        self._clock = clock
        self._started = clock()
        self._last: tuple[int, float] | None = None  # step and when it was done

    def finish_step(self, step: int) -> None:
        """Step `step` is done now."""
        self._last = (step, self._clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step is done; None before the first."""
        if self._last is None:
            return None
        step, at = self._last
        pace = (at - self._started) / (step - self._done_before)
        return max(0.0, (self.num_steps - step) * pace - (self._clock() - at))


def clock_text(seconds: float | None) -> str:
    """Hours, minutes and seconds; `-:--` when unknown.

    >>> clock_text(98.4), clock_text(7325)
    ('1:38', '2:02:05')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
