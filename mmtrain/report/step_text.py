"""A training step as one line of text, the time that a run still needs, and what the live display shares with both."""

import math
from collections.abc import Callable

from mmtrain.report.metrics_record import ExpertMetrics, StepMetrics, compact_number

TIME_LABELS = {"compute": "compute", "wait": "wait", "communication": "comm", "data": "data"}


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


def step_line(metrics: StepMetrics, num_steps: int, left_s: float | None) -> str:
    """Write a step as one line.

    `step  120/400  loss 1.2345  lr 3.0e-04  gnorm 0.81  tok/s 12.3k  mfu 3.1%  left 1:38  | compute 71% ...`
    """
    drawing = "" if metrics.drawing_loss is None else f"  draw {metrics.drawing_loss:.4f}"
    validation = held_out_text(metrics.val_loss, metrics.val_exact, metrics.val_drawing_loss)
    return (
        f"step {metrics.step:>{len(str(num_steps)) + 1}}/{num_steps}  loss {metrics.loss:.4f}{drawing}{validation}"
        f"{router_losses_text(metrics.experts)}  "
        f"lr {metrics.lr:.1e}  gnorm {metrics.grad_norm:.2f}  tok/s {compact_number(metrics.tokens_per_s)}  "
        f"mfu {metrics.mfu:.1%}  left {clock_text(left_s)}  | {shares_text(metrics)}"
    )


def held_out_text(val_loss: float | None, val_exact: float | None, val_drawing_loss: float | None = None) -> str:
    """Write what was measured on held-out data: `  val 1.2345  val draw 0.1234  exact 40.0%`."""
    loss = "" if val_loss is None else f"  val {val_loss:.4f}"
    if val_drawing_loss is not None:
        loss += f"  val draw {val_drawing_loss:.4f}"
    return loss if val_exact is None else f"{loss}  exact {val_exact:.1%}"


def router_losses_text(experts: ExpertMetrics | None) -> str:
    """Write the losses of routers that train with them, without coefficients: `  balance 1.0312  router z 8.1234`."""
    if experts is None:
        return ""
    losses = {"balance": experts.balance_loss, "router z": experts.z_loss}
    return "".join(f"  {name} {loss:.4f}" for name, loss in losses.items() if loss is not None)


def shares_text(metrics: StepMetrics) -> str:
    """Write where the step's time went: `compute 71% wait 20% comm 5% data 4%`."""
    return " ".join(f"{TIME_LABELS[name]} {share:.0%}" for name, share in metrics.time_s.shares().items())
