"""`plan --measure` under launchers: the first rank plans and prints, and all ranks run the plans."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from mmtrain.planning import load_plan
from mmtrain.program import Recv
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.profiling.launched_ranks import LaunchedRanks
from mmtrain.runtime.profiling.measure_plans import measure_plans
from mmtrain.runtime.world import find_address
from tests.faults import FailAt
from tests.flow.launched import train_arguments
from tests.flow.launchers import slurm_command, torchrun_command
from tests.flow.test_measure_plans import recipe_of, two_plans
from tests.forked_command import main_here


def _plan_as_rank(folder: Path, data: Path, options: tuple[str, ...]) -> int:
    """Run `mmtrain plan --measure` as what a launcher has started; leave what it prints in a folder of the rank."""
    address = find_address()
    assert address is not None
    scratch = folder / str(address.rank)
    scratch.mkdir()
    # Of a command that trains: recipe and settings.
    _, _, recipe, _, _, *settings = train_arguments(data, folder)
    arguments = ("plan", recipe, "--measure", "--cuts", "2", *settings, *options)
    return main_here(0, 1, scratch, folder, arguments).returncode


def output(folder: Path, rank: int) -> tuple[str, str]:
    """Return what a rank printed to stdout and stderr."""
    stdout, stderr = ((folder / str(rank) / name).read_text() for name in ("stdout", "stderr"))
    return stdout, stderr


@pytest.mark.slow
def test_all_ranks_of_torchrun_run_the_plans_and_the_first_one_prints(data: Path, tmp_path: Path) -> None:
    options = ("--out", str(tmp_path / "plan.json"), "--set", "parallel.placement=replicated")
    assert torchrun_command(partial(_plan_as_rank, tmp_path, data, options)) == [0]
    stdout, stderr = output(tmp_path, 0)
    assert "2 ranks, as started by torchrun" in stderr
    assert "in turn, step by step" in stderr
    assert " per step, predicted " in stderr
    assert output(tmp_path, 1) == ("", "")
    chosen = load_plan(tmp_path / "plan.json")
    assert chosen.world_size == 2
    assert chosen.measured is not None
    assert f"Plan: {chosen.placement} on 2 x cpu-core" in stdout


@pytest.mark.slow
def test_all_tasks_of_slurm_run_the_plans(data: Path, tmp_path: Path) -> None:
    """Three tasks, more than the two ranks that a machine without GPUs has by default."""
    options = ("--json", "--set", "train.global_batch=6", "--set", "parallel.placement=auto")
    assert slurm_command(partial(_plan_as_rank, tmp_path, data, options), num_tasks=3) == [0, 0, 0]
    stdout, stderr = output(tmp_path, 0)
    plan = json.loads(stdout)
    assert plan["world_size"] == 3
    assert plan["measured"]["step_time_s"] > 0
    assert stderr.count(" per step, predicted ") > 2  # rules of thumb run beside the plans
    assert [output(tmp_path, rank) for rank in (1, 2)] == [("", "")] * 2


def test_another_number_of_ranks_than_the_recipe_names_is_refused_once(data: Path, tmp_path: Path) -> None:
    options = ("--set", "cluster.ranks=4")
    assert slurm_command(partial(_plan_as_rank, tmp_path, data, options)) == [2, 2]
    _, stderr = output(tmp_path, 0)
    assert "--measure: cluster.ranks is 4, but 2 processes were started (SLURM_PROCID=0" in stderr
    assert "start 4, or leave cluster.ranks out" in stderr
    assert output(tmp_path, 1) == ("", "")


def _measure_with_fault(folder: Path, data: Path, fault: FaultPoints) -> int:
    """Measure two plans as what a launcher has started; the first rank leaves what it saw."""
    address = find_address()
    assert address is not None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = LaunchedRanks(address)
    if not ranks.is_first:
        return ranks.follow()
    notes: list[str] = []
    runs = measure_plans(recipe_of(data), two_plans(data), ranks, num_steps=2, faults=fault, note=notes.append)
    seen = [[len(run.seconds), run.failure is not None, run.measurement.is_out_of_memory] for run in runs]
    (folder / "seen").write_text(json.dumps([seen, notes]))
    ranks.end(0)
    return 0


@pytest.mark.parametrize("kind", ["out of memory", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_plan_that_fails_on_one_rank_of_a_launcher_is_left_out_by_all(data: Path, tmp_path: Path, kind: str) -> None:
    fault = FailAt(1, 0, "kill" if kind == "kill" else "out of memory", action=Recv)
    assert slurm_command(partial(_measure_with_fault, tmp_path, data, fault)) == [0, 0]
    seen, [note] = json.loads((tmp_path / "seen").read_text())
    assert seen == [[2, False, False], [0, True, kind == "out of memory"]]
    assert note.startswith("disaggregated")
    assert ("out of memory on rank 1, and left out" if kind == "out of memory" else "was killed by SIGKILL") in note
