"""The step of a plan under changed costs is the one that it has on hardware that is really changed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, preset
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.costs.hardware import Hardware, Link
from mmtrain.costs.hardware_presets import PRESETS
from mmtrain.costs.recorded_costs import RecordedRatios, recorded_table
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.planner import search_placements
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate, SearchResults
from mmtrain.recipe.settings.schema import Recipe
from scripts.bench_sensitivity import compared_plans, rows, search, searched_anew, simulate_again
from scripts.perturbed_costs import PERTURBATIONS, SPREAD_PERTURBATIONS, Perturbation
from tests.planning.factory import problem_for, recipe, simulated

SLOWER = Perturbation("link speeds", 0.5)
# Two ranks on two nodes: data parallelism sends many gradients, and a pipeline waits for few microbatches.
APART: dict[str, Any] = {"vision": None, "global_batch": 2}
SMALL_LLM = {"vocab": 4096, "hidden": 256, "ffn": 768}
CASES = {
    "h100-80g": recipe(
        **APART,
        llm=SMALL_LLM,
        cluster={"ranks_per_node": 1},
        # Nothing hides what data-parallel ranks exchange.
        parallel={"bucket_parameters": 1_000_000_000, "llm": {"vpp": 1}},
    ),
    "cpu-core": recipe(**APART, llm={**SMALL_LLM, "hidden": 512, "ffn": 1536}, cluster={"ranks_per_node": 1}),
}


def _faster(link: Link, ratio: float) -> Link:
    return Link(link.bytes_per_s * ratio, link.latency_s / ratio, link.step_s / ratio)


# Written apart from what is tested.
CHANGED: dict[str, Callable[[Hardware, float], Hardware]] = {
    "GEMM efficiency": lambda h, ratio: replace(h, gemm_efficiency=h.gemm_efficiency * ratio),
    "attention efficiency": lambda h, ratio: replace(
        h,
        attention_efficiency=h.attention_efficiency * ratio,
        attention_backward_efficiency=h.attention_backward_efficiency * ratio,
    ),
    "launch time": lambda h, ratio: replace(h, kernel_launch_s=h.kernel_launch_s * ratio),
    "link speeds": lambda h, ratio: replace(
        h,
        intra_node=_faster(h.intra_node, ratio),
        inter_node=_faster(h.inter_node, ratio),
        collective_start_s=h.collective_start_s / ratio,
    ),
}


def _searched(settings: Recipe, hardware: str) -> tuple[SearchResults, Evaluator]:
    """Search the placements whose best plans lie apart; `replicated` has several that are as fast as the chosen one."""
    problem = problem_for(settings, hardware, 2)
    placements = tuple(placement for placement in problem.constraints.placements if placement != "replicated")
    apart = replace(problem, constraints=replace(problem.constraints, placements=placements))
    evaluator, results = search_placements(apart, DEFAULT_BUDGET)
    return results, evaluator


def _changes(compared: list[Candidate], evaluator: Evaluator) -> Iterator[tuple[str, float, list[float]]]:
    """Yield the steps of the plans under each change."""
    expected = [(constant, ratio) for constant in CHANGED for ratio in (0.8, 1.25)]
    assert [(perturbation.constant, perturbation.ratio) for perturbation in PERTURBATIONS] == expected
    steps = simulate_again(compared, evaluator, PERTURBATIONS)
    for perturbation, *changed in zip(PERTURBATIONS, *steps, strict=True):
        yield perturbation.constant, perturbation.ratio, changed


def _same(candidate: Candidate, results: SearchResults) -> Candidate:
    [found] = [c for c in results.candidates if c.layout == candidate.layout and c.schedule == candidate.schedule]
    return found


@pytest.mark.parametrize("hardware", CASES)
def test_a_full_plan_on_changed_hardware_gives_the_same_steps_and_choice(
    hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = preset(hardware)
    results, evaluator = _searched(CASES[hardware], hardware)
    compared = compared_plans(results.candidates, evaluator)
    changes = list(_changes(compared, evaluator))
    assert "link speeds" in {constant for constant, _, steps in changes if steps[1] * AS_FAST_RATIO < steps[0]}
    for constant, ratio, steps in changes:
        monkeypatch.setitem(PRESETS, hardware, CHANGED[constant](stated, ratio))
        anew, _ = _searched(CASES[hardware], hardware)
        assert steps == pytest.approx([_same(c, anew).step_time_s for c in compared], rel=1e-9)
        wins = steps[1] * AS_FAST_RATIO < steps[0]
        assert anew.candidates[0].layout == compared[wins].layout or abs(steps[1] / steps[0] - 1) < AS_FAST_RATIO - 1
        assert not wins or anew.candidates[0].layout == compared[1].layout


def test_a_full_plan_with_another_spread_of_ranks_gives_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = preset("h100-80g")
    results, evaluator = _searched(CASES["h100-80g"], "h100-80g")
    compared = compared_plans(results.candidates, evaluator)
    steps = simulate_again(compared, evaluator, SPREAD_PERTURBATIONS)
    for perturbation, *changed in zip(SPREAD_PERTURBATIONS, *steps, strict=True):
        spread = stated.time_spread.scaled(perturbation.ratio)
        monkeypatch.setitem(PRESETS, "h100-80g", replace(stated, time_spread=spread))
        anew, _ = _searched(CASES["h100-80g"], "h100-80g")
        assert changed == pytest.approx([_same(c, anew).step_time_s for c in compared], rel=1e-9)
        assert (changed[0] > compared[0].step_time_s) == (perturbation.ratio > 1)


@pytest.mark.parametrize("hardware", [pytest.param("h100-80g", marks=pytest.mark.slow), "cpu-core"])
def test_what_a_run_recorded_is_scaled_too(hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table of corrections has no entries, so that everything follows the hardware."""
    stated, file = preset(hardware), tmp_path / "costs.json"
    settings = CASES[hardware]
    precision = "fp32" if hardware == "cpu-core" else "bf16"
    ratios = RecordedRatios(forward={"llm": 1.2}, backward={"llm": 1.1}, messages=1.5, reductions=1.1)
    shape = build_model_shape(settings)
    recorded_table(AnalyticCosts(stated, precision), stated, precision, shape, ratios).save(file)
    _compare_with_full_plans(_with_costs(settings, file), hardware, monkeypatch, lambda constant, ratio: None)


