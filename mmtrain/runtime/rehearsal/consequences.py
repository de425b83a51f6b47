"""Say what a run would do where a rehearsal was broken by a fault, and what its checkpoints cost it."""

from mmtrain.report.plain_text import seconds_text
from mmtrain.runtime.rehearsal.checkpoint_traffic import CheckpointTraffic
from mmtrain.runtime.rehearsal.rehearse import RehearsalRequest, RehearsalResult
from mmtrain.runtime.resilience.stragglers import MIN_LOST_STEP_SHARE, MIN_STRAGGLER_SLOWDOWN, STRAGGLER_WINDOW_STEPS

TORCH_TIMEOUT_S = 600  # of collectives, which ends a run without a watchdog
RESTARTS = "`--max-restarts`, torchrun's `--max-restarts` or SLURM's requeue"


def describe_consequences(request: RehearsalRequest, result: RehearsalResult) -> str:
    """Return in a sentence or two what a run of the plan does when the rehearsed fault happens to it."""
    fault = request.fault
    assert fault is not None, "a rehearsal with a fault"
    watchdog_s = request.recipe.train.watchdog_s or TORCH_TIMEOUT_S
    match fault.kind:
        case "slow":
            more = result.predicted_s / result.unbroken_s - 1
            return (
                f"A run goes on: each step takes {seconds_text(result.predicted_s)} instead of "
                f"{seconds_text(result.unbroken_s)} ({more:+.0%}). If other ranks do the same work, it names rank "
                f"{fault.number} after {STRAGGLER_WINDOW_STEPS} steps, once it takes {MIN_STRAGGLER_SLOWDOWN:g} times "
                f"their time and loses {MIN_LOST_STEP_SHARE:.0%} of a step."
            )
        case "lost":
            return (
                f"A run stands still for {watchdog_s:.0f} s (train.watchdog_s), then every rank reports as above and "
                f"the run ends. {_describe_restart(request, result)}"
            )
        case "dead":
            return f"A run ends at once: the launcher ends the other ranks. {_describe_restart(request, result)}"
        case "dead_node":
            ranks = request.timing.ranks_per_node
            return (
                f"A run ends as soon as its launcher notices, or after {watchdog_s:.0f} s (train.watchdog_s). "
                f"{_describe_restart(request, result)} The plan needs all its {request.plan.world_size} ranks: without "
                f"a node in the place of node {fault.number}, `--resume` with a plan for {ranks} ranks fewer goes on "
                "from the same checkpoint."
            )


def _describe_restart(request: RehearsalRequest, result: RehearsalResult) -> str:
    every = request.recipe.train.checkpoint.every
    if not every:
        return (
            f"Started again by {RESTARTS}, it begins with the first step: train.checkpoint.every is 0, so it saves "
            "only at its end."
        )
    lost_s = every * result.unbroken_s
    return (
        f"Started again by {RESTARTS}, it continues from the newest checkpoint: up to {every} steps "
        f"({seconds_text(lost_s)}, train.checkpoint.every) and those beside an unfinished save are lost."
    )


def describe_checkpoint(traffic: CheckpointTraffic, disk_bytes_per_s: float) -> str:
    """Return what a checkpoint holds, how long its save takes, whether it delays steps, and what a kill costs."""
    lines = [
        f"Checkpoint: {_gigabytes(traffic.total_bytes)}, at most {_gigabytes(traffic.largest_bytes)} a rank. A save "
        f"takes {seconds_text(traffic.save_s)} at {_gigabytes(disk_bytes_per_s)}/s a rank."
    ]
    if not traffic.is_async:
        lines.append("Training waits for all of it (train.checkpoint.async_save is false).")
    else:
        text = (
            f"Training stands still for at most {seconds_text(traffic.copy_s)}, in which what is saved is copied while "
            "the next step computes its gradients"
        )
        if traffic.step_beside_save_s is not None:
            text += f"; a step beside the save takes {traffic.slowdown - 1:+.1%}"
        lines.append(f"{text}.")
        if traffic.every and traffic.wait_s > traffic.copy_s:
            lines.append(
                f"The next save is due before that one ends: training waits {seconds_text(traffic.wait_s)} at each; "
                "raise train.checkpoint.every."
            )
    if traffic.worst_loss_s is None:
        lines.append("A kill costs the whole run: train.checkpoint.every is 0.")
    else:
        lines.append(
            f"A kill costs at most {seconds_text(traffic.worst_loss_s)} of work, up to the commit of the next save, at "
            f"train.checkpoint.every = {traffic.every}."
        )
    return " ".join(lines)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
