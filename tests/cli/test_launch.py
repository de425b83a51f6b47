"""`mmtrain launch slurm` and `launch ray` write files that fit their plan."""

import ast
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mmtrain.api.job_files.job_request import job_size
from mmtrain.costs import preset
from mmtrain.errors import UserError
from mmtrain.planning import Plan, load_plan
from mmtrain.recipe import load_recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE
from tests.cli.conftest import RunMmtrain

SHIPPED = Path(__file__).parents[2] / "scripts" / "train.sbatch"
SHELLCHECK = shutil.which("shellcheck")
CONTAINER = ("--container", "image of ours.sqsh", "--mount", "/data sets:/data", "--mount", "/models:/models")


@dataclass(frozen=True)
class Written:
    """A job file, and what the command that wrote it said."""

    path: Path
    done: CompletedProcess[str]

    @property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()


WriteJob = Callable[..., Written]


@pytest.fixture
def write_job(run_mmtrain: RunMmtrain, run_dir: Path, tmp_path: Path) -> WriteJob:
    def write(*options: str) -> Written:
        path = tmp_path / "job.sbatch"
        plan, recipe = run_dir / PLAN_FILE, run_dir / RECIPE_FILE
        return Written(path, run_mmtrain("launch", "slurm", recipe, "--plan", plan, "--out", path, *options))

    return write


@pytest.mark.parametrize("options", [(), CONTAINER, ("--set", "train.seed=0", "--run-dir", "runs/it's")])
def test_the_file_is_valid_bash(write_job: WriteJob, options: tuple[str, ...]) -> None:
    job = write_job(*options)
    assert job.done.returncode == 0, job.done.stderr
    assert subprocess.run(["bash", "-n", job.path], capture_output=True).stderr == b""


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("options", [None, (), CONTAINER])
def test_shellcheck_has_no_remark(write_job: WriteJob, options: tuple[str, ...] | None) -> None:
    path = SHIPPED if options is None else write_job(*options).path
    done = subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True)
    assert done.stdout == ""


def test_nodes_and_ranks_are_those_of_the_plan(write_job: WriteJob) -> None:
    job = write_job("--ranks-per-node", "1", "--time", "01:30:00", "--json")
    assert json.loads(job.done.stdout) == {"file": str(job.path), "nodes": 2, "ranks_per_node": 1}
    options = [line.removeprefix("#SBATCH --") for line in job.lines if line.startswith("#SBATCH --")]
    asked = dict(option.partition("=")[::2] for option in options)
    assert (asked["nodes"], asked["time"]) == ("2", "01:30:00")
    assert "gpus-per-node" not in asked  # the plan is for cores
    assert asked["signal"] == "USR1@180"
    assert "RANKS_PER_NODE=1" in job.lines


