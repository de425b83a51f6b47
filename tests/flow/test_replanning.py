"""A run whose cost table is wrong notices it, plans again with the recorded costs, and says what that gains."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, preset
from mmtrain.costs.recorded_costs import RecordedRatios, recorded_table
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan import load_plan
from mmtrain.plan.artifact.replanned import present_step_s
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import FASTER_PLAN_FILE, PLAN_FILE, RECORDED_COSTS_FILE
from mmtrain.runtime.training.cost_drift import DRIFT_STEPS, MEDIAN_STEPS
from mmtrain.runtime.training.hooks.replanning import MIN_GAIN
from mmtrain.runtime.training.train_request import TrainRequest
from tests.flow.runs import request_for, run_all

SEED_STEPS = DRIFT_STEPS + MEDIAN_STEPS  # after which the first drift is known
# A pipeline of two ranks, whose layers are divided by their costs: an encoder that is priced too cheap lies on one rank
# with much of the LLM.
PIPELINE = [
    "parallel.placement=unified",
    "parallel.vision.dp=1",
    "parallel.llm.dp=1",
    "model.vision.layers=4",
    "model.llm.layers=4",
]


def wrong_costs(request: TrainRequest, folder: Path, ratio: float = 0.1) -> str:
    """Write a table that prices the encoder at a tenth; return the setting that plans with it."""
    machine, shape = preset("cpu-core"), build_model_shape(request.recipe)
    ratios = RecordedRatios({"vision": ratio}, {"vision": ratio})
    path = folder / "wrong_costs.json"
    recorded_table(AnalyticCosts(machine, "fp32"), machine, "fp32", shape, ratios).save(path)
    return f"cluster.costs={path}"


def pipeline_request(data: Path, folder: Path, num_steps: int, *changes: str) -> TrainRequest:
    """Return a request of `num_steps` steps on a plan for wrong costs."""
    steps = f"train.steps={num_steps}"
    costs = wrong_costs(request_for(data, folder, *PIPELINE), folder)
    return request_for(data, folder / "run", *PIPELINE, steps, costs, *changes)


@pytest.mark.slow
def test_a_run_whose_costs_are_wrong_tells_of_a_faster_plan_and_can_be_resumed_on_it(
    data: Path, tmp_path: Path
) -> None:
    request = pipeline_request(data, tmp_path, 2 * SEED_STEPS, "train.checkpoint.every=0")
    run_dir = request.run_dir
    assert run_all(request, request) == ["", ""]
    faster = load_plan(run_dir / FASTER_PLAN_FILE)
    present = load_plan(run_dir / PLAN_FILE)
    assert faster.predicted.step_time_s <= (1 - MIN_GAIN) * present_step_s(faster)
    assert faster.units != present.units
    assert faster.recipe_sha256 == present.recipe_sha256
    table = CostTable.load(run_dir / RECORDED_COSTS_FILE)
    layers = {scale.layer["kind"]: scale for scale in table.layer_scales}
    # Relative to the LLM, whose pace depends on what else this machine does, the encoder takes ten times as long.
    assert layers["vit_block"].forward > 0.1 * 3 * layers["decoder_block"].forward

    longer = pipeline_request(data, tmp_path, 2 * SEED_STEPS + 2, "train.checkpoint.every=0")
    longer = replace(longer, resume=True, plan_path=run_dir / FASTER_PLAN_FILE)
    assert run_all(longer, longer) == ["", ""]
    assert load_plan(run_dir / PLAN_FILE).units == faster.units
    assert len(read_metrics(run_dir)) == 2 * SEED_STEPS + 2
