"""Measure what the sums over weights and optimizer state take of a step, in processor seconds.

    python -m scripts.bench_corruption                      # about two minutes
    python -m scripts.bench_corruption --only "demo, unified"

Runs of `scripts/own_runs.yaml` on one rank, of which all that is held exists once: both sums of a step read all of it.
Replicas would share it out, and read a part of it twice. The thread that computes is measured, so other work on the
machine does not count.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mmtrain.planning import Plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.execution.executor import Executor
from mmtrain.runtime.execution.state_sums import StateSums
from mmtrain.runtime.training.train import start_training
from mmtrain.runtime.training.train_request import TrainRequest
from scripts.bench_own_runs import OwnRun, draw_data, own_runs
from scripts.measurements import Report, arguments, start

TARGET_SHARE = 0.005  # of a step
CASES = {"demo, unified": 12, "170 M parameters, unified": 3}  # steps
CALLS = {"step": (Executor, "run"), "before": (StateSums, "before_update"), "after": (StateSums, "after_update"),
         "check": (StateSums, "check")}  # fmt: skip


def main() -> None:
    """Measure each case and report it beside the target."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=CASES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = start("Sums over weights and optimizer state", options)
    report.table("run", "MB held", "s a step", "ms a step in sums", "ms in a check", "share of a step", "at most")
    runs = {run.name: run for run in own_runs()}
    for name in [options.only] if options.only else CASES:
        with tempfile.TemporaryDirectory() as folder:
            _measure(report, runs[name], Path(folder), CASES[name])


def _measure(report: Report, run: OwnRun, folder: Path, num_steps: int) -> None:
    draw_data(folder)
    changes = ["cluster.ranks=1", f"train.steps={num_steps}", "train.checkpoint.every=0", "train.validate_every=0"]
    loaded = load_recipe(Path(run.recipe), [*run.settings_on(folder), *changes])
    seconds: dict[str, list[float]] = defaultdict(list)
    held: list[int] = []
    with ExitStack() as stack:
        for what, (owner, method) in CALLS.items():
            stack.enter_context(patch.object(owner, method, _timed(getattr(owner, method), seconds[what])))
        stack.enter_context(patch.object(StateSums, "__init__", _counting(StateSums.__init__, held)))
        start_training(TrainRequest(loaded, _plan, plan_again, "cpu-core", 1, folder / "run"))
    step_s = _median(seconds["step"][1:])  # the first one starts torch's threads and allocates
    sums_s = _median(seconds["before"][1:]) + _median(seconds["after"][1:])
    share = f"{sums_s / step_s:.2%}"
    check_ms = f"{_median(seconds['check'][1:]) * 1e3:.2f}"
    size = f"{held[0] / 1e6:,.0f}"
    report.row(run.name, size, f"{step_s:.3f}", f"{sums_s * 1e3:.2f}", check_ms, share, f"{TARGET_SHARE:.1%}")


def _plan(recipe: Recipe, lengths: Any, **arguments: Any) -> Plan:
    return plan(formulate_problem(recipe, lengths, **arguments))


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start_s = time.thread_time()
        result = call(*arguments)
        seconds.append(time.thread_time() - start_s)
        return result

    return timed


def _counting(init: Callable[..., None], num_bytes: list[int]) -> Callable[..., None]:
    def counting(self: StateSums, held: Any, *arguments: Any) -> None:
        tensors = list(held)
        num_bytes.append(sum(one.tensor.nbytes for one in tensors))
        init(self, tensors, *arguments)

    return counting


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
