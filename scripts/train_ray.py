"""Train on a Ray cluster, one Ray worker for each rank; `mmtrain launch ray` writes this file for a plan:

    python scripts/train_ray.py recipes/mine.yaml --run-dir runs/mine [--set train.steps=1000 ...]

Start it in the folder that the paths start from, on storage that all nodes share. RAY_ADDRESS names the cluster;
without it Ray starts here.

When a worker or its node is lost, or a rank is killed, Ray starts all workers again, at most MAX_RESTARTS times, and
the run goes on from its newest checkpoint. A rank that fails by an error of its own ends the job with its exit code.
"""

import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

# --- What `mmtrain launch ray` replaces.
NUM_NODES = 1
RANKS_PER_NODE = 2
USES_GPUS = False
MAX_RESTARTS = 3
ARGUMENTS: list[str] = []  # of `mmtrain train`
# --- End of what it replaces.

OLDEST_RAY = (2, 60)  # the version that was run; older ones return nothing from a worker
RUN_FAILED = 1  # exit codes of mmtrain
WRONG_INPUT = 2
# A rank dies with its worker, whatever kills that: otherwise it would hold its GPU and the run's folder when the next
# one starts. PR_SET_PDEATHSIG is 1, SIGKILL is 9.
TIED_MMTRAIN = """\
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("mmtrain: the worker of this rank is gone")
runpy.run_module("mmtrain", run_name="__main__", alter_sys=True)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def value_of(option: str, words: list[str]) -> str | None:
    """Return the value of the last `option` among these words of a command line."""
    values = [after for word, after in pairwise(words) if word == option]
    values += [word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")]
    return values[-1] if values else None


def has_run(run_dir: Path) -> bool:
    """Return whether a run has begun here; the stages of a recipe have folders of their own."""
    return any([(run_dir / "checkpoints").exists(), *run_dir.glob("recipe.yaml"), *run_dir.glob("*/recipe.yaml")])


def find_problem(config: dict[str, Any], ranks_here: int) -> str | None:
    """Return why a rank cannot start on this node: other ranks than planned, or paths that are not here."""
    host, planned = socket.gethostname(), config["ranks_per_node"]
    if ranks_here != planned:
        return (
            f"{ranks_here} ranks on {host}, but the plan has {planned} on each node: it needs nodes on which nothing "
            "else runs"
        )
    folder, words = Path(config["folder"]), config["words"]
    plan = value_of("--plan", words)
    for path in (folder, folder / words[0], *([] if plan is None else [folder / plan])):
        if not path.exists():
            return f"{path} is not on {host}: start this file in a folder on storage that all nodes share"
    return None


def run_rank(config: dict[str, Any]) -> int:
    """Be one rank, in a process of its own; return its exit code. Raises RuntimeError for one that was killed."""
    context = ray.train.get_context()
    rank, size, ranks_here = context.get_world_rank(), context.get_world_size(), context.get_local_world_size()
    folder, words = Path(config["folder"]), list(config["words"])
    problem = find_problem(config, ranks_here)
    own = (problem, os.environ["MASTER_ADDR"], free_port(), has_run(folder / config["run_dir"]))
    of_ranks: list[Any] = [None] * size
    torch.distributed.all_gather_object(of_ranks, own)  # over Ray's own group, which keeps its own port
    if any(problem for problem, *_ in of_ranks):
        if problem is not None:
            print(f"train_ray.py: {problem}", file=sys.stderr)
        return WRONG_INPUT
    _, address, port, goes_on = of_ranks[0]
    if goes_on and "--resume" not in words:
        words.append("--resume")
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": ranks_here,
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in place.items()}
    command = [sys.executable, "-c", TIED_MMTRAIN, str(os.getpid()), "train", *words]
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code in (0, RUN_FAILED, WRONG_INPUT):  # another start would do the same
        return code
    raise RuntimeError(f"rank {rank} on {socket.gethostname()} was killed, or saved and stopped: it ended with {code}")


def main() -> int:
    """Start the ranks, and again after a loss; return the exit code of the run."""
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST_RAY:
        return _fail(f"Ray {ray.__version__} found; at least {'.'.join(map(str, OLDEST_RAY))} is needed")
    words = [*ARGUMENTS, *sys.argv[1:]]
    run_dir = value_of("--run-dir", words)
    if run_dir is None or words[0].startswith("-"):
        return _fail("usage: python train_ray.py RECIPE --run-dir DIR [options of mmtrain train]")
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"folder": os.getcwd(), "words": words, "run_dir": run_dir, "ranks_per_node": RANKS_PER_NODE},
        torch_config=TorchConfig(backend="gloo"),  # for a few words before the start: no memory of a GPU
        scaling_config=ScalingConfig(
            num_workers=NUM_NODES * RANKS_PER_NODE, use_gpu=USES_GPUS, placement_strategy="PACK"
        ),
        run_config=RunConfig(
            storage_path=str(Path(run_dir, "ray").absolute()), failure_config=FailureConfig(max_failures=MAX_RESTARTS)
        ),
    )
    return int(trainer.fit().return_value or 0)


def _fail(message: str) -> int:
    print(f"train_ray.py: {message}", file=sys.stderr)
    return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
