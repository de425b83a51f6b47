"""Kill a rank at a random action of a random step, let the launcher restart the run, and compare how it ends.

    python -m scripts.random_kills --count 100

Every run must end with the weights of an undisturbed run, bit for bit. Also prints the seconds from the kill to the end
of the first repeated step. Exits with 1 if a run ended otherwise. Meant to run every night: a kill takes some seconds.
"""

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.program import Action, Backward, Forward, Recv, Send, Step
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from scripts.measurements import arguments, start
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, launch, refuse, request_for, tensors

# Actions of every rank in every step; the unified plan for two ranks sends nothing.
ACTIONS: dict[str, tuple[type[Action], ...]] = {
    "unified": (Forward, Backward, Step),
    "disaggregated": (Forward, Backward, Step, Send, Recv),
}


@dataclass
class _Kill(FailAt):
    """Kills once, and records when the resumed run has finished its first step."""

    def before_action(self, step: int, action: Action) -> None:
        assert self.once is not None
        resumed = self.once.with_name("resumed")
        if self._is_here and self.once.exists() and not resumed.exists():
            self._first_step = getattr(self, "_first_step", step)
            if step > self._first_step:
                resumed.touch()
        super().before_action(step, action)


def main() -> None:
    """Kill runs, and print how each ended."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    options = parser.parse_args()
    report = start("Recovery from random kills", options)
    rng = random.Random(options.seed)
    num_exact = 0
    recovery_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="random-kills-") as temporary:
        folder = Path(temporary)
        generate_demo(folder / "data", seed=3, train=96, heldout=8)
        undisturbed = {placement: _run(folder, placement, None) for placement in ACTIONS}
        for i in range(options.count):
            placement = rng.choice(sorted(ACTIONS))
            rank = rng.randrange(2)
            step = rng.randrange(NUM_STEPS - 1)
            action = rng.choice(ACTIONS[placement])
            kill = _Kill(rank, step, "kill", action=action, once=folder / f"{i}" / "killed")
            is_exact = _run(folder, placement, kill) == undisturbed[placement]
            num_exact += is_exact
            assert kill.once is not None
            text = f"{i + 1:4d}  {placement:13s} rank {rank} step {step + 1} {action.__name__:9s}"
            seconds = kill.once.with_name("resumed").stat().st_mtime - kill.once.stat().st_mtime
            recovery_s.append(seconds)
            print(f"{text} {'same end' if is_exact else 'OTHER END'}  {seconds:.1f} s", flush=True)
    report.targets()
    report.target("resumed runs that end bit for bit like an undisturbed one", num_exact, options.count, at_least=True)
    report.figure("kill to first resumed step, median, s", f"{statistics.median(recovery_s):.1f}")
    report.target("the longest, s", max(recovery_s), 10)
    sys.exit(num_exact < options.count)


def _run(folder: Path, placement: str, kill: _Kill | None) -> tuple[list[float], list[bytes]]:
    """Run to the end, over at most one restart; return the losses and every weight and moment."""
    run_dir = folder / placement if kill is None or kill.once is None else kill.once.parent / "run"
    run_dir.mkdir(parents=True)
    request = request_for(folder / "data", run_dir, f"parallel.placement={placement}", max_restarts=1)
    code, message = launch(request, kill)
    assert code == 0, message
    state = tensors(open_newest_good(run_dir / CHECKPOINTS_FOLDER, refuse))
    losses = [step["loss"] for step in read_metrics(run_dir)]
    return losses, [state[name].view(torch.uint8).numpy().tobytes() for name in sorted(state)]


if __name__ == "__main__":
    main()
