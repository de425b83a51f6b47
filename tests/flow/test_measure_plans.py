"""Plans are run for a few steps in turn, and one that fails leaves the others as they are."""

from pathlib import Path
from typing import cast

import pytest

from mmtrain.data import build_index
from mmtrain.errors import UserError
from mmtrain.planning import Plan
from mmtrain.program import Recv
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.profiling.measure_plans import LocalRanks, PlanRun, fit_together, measure_plans
from tests.distributed import fork_ranks
from tests.faults import FailAt
from tests.flow.runs import request_for
from tests.plans import plan_recipe


def recipe_of(data: Path, placement: str = "auto") -> Recipe:
    """Return a small recipe for any number of ranks."""
    return request_for(data, data, f"parallel.placement={placement}").loaded.recipe


def two_plans(data: Path) -> list[Plan]:
    """Return plans of two ranks: in the first of them no rank receives what another one sends, in the second rank 1."""
    plans = []
    for placement in ("replicated", "disaggregated"):
        recipe = recipe_of(data, placement)
        lengths = build_index(recipe).lengths
        plans.append(plan_recipe(recipe, lengths, world_size=2, hardware="cpu-core", recipe_sha256="x"))
    return plans


def _measure(_rank: int, _size: int, _folder: Path, data: Path) -> list[PlanRun]:
    recipe, plans = recipe_of(data), two_plans(data)
    runs = measure_plans(recipe, plans[:1], LocalRanks())
    [alone] = runs
    assert len(alone.memory_ratios) == 2
    assert all(
        0.3 < ratio < 30 for ratio in alone.memory_ratios
    )  # a tiny model: buffers of the libraries weigh more than its tensors
    assert fit_together(recipe, plans)
    runs += measure_plans(recipe, plans, LocalRanks(), num_steps=2)
    small = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"memory_gib": 0.001})})
    assert not fit_together(small, plans)
    elsewhere = plans[0].model_copy(update={"hardware": "h100-80g"})
    with pytest.raises(UserError, match="the plan is for h100-80g and this machine is cpu-core"):
        measure_plans(recipe, [elsewhere], LocalRanks())
    return runs


def test_every_plan_is_timed_on_the_ranks_of_this_machine(data: Path) -> None:
    """By itself, then in turn with another one, while both stay built."""
    [runs] = fork_ranks(1, _measure, data)
    assert [len(run.seconds) for run in runs] == [3, 2, 2]
    assert all(0 < seconds < 60 for run in runs for seconds in run.seconds)
    assert [run.memory_ratios for run in runs[1:]] == [(), ()]  # a process of CPUs knows one peak for all plans


def _measure_with_fault(
    _rank: int, _size: int, _folder: Path, data: Path, fault: FaultPoints
) -> tuple[list[PlanRun], list[str]]:
    notes: list[str] = []
    runs = measure_plans(recipe_of(data), two_plans(data), LocalRanks(), num_steps=2, faults=fault, note=notes.append)
    return runs, notes


def measured_with(fault: FaultPoints, data: Path) -> tuple[PlanRun, PlanRun, str]:
    """Return how both plans ran, the first one well, and the only note."""
    [(runs, notes)] = fork_ranks(1, _measure_with_fault, data, fault)
    [well, failed] = cast(list[PlanRun], runs)
    assert well.failure is None
    assert len(well.seconds) == 2
    assert failed.failure is not None
    assert failed.failure.rank == 1
    assert failed.measurement.seconds == float("inf")
    [note] = notes
    return well, failed, note


@pytest.mark.slow  # test_measured_choice has the same under a launcher
def test_a_plan_that_runs_out_of_memory_is_named_with_the_error_of_its_estimate(data: Path) -> None:
    _, failed, note = measured_with(FailAt(1, 0, "out of memory", action=Recv), data)
    failure = failed.failure
    assert failure is not None
    assert failure.is_out_of_memory
    assert failure.num_built == 1  # it had a turn without the other plan in memory
    assert failed.measurement.is_out_of_memory
    assert failed.measurement.memory_ratio == failure.held_bytes / failure.counted_bytes
    assert note.startswith("disaggregated")
    assert "out of memory on rank 1, and left out: the rank held" in note
    assert "the estimate is" in note


@pytest.mark.slow
def test_a_plan_that_fails_later_keeps_nothing_from_the_others(data: Path) -> None:
    """In the last turn, whose step comes after two of warm-up and one that was measured."""
    _, failed, note = measured_with(FailAt(1, 3, "exception", action=Recv), data)
    assert len(failed.seconds) == 1
    assert "failed to run on rank 1, and is left out: ValueError: a failure injected by the test" in note


@pytest.mark.slow
def test_a_plan_whose_rank_is_killed_is_left_out(data: Path) -> None:
    _, _, note = measured_with(FailAt(1, 0, "kill", action=Recv), data)
    assert "rank 1 was killed by SIGKILL" in note
