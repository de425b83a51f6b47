"""A run whose cost table is wrong notices it, plans again with the recorded costs, and switches to the faster plan."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.checkpoint import Storage
from mmtrain.costs import AnalyticCosts, CostTable, preset
from mmtrain.costs.recorded_costs import RecordedRatios, recorded_table
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, load_plan
from mmtrain.planning.artifact.plan_memory import DeviceMemory
from mmtrain.planning.artifact.replanned import present_step_s
from mmtrain.program import Action
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.device_memory import smallest_device_memory
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import FASTER_PLAN_FILE, PLAN_FILE, RECORDED_COSTS_FILE, REPLANNED_FOLDER
from mmtrain.runtime.training import cost_drift
from mmtrain.runtime.training import switch_plan as switch_plan_module
from mmtrain.runtime.training.cost_drift import MEDIAN_STEPS
from mmtrain.runtime.training.hooks.replanning import MIN_GAIN
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from tests.distributed import RanksFailed, fork_ranks
from tests.flow.runs import request_for, run_one_rank
from tests.waiting import MAX_WAIT_S

pytestmark = pytest.mark.slow

DRIFT_STEPS_HERE = 12  # in the place of fifty, so that runs are short
NUM_STEPS, SAVE_EVERY = 60, 10
PLAN_STEP = 30  # from 0: long after the drift is known. Runs wait here for the plan that is made beside them.
SWITCH_STEP = 40  # from 1: the next checkpoint
# A pipeline of two ranks, whose layers are divided by their costs: an encoder that is priced too cheap lies on one rank
# with much of the LLM.
PIPELINE = [
    "parallel.placement=unified",
    "parallel.vision.dp=1",
    "parallel.llm.dp=1",
    "model.vision.layers=4",
    "model.llm.layers=4",
    f"train.steps={NUM_STEPS}",
    f"train.checkpoint.every={SAVE_EVERY}",
]


def run_short(request: TrainRequest, faults: FaultPoints | None = None) -> None:
    """Run two ranks in which costs have drifted after a few steps."""
    errors = fork_ranks(2, _short_rank, [request] * 2, free_port(), faults or FaultPoints())
    assert errors == ["", ""]


def _short_rank(rank: int, world_size: int, folder: Path, *args: Any) -> str:
    cost_drift.DRIFT_STEPS = DRIFT_STEPS_HERE
    assert DRIFT_STEPS_HERE + MEDIAN_STEPS < PLAN_STEP
    return run_one_rank(rank, world_size, folder, *args)


def join_planning() -> None:
    """Wait on the rank that plans until the plan is there."""
    for thread in threading.enumerate():
        if thread.name == "mmtrain-planning":
            thread.join(MAX_WAIT_S)
            assert not thread.is_alive()


@dataclass
class AwaitPlan(FaultPoints):
    """Waits in a step for the plan that is made beside the training; kills `rank` in step `kill_step` (from 0)."""

    rank: int | None = None
    kill_step: int = NUM_STEPS

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._is_here = rank == self.rank

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if step == PLAN_STEP:
            join_planning()
        if step == self.kill_step and self._is_here:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class KillSavingBeforeSwitch(AwaitPlan):
    """Kills `rank` while it saves the first checkpoint after the faster plan was found, at which the run would switch.

    Which checkpoint that is depends on how fast the plan is made.
    """

    faster_file: Path = Path(FASTER_PLAN_FILE)

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if step == PLAN_STEP:
            join_planning()

    def checkpoint_storage(self, step: int) -> Storage:
        """See `FaultPoints`."""
        if self._is_here and self.faster_file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().checkpoint_storage(step)


def pipeline_request(data: Path, folder: Path, *changes: str) -> TrainRequest:
    """Return a request to train on a plan for costs that price the encoder at a tenth."""
    folder.mkdir(exist_ok=True)
    request = request_for(data, folder / "run", *PIPELINE)
    machine, shape = preset("cpu-core"), build_model_shape(request.recipe)
    ratios = RecordedRatios({"vision": 0.1}, {"vision": 0.1})
    path = folder / "wrong_costs.json"
    recorded_table(AnalyticCosts(machine, "fp32"), machine, "fp32", shape, ratios).save(path)
    return request_for(data, folder / "run", *PIPELINE, f"cluster.costs={path}", *changes)


@pytest.fixture(scope="module")
def unbroken_losses(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a run that stays on its plan."""
    request = pipeline_request(data, tmp_path_factory.mktemp("unbroken"), "train.replan=off")
    run_short(request)
    assert not (request.run_dir / RECORDED_COSTS_FILE).exists()
    return losses(request)


def losses(request: TrainRequest) -> list[float]:
    return [step["loss"] for step in read_metrics(request.run_dir)]


def same_losses(unbroken: list[float]) -> Any:
    """Return what equals these losses. They start at 6.6 and end near 0.01, where only rounding is left to compare."""
    # Two plans add the same numbers in another order, and sixty steps carry the last digits on.
    return pytest.approx(unbroken, rel=3e-5)


def switches(request: TrainRequest) -> Iterator[int]:
    """Yield the steps after which the run switched to another plan, from 1."""
    yield from (step["step"] - 1 for step in read_metrics(request.run_dir) if "new_plan" in step)


