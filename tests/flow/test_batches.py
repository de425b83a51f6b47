"""Runs whose recipe states a step in samples, and leaves the size of groups to the planner."""

from pathlib import Path

import pytest

from mmtrain.api.plans import make_plan, plan_for_started_ranks
from mmtrain.api.simulated_steps import simulate_steps
from mmtrain.data import build_index
from mmtrain.planning import load_plan
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE
from tests.flow.runs import NUM_STEPS, assert_same_end, launch, request_for

UNIFIED = "parallel.placement=unified"  # which runs on one rank too
IN_SAMPLES = ("train.global_batch={samples: 24}", "data.seq_len=auto", "data.max_sample_tokens=192", UNIFIED)


@pytest.mark.slow
def test_a_run_in_samples_trains_on_the_steps_of_its_groups_on_any_ranks(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "samples", *IN_SAMPLES, planner=plan_for_started_ranks)
    plan = make_plan(request.recipe, build_index(request.recipe).lengths).plan
    plan.save(tmp_path / "plan.json")
    half = (*IN_SAMPLES, f"train.steps={NUM_STEPS // 2}")
    assert launch(
        request_for(data, tmp_path / "samples", *half, planner=plan_for_started_ranks, plan_path=tmp_path / "plan.json")
    ) == (0, "")
    options = {"planner": plan_for_started_ranks, "resume": True}
    assert launch(request_for(data, tmp_path / "samples", *IN_SAMPLES, **options)) == (0, "")

    in_groups = (f"train.global_batch={plan.num_groups}", f"data.seq_len={plan.data.seq_len}")
    in_groups = (*in_groups, *IN_SAMPLES[2:])
    stated = request_for(data, tmp_path / "groups", *in_groups, planner=plan_for_started_ranks)
    assert launch(stated) == (0, "")
    assert_same_end(tmp_path / "samples", tmp_path / "groups")
    simulated = [
        simulate_steps(of.recipe, of.run_dir / PLAN_FILE, steps=(2,)).timelines[0].step_time_s
        for of in (request, stated)
    ]
    assert simulated[0] == simulated[1]

    more = (f"train.steps={NUM_STEPS + 2}",)
    on_one_rank = {"planner": plan_for_started_ranks, "resume": True, "ranks": 1, "elastic": True}
    assert launch(request_for(data, tmp_path / "samples", *IN_SAMPLES, *more, **on_one_rank)) == (0, "")
    one_rank = load_plan(tmp_path / "samples" / PLAN_FILE)
    assert (one_rank.world_size, one_rank.num_groups) == (1, plan.num_groups)
    assert one_rank.data.seq_len == plan.data.seq_len
    assert launch(request_for(data, tmp_path / "groups", *in_groups, *more, **options)) == (0, "")
    losses = [[step["loss"] for step in read_metrics(tmp_path / run)] for run in ("samples", "groups")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    changed = ("train.global_batch={samples: 48}", *IN_SAMPLES[1:], *more)
    code, error = launch(request_for(data, tmp_path / "samples", *changed, **options))
    assert code == 2
    assert f"{{'samples': 48}} now, and the run has steps of {plan.num_groups} groups of at most" in error

    # Another setting that plans depend on may change, and the run keeps its groups.
    recomputed = (*IN_SAMPLES, *more, "parallel.llm.recompute=all")
    assert launch(request_for(data, tmp_path / "samples", *recomputed, **options)) == (0, "")
    assert load_plan(tmp_path / "samples" / PLAN_FILE).data.seq_len == plan.data.seq_len