def started(job: Written, folder: Path, code: int = 0, **variables: str) -> list[list[str]]:
    """Run the job with an srun and a scontrol that note their arguments; return the calls."""
    calls = folder / "calls"
    for name in ("srun", "scontrol"):
        program = folder / name
        end = f"exit {code}" if name == "srun" else "echo node1"
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" --- >> {calls}\n{end}\n')
        program.chmod(0o755)
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "4",
        **variables,
    }
    done = subprocess.run(
        ["bash", job.path, "--max-restarts", "0"], env=env, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    found = [call.splitlines() for call in calls.read_text().split("---\n") if call]
    calls.unlink()
    return found


def test_it_trains_the_plan_and_is_queued_again_when_it_was_stopped(
    write_job: WriteJob, run_dir: Path, tmp_path: Path
) -> None:
    settings = ("--set", "train.trace_steps=[2]", "--run-dir", "runs/it's")
    job = write_job("--ranks-per-node", "1", *settings)
    assert job.done.returncode == 0, job.done.stderr
    [_, srun] = started(job, tmp_path)
    assert srun[:6] == [
        "srun",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
    ]
    train = [
        "mmtrain",
        "train",
        str(run_dir / RECIPE_FILE),
        "--run-dir",
        "runs/it's",
        "--plan",
        str(run_dir / PLAN_FILE),
    ]
    assert srun[6:] == [*train, "--set", "train.trace_steps=[2]", "--max-restarts", "0"]
    assert started(job, tmp_path, 75)[2:] == [["scontrol", "requeue", "7"]]


def test_tasks_run_in_the_container(write_job: WriteJob, tmp_path: Path) -> None:
    [_, srun] = started(write_job("--ranks-per-node", "1", *CONTAINER), tmp_path)
    here = str(tmp_path)
    assert srun[6:9] == [
        "--container-image=image of ours.sqsh",
        f"--container-workdir={here}",
        f"--container-mounts={here}:{here},/data sets:/data,/models:/models",
    ]
    assert srun[9] == "mmtrain"


def test_a_plan_for_other_settings_is_refused(write_job: WriteJob) -> None:
    job = write_job("--set", "model.llm.layers=2")
    assert job.done.returncode == 2
    assert "the plan does not match" in job.done.stderr
    assert not job.path.exists()


def test_mounts_need_a_container(write_job: WriteJob) -> None:
    job = write_job("--mount", "/data:/data")
    assert (job.done.returncode, job.done.stderr.partition(":")[0]) == (2, "mmtrain")


def test_the_script_for_ray_has_the_size_and_the_arguments_of_its_plan(
    run_mmtrain: RunMmtrain, run_dir: Path, tmp_path: Path
) -> None:
    script, plan, recipe = tmp_path / "job.py", run_dir / PLAN_FILE, run_dir / RECIPE_FILE
    odd = ("--set", "train.seed=0", "--run-dir", """runs/it's "ours" \\ ü""")
    size = ("--ranks-per-node", "1", "--max-restarts", "7")
    done = run_mmtrain("launch", "ray", recipe, "--plan", plan, *size, *odd, "--out", script)
    assert done.stdout == f"{script} written, for 2 nodes with 1 rank each. Start it: python {script}\n"
    constants: dict[str, object] = {}
    for statement in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = ast.literal_eval(statement.value)
    assert [constants[name] for name in ("NUM_NODES", "RANKS_PER_NODE", "USES_GPUS", "MAX_RESTARTS")] == [
        2,
        1,
        False,
        7,
    ]
    assert constants["ARGUMENTS"] == [str(recipe), "--plan", str(plan), *odd]


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_a_run_in_a_bucket_is_refused(run_mmtrain: RunMmtrain, run_dir: Path, tmp_path: Path, launcher: str) -> None:
    words = ("--plan", run_dir / PLAN_FILE, "--run-dir", "s3://ours/x", "--out", tmp_path / "job")
    done = run_mmtrain("launch", launcher, run_dir / RECIPE_FILE, *words)
    assert done.returncode == 2
    assert "--run-dir: s3://ours/x found, but runs write into a folder. Mount the bucket" in done.stderr
    assert not (tmp_path / "job").exists()


def sized(run_dir: Path, ranks: int, hardware: str) -> Plan:
    return load_plan(run_dir / PLAN_FILE).model_copy(update={"world_size": ranks, "hardware": hardware})


def test_gpus_fill_whole_nodes(run_dir: Path) -> None:
    recipe = load_recipe(run_dir / RECIPE_FILE).recipe
    per_node = preset("h100-80g").ranks_per_node
    size = job_size(sized(run_dir, 3 * per_node, "h100-80g"), recipe, None)
    assert (size.nodes, size.ranks_per_node, size.has_gpus) == (3, per_node, True)
    assert job_size(sized(run_dir, 4, "h100-80g"), recipe, None).ranks_per_node == 4
    with pytest.raises(UserError, match="12 ranks, which fill no whole nodes of 8"):
        job_size(sized(run_dir, 12, "h100-80g"), recipe, None)
    assert job_size(sized(run_dir, 12, "h100-80g"), recipe, 4).nodes == 3


def test_a_node_of_several_machines_asks_how_many_gpus_one_has(run_dir: Path) -> None:
    recipe = load_recipe(run_dir / RECIPE_FILE).recipe
    with pytest.raises(UserError, match="state how many GPUs one machine has"):
        job_size(sized(run_dir, 72, "gb200-nvl72"), recipe, None)
    assert job_size(sized(run_dir, 72, "gb200-nvl72"), recipe, 4).nodes == 18
