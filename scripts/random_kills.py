"""Kill a rank at a random action of a random step, let the launcher restart the run, and compare how it ends.

    python -m scripts.random_kills --count 100

Every run must end in the weights of a run that nothing happened to, bit for bit. Also prints the seconds from the kill
to the end of the first step that is taken again. Exits with 1 if a run ended otherwise. Meant for every night: it
takes some seconds a kill.
"""

import argparse
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
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, launch, refuse, request_for, tensors

# What every rank does in every step; in the unified plan for two ranks nothing is sent.
ACTIONS: dict[str, tuple[type[Action], ...]] = {
    "unified": (Forward, Backward, Step),
    "disaggregated": (Forward, Backward, Step, Send, Recv),
}


@dataclass
class _Kill(FailAt):
    """Kills once, and notes when the run that came after had taken a step."""

    def before_action(self, step: int, action: Action) -> None:
        assert self.once is not None
        resumed = self.once.with_name("resumed")
        if self._here and self.once.exists() and not resumed.exists():
            self._first = getattr(self, "_first", step)
            if step > self._first:
                resumed.touch()
        super().before_action(step, action)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at random and compare how they end.")
    parser.add_argument("--count", type=int, default=100, help="kills (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of places")
    options = parser.parse_args()
    choose, exact, recovery = random.Random(options.seed), 0, []
    with tempfile.TemporaryDirectory(prefix="random-kills-") as temporary:
        folder = Path(temporary)
        generate_demo(folder / "data", seed=3, train=96, heldout=8)
        wanted = {placement: _run(folder, placement, None) for placement in ACTIONS}
        for i in range(options.count):
            placement, rank, step = choose.choice(sorted(ACTIONS)), choose.randrange(2), choose.randrange(NUM_STEPS - 1)
            action = choose.choice(ACTIONS[placement])
            kill = _Kill(rank, step, "kill", action=action, once=folder / f"{i}" / "killed")
            same = _run(folder, placement, kill) == wanted[placement]
            exact += same
            assert kill.once is not None
            what = f"{i + 1:4d}  {placement:13s} rank {rank} step {step + 1} {action.__name__:9s}"
            seconds = kill.once.with_name("resumed").stat().st_mtime - kill.once.stat().st_mtime
            recovery.append(seconds)
            print(f"{what} {'same end' if same else 'OTHER END'}  {seconds:.1f} s", flush=True)
    print(f"{options.count} kills, {exact} resumed runs ended bit for bit as without")
    print(f"kill to first resumed step: median {statistics.median(recovery):.1f} s, longest {max(recovery):.1f} s")
    sys.exit(exact < options.count)


def _run(folder: Path, placement: str, kill: _Kill | None) -> tuple[list[float], list[bytes]]:
    """Run to the end, over at most one restart; return the losses and every weight and moment."""
    run_dir = folder / placement if kill is None or kill.once is None else kill.once.parent / "run"
    run_dir.mkdir(parents=True)
    request = request_for(folder / "data", run_dir, f"parallel.placement={placement}", max_restarts=1)
    code, message = launch(request, kill)
    assert code == 0, message
    held = tensors(open_newest_good(run_dir / CHECKPOINTS_FOLDER, refuse))
    return [s["loss"] for s in read_metrics(run_dir)], [
        held[n].view(torch.uint8).numpy().tobytes() for n in sorted(held)
    ]


if __name__ == "__main__":
    main()