def earlier_plan(request: TrainRequest, step: int) -> Plan:
    return load_plan(request.run_dir / REPLANNED_FOLDER / f"plan-until-step-{step:08d}.json")


def test_a_run_whose_costs_are_wrong_tells_of_a_faster_plan_and_can_be_resumed_on_it(
    data: Path, tmp_path: Path, unbroken_losses: list[float]
) -> None:
    request = pipeline_request(data, tmp_path)
    faster_file = request.run_dir / FASTER_PLAN_FILE
    with pytest.raises(RanksFailed):
        run_short(request, faults=AwaitPlan(rank=1, kill_step=SWITCH_STEP + 1))
    faster, present = load_plan(faster_file), load_plan(request.run_dir / PLAN_FILE)
    assert faster.predicted.step_time_s <= (1 - MIN_GAIN) * present_step_s(faster)
    assert faster.units != present.units
    table = CostTable.load(request.run_dir / RECORDED_COSTS_FILE)
    scale = {scale.layer["kind"]: scale for scale in table.layer_scales}
    # Relative to the LLM, whose pace depends on what else this machine does.
    assert scale["vit_block"].forward > 3 * 0.1 * scale["decoder_block"].forward

    resumed = replace(request, resume=True, plan_path=faster_file)
    run_short(resumed)
    assert load_plan(request.run_dir / PLAN_FILE) == faster
    assert losses(request) == same_losses(unbroken_losses)


def test_a_run_switches_to_the_faster_plan_at_a_checkpoint_and_ends_with_the_same_losses(
    data: Path, tmp_path: Path, unbroken_losses: list[float]
) -> None:
    request = pipeline_request(data, tmp_path, "train.replan=auto")
    run_short(request, faults=AwaitPlan())
    [step] = switches(request)
    assert step <= SWITCH_STEP
    assert step % SAVE_EVERY == 0
    before, plan = earlier_plan(request, step), load_plan(request.run_dir / PLAN_FILE)
    assert plan.units != before.units
    assert plan.recipe_sha256 == before.recipe_sha256
    assert losses(request) == same_losses(unbroken_losses)


def test_a_switch_to_a_plan_that_does_not_fit_any_more_is_refused_and_the_run_goes_on(
    data: Path, tmp_path: Path, unbroken_losses: list[float]
) -> None:
    """Devices have no room at the first switch, as if another process held it, and have room again at the second."""
    request = pipeline_request(data, tmp_path, "train.replan=auto")
    errors = fork_ranks(2, _short_rank_without_room, [request] * 2, free_port(), AwaitPlan())
    assert errors == ["", ""]
    refusals = [(tmp_path / f"refusals-{rank}.txt").read_text() for rank in range(2)]
    [refusal] = [text for text in refusals if text]  # one rank decides for all
    assert (
        "goes on with its present plan, since the faster one is refused: the plan does not fit this device" in refusal
    )
    assert "most of it " in refusal
    assert [step["step"] for step in read_metrics(request.run_dir)] == list(range(1, NUM_STEPS + 1))
    assert losses(request) == same_losses(unbroken_losses)


def _short_rank_without_room(rank: int, world_size: int, folder: Path, requests: list[TrainRequest], *args: Any) -> str:
    """Run a rank whose devices have no room for any plan in the first switch; keep what it writes to stderr of it."""
    measured = []
    said = requests[rank].run_dir.parent / f"refusals-{rank}.txt"

    def without_room(recipe: Recipe, hardware: str, world: World) -> DeviceMemory:
        measured.append(smallest_device_memory(recipe, hardware, world))
        return replace(measured[-1], nbytes=1e6) if len(measured) == 1 else measured[-1]

    switch_plan_module.smallest_device_memory = without_room
    with said.open("w") as file, contextlib.redirect_stderr(file):
        return _short_rank(rank, world_size, folder, requests, *args)


def test_kills_in_the_save_before_a_switch_and_after_it_resume_on_the_right_plan(
    data: Path, tmp_path: Path, unbroken_losses: list[float]
) -> None:
    """The plan of `--plan` is that of the run until it switches, and not any more after that."""
    request = pipeline_request(data, tmp_path, "train.replan=auto")
    faster_file = request.run_dir / FASTER_PLAN_FILE
    with pytest.raises(RanksFailed):
        run_short(request, faults=KillSavingBeforeSwitch(rank=1, faster_file=faster_file))
    assert not (request.run_dir / REPLANNED_FOLDER).exists()
    first_plan = request.run_dir.parent / "first.json"
    shutil.copy(request.run_dir / PLAN_FILE, first_plan)
    faster_file.unlink()

    # Plans again at once, with the costs that were recorded before.
    resumed = replace(request, resume=True, plan_path=first_plan)
    with pytest.raises(RanksFailed):
        run_short(resumed, faults=AwaitPlan(rank=0, kill_step=SWITCH_STEP + 3))
    [step] = switches(request)
    assert step <= SWITCH_STEP
    switched_to = load_plan(request.run_dir / PLAN_FILE)
    assert switched_to.units != load_plan(first_plan).units
    run_short(resumed)
    assert load_plan(request.run_dir / PLAN_FILE) == switched_to
    assert losses(request) == same_losses(unbroken_losses)
