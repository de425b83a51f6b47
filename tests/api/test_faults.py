"""What `simulate --fault` says a run does, on a plan of two replica groups."""

from dataclasses import replace

import pytest

from mmtrain.api.faults import Fault, FaultOutcome, simulate_fault
from mmtrain.errors import UserError
from mmtrain.planning.evaluate.simulate_plan import plan_timing, simulate_plan
from mmtrain.program import Backward, Forward
from mmtrain.program.simulation.simulate import SlowRankTiming
from mmtrain.recipe import Recipe
from tests.flow import cases
from tests.flow.cases import Mesh

SETTINGS = cases.recipe()
# An encoder on ranks 0 and 1, the LLM on ranks 2 and 3.
PLAN = cases.plan(SETTINGS, vision=Mesh((), (0, 1), dp=2), llm=Mesh((), (2, 3), dp=2))
BATCH = cases.batch(0, cases.samples_of(0), {"vision": 2, "llm": 2}, PLAN.schedule.num_microbatches)
TIMING = plan_timing(SETTINGS, PLAN, BATCH)


def outcome(fault: Fault, settings: Recipe = SETTINGS) -> FaultOutcome:
    timing = replace(TIMING, ranks_per_node=2) if fault.kind == "dead_node" else TIMING
    return simulate_fault(settings, PLAN, timing, simulate_plan(SETTINGS, PLAN, BATCH).step_time_s, fault)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_slow_rank_slows_the_step_and_is_named(rank: int) -> None:
    slow = outcome(Fault("slow", rank, 3.0))
    assert slow.step_time_s is not None
    assert 1.5 * slow.unbroken_s < slow.step_time_s < 3 * slow.unbroken_s
    assert f"({slow.step_time_s / slow.unbroken_s - 1:+.0%})" in slow.consequences
    assert f"it names rank {rank} after 10 steps" in slow.consequences
    assert outcome(Fault("slow", rank, 1.0)).step_time_s == pytest.approx(slow.unbroken_s)


def test_a_slow_rank_holds_up_its_tp_group_alone() -> None:
    plan = cases.plan(SETTINGS, vision=Mesh((), (0, 1), tp=2), llm=Mesh((), (2, 3), dp=2))
    batch = cases.batch(0, cases.samples_of(0), {"vision": 1, "llm": 2}, plan.schedule.num_microbatches)
    timing = plan_timing(SETTINGS, plan, batch)
    slowed = SlowRankTiming(timing, rank=1, factor=2.0)
    for span in simulate_plan(SETTINGS, plan, batch).spans:
        if isinstance(span.action, Forward | Backward):
            factor = 2.0 if span.action.stage.unit == "vision" else 1.0
            assert slowed.compute(span.action) == pytest.approx(factor * timing.compute(span.action))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("lost", 0), "stands still for 300 s (train.watchdog_s). Then every rank reports what it waits for"),
        (Fault("dead", 2), "the launcher ends the other ranks"),
        (Fault("dead_node", 1), "without a node in the place of node 1, `--resume` with a plan for 2 ranks fewer"),
    ],
)
def test_a_run_that_ends_says_where_it_continues(fault: Fault, expected: str) -> None:
    ended = outcome(fault)
    assert ended.step_time_s is None
    assert expected in ended.consequences
    assert "from the newest checkpoint: up to 100 steps" in ended.consequences


def test_a_run_that_saves_at_its_end_alone_begins_anew() -> None:
    settings = cases.recipe(train__checkpoint__every=0)
    assert (
        "it begins with the first step: train.checkpoint.every is 0" in outcome(Fault("dead", 0), settings).consequences
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("dead", 4), "--fault: rank 4 found; allowed: a rank of the plan, 0 to 3"),
        (Fault("dead_node", 2), "--fault: node 2 found; allowed: a node of the plan, 0 to 1"),
        (Fault("slow", 0, 0.5), "--fault: factor 0.5 found; allowed: 1 or more"),
    ],
)
def test_a_fault_that_the_plan_cannot_have_is_rejected(fault: Fault, message: str) -> None:
    with pytest.raises(UserError, match=message):
        outcome(fault)