def test_measured_messages_are_scaled_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The full plan reads a table whose messages and collectives were really measured faster or slower."""
    file = tmp_path / "costs.json"

    def write(constant: str, ratio: float) -> None:
        factor = 1 / ratio if constant == "link speeds" else 1.0
        entries = tuple(
            MessageEntry(
                kind=kind,
                size=2,
                nodes=2,
                nbytes=(1_000, 1_000_000, 10_000_000),
                seconds=(2e-4 * factor, 2e-3 * factor, 1e-2 * factor),
            )
            for kind in ("p2p", "reduce_scatter", "all_gather")
        )
        fields = {"hardware": "cpu-core", "device": "one core", "precision": "fp32", "software": {}, "date": "today"}
        CostTable.model_validate({**fields, "messages": entries}).save(file)

    write("link speeds", 1.0)
    _compare_with_full_plans(_with_costs(CASES["cpu-core"], file), "cpu-core", monkeypatch, write)


def _with_costs(settings: Recipe, table: Path) -> Recipe:
    return settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"costs": table})})


def _compare_with_full_plans(
    settings: Recipe, hardware: str, monkeypatch: pytest.MonkeyPatch, write_table: Callable[[str, float], None]
) -> None:
    stated = preset(hardware)
    results, evaluator = _searched(settings, hardware)
    compared = compared_plans(results.candidates, evaluator)
    assert len(compared) > 1
    for constant, ratio, steps in _changes(compared, evaluator):
        write_table(constant, ratio)
        monkeypatch.setitem(PRESETS, hardware, CHANGED[constant](stated, ratio))
        anew, _ = _searched(settings, hardware)
        assert steps == pytest.approx([_same(c, anew).step_time_s for c in compared], rel=1e-9)


@pytest.fixture(scope="module")
def with_encoder() -> tuple[SearchResults, Evaluator]:
    return _searched(recipe(global_batch=4), "h100-80g")


def test_explicit_orders_are_simulated_as_they_are(with_encoder: tuple[SearchResults, Evaluator]) -> None:
    """A full plan orders encoders anew, so the same order is simulated on the changed hardware here."""
    results, evaluator = with_encoder
    compared = compared_plans(results.candidates, evaluator)
    assert "explicit" in {c.schedule.kind for c in compared}
    for constant, ratio, steps in _changes(compared, evaluator):
        changed = CHANGED[constant](evaluator.problem.hardware, ratio)
        cluster = replace(evaluator.problem.cluster, hardware=changed)
        anew = Evaluator(replace(evaluator.problem, cluster=cluster, costs=AnalyticCosts(changed, "bf16")))
        expected = [simulated(c.layout, anew, c.schedule).step_time_s for c in compared]
        assert steps == pytest.approx(expected, rel=1e-9)


def test_every_placement_has_a_row_of_steps_beside_the_chosen_one() -> None:
    problem = problem_for(recipe(global_batch=4), "h100-80g", 2)
    candidates, evaluator = search(problem)
    chosen = candidates[0]
    table = list(rows(candidates, evaluator, [SLOWER]))
    placements = [row.name.partition(":")[0] for row in table]
    others = {c.placement for c in candidates} - {chosen.placement}
    assert "replicated" in others | {chosen.placement}
    assert set(placements) == others | ({chosen.placement} & set(placements))
    h = problem.hardware
    links = [replace(k, bytes_per_s=k.bytes_per_s / 2, latency_s=2 * k.latency_s, step_s=2 * k.step_s)
             for k in (h.intra_node, h.inter_node)]  # fmt: skip
    slow = replace(h, intra_node=links[0], inter_node=links[1], collective_start_s=2 * h.collective_start_s)
    cluster = replace(problem.cluster, hardware=slow)
    on_slow = replace(problem, cluster=cluster, costs=AnalyticCosts(slow, "bf16"))
    first = next(row for row in table if row.name != chosen.layout.summary)
    rival = next(c for c in candidates if c.layout.summary == first.name)
    again = [simulated(c.layout, type(evaluator)(on_slow), c.schedule).step_time_s for c in (rival, chosen)]
    assert first.changed[0] == pytest.approx(again[0] / again[1], rel=0.01)
    assert searched_anew(problem, SLOWER).startswith(search(on_slow)[0][0].layout.summary)
