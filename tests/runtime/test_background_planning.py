"""Plans that are made beside the training, in a process that ends with it."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.training.background_call import CALL_NICENESS, CALL_PROCESS_MODULE
from mmtrain.runtime.training.background_planning import BackgroundPlanning, PlanningOutcome
from tests.distributed import RanksFailed, fork_ranks
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe
from tests.runtime.background_planners import end_at_once, fail, plan_for_ever, refuse
from tests.waiting import MAX_WAIT_S, poll


def outcome_of(make_plan: Callable[[], Plan]) -> PlanningOutcome:
    with BackgroundPlanning(make_plan) as planning:
        outcome = planning.wait(MAX_WAIT_S)
    assert outcome is not None
    assert planning.poll() == outcome
    return outcome


def test_a_plan_made_in_the_background_is_the_planners() -> None:
    make_plan = partial(plan_recipe, recipe(), lengths(), world_size=1, hardware="cpu-core", recipe_sha256="f" * 64)
    outcome = outcome_of(make_plan)
    assert outcome.plan == make_plan()
    assert outcome.reason is None
    assert outcome.seconds > 0


@pytest.mark.parametrize(
    ("make_plan", "reason"),
    [
        (partial(refuse, "nothing fits 7 ranks"), "nothing fits 7 ranks"),
        (fail, "failed with ValueError: an error of ours"),
        (end_at_once, "its process was killed by SIGKILL"),
    ],
)
def test_the_reason_why_there_is_no_plan_is_handed_back(make_plan: Callable[[], Plan], reason: str) -> None:
    outcome = outcome_of(make_plan)
    assert (outcome.plan, outcome.reason) == (None, reason)


def test_what_cannot_be_sent_leaves_no_process() -> None:
    outcome = outcome_of(lambda: refuse(""))
    assert outcome.reason is not None
    assert outcome.reason.startswith("did not start")
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in alive if CALL_PROCESS_MODULE in child.cmdline()]


def _process_of(pid_file: Path) -> psutil.Process:
    poll(pid_file.exists)
    return psutil.Process(int(pid_file.read_text().split()[0]))


def test_a_plan_that_is_not_wanted_any_more_is_given_up(tmp_path: Path) -> None:
    planning = BackgroundPlanning(partial(plan_for_ever, tmp_path / "pid"))
    process = _process_of(tmp_path / "pid")
    assert int((tmp_path / "pid").read_text().split()[1]) >= CALL_NICENESS
    assert planning.poll() is None
    process.send_signal(signal.SIGTERM)  # as a launcher does to all processes of a job that is to save and stop
    planning.close()
    assert not process.is_running()
    assert planning.poll() == PlanningOutcome(None, "its process was killed by SIGKILL")


def _be_killed_while_planning(rank: int, size: int, folder: Path, pid_file: Path) -> None:
    BackgroundPlanning(partial(plan_for_ever, pid_file))
    _process_of(pid_file)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_planning_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        fork_ranks(1, _be_killed_while_planning, tmp_path / "pid")
    process_id = int((tmp_path / "pid").read_text().split()[0])
    poll(lambda: not psutil.pid_exists(process_id) or psutil.Process(process_id).status() == "zombie")
