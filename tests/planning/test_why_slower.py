"""Why a plan lost: the reason names what takes longer."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mmtrain.planning.advise.why_slower import explain_measured_slower, explain_slower
from mmtrain.planning.artifact.layout import Layout, MeshSize, disaggregated_units, unified_units
from mmtrain.planning.artifact.plan import StepMeasurement
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program import StageId
from tests.planning import factory

SETTINGS = factory.recipe()


def simulated(llm_bounds: tuple[int, ...], recompute: dict[str, range] | None = None) -> Candidate:
    """Simulate the encoder on one rank and the LLM's six layers on two."""
    sizes = {"vision": MeshSize(1, 1, 1), "llm": MeshSize(1, len(llm_bounds) - 1, 1)}
    units = disaggregated_units(sizes, {"vision": (0, 5), "llm": llm_bounds}, recompute or {})
    layout = Layout("disaggregated", units, {"vision": 8, "llm": 8})
    return factory.simulated(layout, factory.evaluator_for(SETTINGS))


def changed(candidate: Candidate, **fields: Any) -> Candidate:
    """Return the candidate with another simulation."""
    assert candidate.simulation is not None
    return replace(candidate, simulation=replace(candidate.simulation, **fields))


@pytest.fixture(scope="module")
def even() -> Candidate:
    return simulated((0, 3, 6))


def test_the_busiest_rank_is_reported_with_all_its_stages() -> None:
    """Use one pipeline of one rank, where all stages belong to the busiest rank."""
    evaluator = factory.evaluator_for(SETTINGS)
    units = unified_units(evaluator.problem.shape, MeshSize(1, 1, 1), (0, 11))
    candidate = factory.simulated(Layout("unified", units, {"vision": 8, "llm": 8}), evaluator)
    assert candidate.busiest_stages == (StageId("vision", 0), StageId("llm", 0))
    assert candidate.busiest_s == pytest.approx(candidate.step_time_s * (1 - sum(candidate.bubbles.values())), rel=1e-4)


def test_a_plan_that_recomputes_computes_more(even: Candidate) -> None:
    recomputing = simulated((0, 3, 6), {"vision": range(5), "llm": range(6)})
    reason = explain_slower(recomputing, even)
    assert "x slower: its ranks compute " in reason
    assert reason.endswith("x as long: 11 layers are recomputed, not 0")


def test_an_uneven_partition_is_called_load_imbalance(even: Candidate) -> None:
    reason = explain_slower(simulated((0, 1, 6)), even)
    assert "x slower: load imbalance, ranks with llm layers 1-5 compute " in reason


def test_a_plan_that_idles_longer_names_the_bubble(even: Candidate) -> None:
    """Compare the same work, evenly spread, in a longer step: only the pipeline's cool-down has grown."""
    busy = 1 - sum(even.bubbles.values())
    flat = changed(even, busiest_s=busy * even.step_time_s)
    longer = {kind: share / 2 for kind, share in even.bubbles.items()} | {"pp_warmup": 0.0, "pp_cooldown": 0.0}
    longer["pp_cooldown"] = 1 - busy / 2 - sum(longer.values())
    waits = changed(flat, step_time_s=2 * even.step_time_s, bubbles=longer)
    idle_s, chosen_idle_s = (2 - busy) * even.step_time_s, (1 - busy) * even.step_time_s
    assert explain_slower(waits, flat) == (
        f"2.00x slower: its ranks idle {idle_s:.3g} s of the step, the chosen plan's {chosen_idle_s:.3g} s; "
        "pp_cooldown grows most"
    )


def test_a_measured_ratio_is_listed_before_the_predicted_one(even: Candidate) -> None:
    slow = changed(simulated((0, 2, 6)), step_time_s=1.5 * even.step_time_s)
    chosen, of_2_5 = even.measured(StepMeasurement(2.0)), StepMeasurement(2.5)
    ratios = "1.25x slower as measured, 1.50x as predicted"
    of_same_size = explain_measured_slower(slow.measured(of_2_5), chosen)
    assert of_same_size == f"{ratios}; layers by stage: vision 5, llm 2+4"
    single = changed(simulated((0, 6)), step_time_s=1.5 * even.step_time_s)
    assert explain_measured_slower(single.measured(of_2_5), chosen) == ratios, "its size says what differs"
    assert explain_measured_slower(slow.measured(StepMeasurement(math.inf)), chosen) == "could not be run here"
    for ratio, text in ((1.2, "ran out of memory: a rank held 1.20 of its counted peak"), (0.7, "ran out of memory")):
        misfit = slow.measured(StepMeasurement(math.inf, ratio, is_out_of_memory=True))
        assert explain_measured_slower(misfit, chosen) == text
