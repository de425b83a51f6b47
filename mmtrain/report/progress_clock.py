"""The time that a run has taken so far, and an estimate of the time it still needs."""

import math
from collections.abc import Callable


class ProgressClock:
    """Elapsed time, and the remaining time at the mean step time so far."""

    def __init__(self, num_steps: int, first_step: int, clock: Callable[[], float]) -> None:
        self.num_steps = num_steps
        self._steps_before = first_step - 1
        self._clock = clock
        self._started_s = clock()
        self._last: tuple[int, float] | None = None  # the last finished step, and when it finished

    def finish_step(self, step: int) -> None:
        """Note that `step` is finished now."""
        self._last = (step, self._clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started_s

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the last step is finished; None before the first step."""
        if self._last is None:
            return None
        step, finished_s = self._last
        mean_step_s = (finished_s - self._started_s) / (step - self._steps_before)
        return max(0.0, (self.num_steps - step) * mean_step_s - (self._clock() - finished_s))


def clock_text(seconds: float | None) -> str:
    """Write hours, minutes and seconds; `-:--` if unknown.

    >>> clock_text(98.4), clock_text(7325)
    ('1:38', '2:02:05')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, seconds_of_minute = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_of_minute:02d}" if hours else f"{minutes}:{seconds_of_minute:02d}"
