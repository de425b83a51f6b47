"""A training step as one line of text, and the parts that the live display shares with it."""

from mmtrain.report.metrics_record import StepMetrics, compact_number
from mmtrain.report.progress_clock import clock_text

TIME_LABELS = {"compute": "compute", "wait": "wait", "communication": "comm", "data": "data"}


def step_line(metrics: StepMetrics, num_steps: int, left_s: float | None) -> str:
    """Write a step as one line.

    `step  120/400  loss 1.2345  lr 3.0e-04  gnorm 0.81  tok/s 12.3k  mfu 3.1%  left 1:38  | compute 71% ...`
    """
    drawing = "" if metrics.drawing_loss is None else f"  draw {metrics.drawing_loss:.4f}"
    validation = held_out_text(metrics.val_loss, metrics.val_exact, metrics.val_drawing_loss)
    return (
        f"step {metrics.step:>{len(str(num_steps)) + 1}}/{num_steps}  loss {metrics.loss:.4f}{drawing}{validation}  "
        f"lr {metrics.lr:.1e}  gnorm {metrics.grad_norm:.2f}  tok/s {compact_number(metrics.tokens_per_s)}  "
        f"mfu {metrics.mfu:.1%}  left {clock_text(left_s)}  | {shares_text(metrics)}"
    )


def held_out_text(val_loss: float | None, val_exact: float | None, val_drawing_loss: float | None = None) -> str:
    """Write what was measured on held-out data: `  val 1.2345  val draw 0.1234  exact 40.0%`."""
    loss = "" if val_loss is None else f"  val {val_loss:.4f}"
    if val_drawing_loss is not None:
        loss += f"  val draw {val_drawing_loss:.4f}"
    return loss if val_exact is None else f"{loss}  exact {val_exact:.1%}"


def shares_text(metrics: StepMetrics) -> str:
    """Write where the step's time went: `compute 71% wait 20% comm 5% data 4%`."""
    return " ".join(f"{TIME_LABELS[name]} {share:.0%}" for name, share in metrics.time_s.shares().items())
