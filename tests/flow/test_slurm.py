"""The promises of docs/running.md on a SLURM of two nodes, which this machine plays (`tests/slurm_cluster.py`)."""

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mmtrain.planning import load_plan
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE, read_run_state
from tests.flow.launched import train_arguments
from tests.forked_command import run_forked
from tests.slurm_cluster import NODES, SlurmCluster, missing_slurm
from tests.waiting import poll

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing_slurm() is not None, reason=str(missing_slurm()))]
ROOT = Path(__file__).parents[2]
NO_END = "train.steps=100000"
# As processes with a GPU do, this task takes long to leave.
LATE_TASK = """\
import atexit, os, time
if os.environ.get("SLURM_PROCID") == "1":
    atexit.register(time.sleep, 3)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """A job of scripts/train.sbatch: the small demo, with one task on each of two nodes if not said otherwise.

    file: a job file of its own, which states all of that.
    """

    def __init__(
        self,
        cluster: SlurmCluster,
        data: Path,
        run_dir: Path,
        *settings: str,
        ask: tuple[str, ...] = (),
        file: Path | None = None,
    ) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.log = run_dir.parent / f"{run_dir.name}.log"
        site = run_dir.parent / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(LATE_TASK)
        [_, _, recipe, _, _, *options] = train_arguments(data, run_dir, *_options(settings))
        shipped = ("--nodes=2", "--gpus-per-node=0", *ask, str(ROOT / "scripts" / "train.sbatch"))
        self.number = cluster.submit(
            f"--output={self.log}",
            *((*shipped, recipe, str(run_dir), *options) if file is None else (str(file),)),
            PYTHONPATH=f"{site}:{ROOT}",
            OMP_NUM_THREADS="1",
            TOKENIZERS_PARALLELISM="0",
            GLOO_SOCKET_IFNAME="lo",
        )

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def num_restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    def wait_for_steps(self, count: int) -> None:
        """Wait until the run has made `count` steps more."""
        goal = len(read_metrics(self.run_dir)) + count
        poll(lambda: len(read_metrics(self.run_dir)) >= goal)

    def signal(self) -> None:
        """Send what SLURM sends before the time limit, to all tasks."""
        self.cluster.run("scancel", "--signal=USR1", self.number)

    def wait_until_queued_again(self, num_restarts: int) -> None:
        poll(lambda: self.state() in ("PENDING", "FAILED"))
        assert (self.state(), self.num_restarts()) == ("PENDING", num_restarts), self.log.read_text()

    def start_now(self) -> None:
        """Start a job that is queued again, which SLURM lets wait for two minutes."""
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        poll(lambda: self.state() == "RUNNING")

    def end(self) -> str:
        return self.cluster.wait_for(self.number)["JobState"]


def _options(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in (("--set", setting) if "=" in setting else (setting,))]


def test_a_job_is_queued_again_by_a_signal_at_any_time_and_ends_as_one(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    job = Job(cluster, data, tmp_path / "run", "train.steps=40", "train.checkpoint.every=0")
    poll(lambda: sum(len(cluster.tasks(node)) for node in NODES) >= 2)
    job.signal()  # Python starts, or imports
    job.wait_until_queued_again(1)
    assert "Traceback" not in job.log.read_text()
    job.start_now()
    job.wait_for_steps(2)
    job.signal()
    job.wait_until_queued_again(2)
    state = read_run_state(job.run_dir)
    assert (state["status"], state["error"]) == ("stopped", None)
    assert state["step"] == len(read_metrics(job.run_dir)) >= 2
    job.start_now()
    assert job.end() == "COMPLETED"
    assert read_run_state(job.run_dir) == {"status": "done", "step": 40, "error": None}
    assert [s["step"] for s in read_metrics(job.run_dir)] == list(range(1, 41))


def _task(cluster: SlurmCluster, rank: int) -> psutil.Process:
    [task, *_] = [p for node in NODES for p in cluster.tasks(node) if p.environ().get("SLURM_PROCID") == str(rank)]
    return task


def test_a_killed_task_is_named_and_the_job_goes_on_unless_it_dies_again_before_a_checkpoint(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    job = Job(cluster, data, tmp_path / "run", NO_END, "train.checkpoint.every=0")
    for rank in (1, 0):
        job.wait_for_steps(2)
        _task(cluster, rank).kill()
        poll(lambda: job.state() != "RUNNING")
        error = read_run_state(job.run_dir)["error"]
        assert (
            error.splitlines()[0]
            == f"rank {rank} on {socket.gethostname()} is gone without a report: killed, or the node is lost"
        )
        assert error.splitlines()[0] in job.log.read_text()
        if rank == 1:
            job.wait_until_queued_again(1)
            job.run_dir.joinpath("metrics.jsonl").unlink()
            job.start_now()
    assert job.end() == "FAILED"


def test_a_cancelled_job_saves_and_is_not_queued_again(cluster: SlurmCluster, data: Path, tmp_path: Path) -> None:
    job = Job(cluster, data, tmp_path / "run", NO_END, "train.checkpoint.every=0")
    job.wait_for_steps(2)
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    poll(lambda: read_run_state(job.run_dir)["status"] == "stopped")
    assert read_run_state(job.run_dir)["step"] == len(read_metrics(job.run_dir))


def test_the_file_of_launch_runs_its_plan_and_is_queued_again(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    """`plan --out`, `launch slurm --plan`, sbatch: with a signal in between."""
    run_dir, plan, file = (tmp_path / name for name in ("run", "plan.json", "job.sbatch"))
    settings = ("train.steps=30", "train.checkpoint.every=0")
    [_, _, recipe, _, _, *options] = train_arguments(data, run_dir, *_options(settings))
    made = run_forked(tmp_path, "plan", recipe, *options, "--out", str(plan))
    assert made.returncode == 0, made.stderr
    size = ("--ranks-per-node", "1", "--run-dir", str(run_dir), "--out", str(file))
    written = run_forked(tmp_path, "launch", "slurm", recipe, *options, "--plan", str(plan), *size)
    assert written.stdout == f"{file} written, for 2 nodes with 1 rank each. Start it: sbatch {file}\n"
    job = Job(cluster, data, run_dir, file=file)
    job.wait_for_steps(2)
    job.signal()
    job.wait_until_queued_again(1)
    job.start_now()
    assert job.end() == "COMPLETED", job.log.read_text()
    assert [s["step"] for s in read_metrics(run_dir)] == list(range(1, 31))
    assert load_plan(run_dir / PLAN_FILE) == load_plan(plan)


def test_two_runs_of_an_array_and_two_steps_of_a_job_share_nodes(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    array = Job(
        cluster, data, tmp_path / "run-%a", "train.seed=%a", ask=("--array=1-2", "--exclusive=user")
    )  # side by side
    poll(lambda: all(read_run_state(tmp_path / f"run-{i}").get("status") == "done" for i in (1, 2)))
    assert array.end() == "COMPLETED"
    losses = [[step["loss"] for step in read_metrics(tmp_path / f"run-{i}")] for i in (1, 2)]
    assert losses[0] != losses[1], "each has a seed of its own"

    steps = tmp_path / "steps.sbatch"
    commands = [" ".join(["mmtrain", *train_arguments(data, tmp_path / name)[1:]]) for name in ("a", "b")]
    srun = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --exact"
    steps.write_text(
        "#!/bin/bash\n" + "".join(f"{srun} {command} &\n" for command in commands) + "wait -n && wait -n\n"
    )
    ask = ("--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/steps.log")
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    number = cluster.submit(*ask, str(steps), **env)
    assert cluster.wait_for(number)["JobState"] == "COMPLETED", (tmp_path / "steps.log").read_text()
    for name in ("a", "b"):
        assert read_run_state(tmp_path / name)["status"] == "done"


def test_an_elastic_job_shrinks_when_a_node_is_lost_and_grows_when_it_is_back(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    settings = (NO_END, "train.checkpoint.every=2", "parallel.placement=unified", "--elastic")
    job = Job(cluster, data, tmp_path / "run", *settings, ask=("--nodes=1-2",))
    job.wait_for_steps(4)
    assert read_metrics(job.run_dir)[-1]["ranks"] == 2
    cluster.kill_node(NODES[1])
    job.wait_until_queued_again(1)
    job.start_now()
    job.wait_for_steps(4)
    assert read_metrics(job.run_dir)[-1]["ranks"] == 1
    cluster.start_node(NODES[1])
    poll(lambda: set(cluster.run("sinfo", "-h", "-N", "-o", "%T").split()) <= {"idle", "mixed", "allocated"})
    job.signal()
    job.wait_until_queued_again(2)
    job.start_now()
    job.wait_for_steps(2)
    assert read_metrics(job.run_dir)[-1]["ranks"] == 2
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
