"""Colocated plans of whole recipes: their orders run, are no slower than the coarse one, and fit."""

import math
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.costs import machine_for
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.graph_memory import peak_in_flight
from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.artifact.plan_graph import split_into_pieces, stage_graph
from mmtrain.planning.colocated.colocated_layouts import colocated_layout, llm_mesh_sizes, other_mesh_sizes
from mmtrain.planning.colocated.colocated_search import (
    _Attempt,
    _by_bound,
    _enumerate,
    _least_seconds_of_busiest_rank,
    _recompute_levels,
    _StepBound,
    search_colocated,
)
from mmtrain.planning.colocated.encoder_order import plan_encoder_order, scheduling_efficiency
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import SampledBatchTiming, model_timing, runs_alike
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import layout_graph
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program import Fill, ScheduleKind, build_program
from mmtrain.program.ir.graph import LLM
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.program.schedules.builder import build_compute
from mmtrain.program.simulation.simulate import simulate
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.report import plan_table
from tests.planning.factory import (
    VISION,
    evaluator_for,
    layer_costs_for,
    lengths,
    loads_of_steps,
    problem_for,
    recipe,
    simulated,
    with_memory,
)
from tests.plans import plan_recipe

MACHINE = machine_for(recipe(), "cpu-core")


def order_of(candidate: Candidate) -> tuple[ScheduleKind, Any]:
    return candidate.schedule.kind, candidate.schedule.order


def layouts(settings: Recipe, world_size: int, vpp: int = 1) -> list[Layout]:
    """Return the colocated layouts on all meshes."""
    layer_costs, choices = layer_costs_for(settings)
    candidates = [
        colocated_layout(layer_costs, encoders, replace(llm, vpp=vpp))
        for llm in llm_mesh_sizes(choices, world_size)
        for encoders in other_mesh_sizes(choices, llm)
    ]
    return [layout for layout in candidates if layout is not None]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("vision_trains", [True, False], ids=["trained", "frozen"])
def test_an_encoder_is_on_all_ranks_and_its_mesh_divides_the_llms(world_size: int, vision_trains: bool) -> None:
    settings = recipe(vision={**VISION, "freeze": not vision_trains})
    for layout in layouts(settings, world_size):
        vision, llm = layout.units["vision"], layout.units[LLM]
        assert llm.pp % vision.pp == 0
        assert llm.tp % vision.tp == 0
        assert sorted(vision.ranks) == sorted(llm.ranks) == list(range(world_size))
        graph = layout_graph(layout, layer_costs_for(settings)[0])
        per_llm = vision.dp // llm.dp
        for replica in range(vision.dp):
            ranks = {r for s in graph.stages if s.id.unit == "vision" for r in s.tp_groups[replica]}
            llm_ranks = {r for s in graph.stages if s.id.unit == LLM for r in s.tp_groups[replica // per_llm]}
            assert ranks <= llm_ranks, "an encoder's replica is inside one LLM replica"


@pytest.mark.parametrize(
    ("world_size", "vpp", "changes"),
    [
        pytest.param(2, 1, {}, id="two ranks"),
        pytest.param(4, 1, {}, id="four ranks", marks=pytest.mark.slow),
        pytest.param(4, 2, {"llm": {"layers": 9}}, id="interleaved"),
        pytest.param(4, 1, {"parallel": {"vision": {"num_microbatches": 4}}}, id="merged", marks=pytest.mark.slow),
        pytest.param(4, 1, {"parallel": {"vision": {"num_microbatches": 16}, "llm": {"dp": 1}}}, id="split"),
    ],
)
def test_planned_orders_pass_the_checker_and_are_evaluated_as_they_run(
    world_size: int, vpp: int, changes: dict[str, Any]
) -> None:
    settings = recipe(**changes)
    evaluator = evaluator_for(settings)
    layer_costs = evaluator.layer_costs
    num_faster = 0
    for layout in layouts(settings, world_size, vpp)[::2]:
        graph = layout_graph(layout, layer_costs)
        counts = dict(layout.num_microbatches)
        coarse = simulated(layout, evaluator, SchedulePlan(kind="coarse", num_microbatches=counts))
        seconds = layer_costs.stage_seconds(graph)
        for max_ahead in (None, 2, 0):
            order = plan_encoder_order(graph, layer_costs, MACHINE, max_ahead=max_ahead)
            program = build_program(graph, kind="explicit", order=order)
            planned = simulated(layout, evaluator, SchedulePlan(kind="explicit", num_microbatches=counts, order=order))
            times = [
                simulate(
                    program,
                    SampledBatchTiming(model_timing(graph, layer_costs, loads, MACHINE), seconds, batch, layer_costs),
                ).step_time_s
                for batch, loads in enumerate(loads_of_steps(layer_costs, batch_split_of(graph)))
            ]
            if graph.num_groups == 1:
                assert planned.step_time_s == pytest.approx(sum(times) / len(times))
            assert planned.memory == layer_costs.memory(graph, peak_in_flight(program))
            num_faster += planned.step_time_s < coarse.step_time_s * 0.999
            assert 0 <= (scheduling_efficiency(planned.graph, planned.schedule, layer_costs, MACHINE) or 0) <= 1
    assert num_faster, "bubbles were used"


@pytest.mark.parametrize("with_sp", [False, True], ids=["without sp", "with sp"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_pieces_of_layers_fill_the_gaps_inside_the_llms_layers(with_sp: bool, recompute: str) -> None:
    """Use wider models than other tests do, so that gaps are longer than an encoder's pieces."""
    wide = {**VISION, "hidden": 512, "ffn": 1024}
    settings = recipe(
        vision=wide, llm={"hidden": 2048, "heads": 16, "ffn": 4096}, parallel={"vision": {"recompute": recompute}}
    )
    machine = machine_for(settings, "h100-80g")
    problem = evaluator_for(settings, "h100-80g").problem
    layer_costs = LayerCosts(problem, {unit: frozenset([2, 4] if with_sp else []) for unit in ("vision", LLM)})
    evaluator = Evaluator(problem, layer_costs=layer_costs)
    num_fills, num_faster = 0, 0
    for layout in (layout for layout in layouts(settings, 4) if layout.units[LLM].tp > 1):
        sp_units = [name for name, unit in layout.units.items() if with_sp and unit.tp > 1]
        graph = split_into_pieces(layout_graph(layout, layer_costs), layer_costs.shape, sp_units)
        order = plan_encoder_order(graph, layer_costs, machine)
        program = build_program(graph, kind="explicit", order=order)
        schedule = SchedulePlan(
            kind="explicit", num_microbatches=dict(layout.num_microbatches), order=order, pieces=True
        )
        in_pieces = simulated(layout, evaluator, schedule)
        assert in_pieces.graph == graph
        assert in_pieces.memory == layer_costs.memory(graph, peak_in_flight(program))
        num_fills += sum(isinstance(action, Fill) for action in program.actions[0])
        by_layer = plan_encoder_order(layout_graph(layout, layer_costs), layer_costs, machine)
        plain = simulated(layout, evaluator, schedule.model_copy(update={"order": by_layer, "pieces": False}))
        num_faster += in_pieces.step_time_s < plain.step_time_s * 0.99
    if recompute == "none":  # a recomputed layer is one piece
        assert num_fills
        assert num_faster


def test_candidates_are_scheduled_in_pieces_where_that_is_faster() -> None:
    wide = {"hidden": 2048, "heads": 16, "ffn": 4096}
    settings = recipe(vision={**VISION, "hidden": 512, "ffn": 1024}, llm=wide, parallel={"llm": {"tp": 4, "pp": 1}})
    machine = machine_for(settings, "h100-80g")
    evaluator = evaluator_for(settings, "h100-80g")
    layer_costs = evaluator.layer_costs
    candidates = search_colocated(evaluator, 4).candidates
    in_pieces = [candidate for candidate in candidates if candidate.schedule.pieces]
    assert len(in_pieces) > 2, "it was tried wherever it may be the fastest"
    for candidate in in_pieces:
        order = plan_encoder_order(layout_graph(candidate.layout, layer_costs), layer_costs, machine)
        counts = dict(candidate.layout.num_microbatches)
        by_layer = SchedulePlan(kind="explicit", num_microbatches=counts, order=order)
        assert candidate.step_time_s < simulated(candidate.layout, evaluator, by_layer).step_time_s
        build_program(candidate.graph, kind="explicit", order=candidate.schedule.order)
        assert SchedulePlan.model_validate_json(candidate.schedule.model_dump_json()) == candidate.schedule


def test_candidates_are_never_slower_than_their_coarse_order() -> None:
    evaluator = evaluator_for(recipe(global_batch=16))
    results = search_colocated(evaluator, 4)
    assert {candidate.schedule.kind for candidate in results.candidates} >= {"explicit"}
    for candidate in results.candidates:
        coarse = SchedulePlan(kind="coarse", num_microbatches=dict(candidate.layout.num_microbatches))
        assert candidate.step_time_s <= simulated(candidate.layout, evaluator, coarse).step_time_s


def test_an_explicit_order_runs_as_the_coarse_one_where_it_is_that_order() -> None:
    evaluator = evaluator_for(recipe())
    num_others = 0
    for layout in layouts(recipe(), 4):
        graph, counts = layout_graph(layout, evaluator.layer_costs), dict(layout.num_microbatches)
        coarse = SchedulePlan(kind="coarse", num_microbatches=counts)
        for kind in ("coarse", "1f1b"):
            compute = build_compute(graph, kind)
            order = {rank: tuple(map(action_to_text, actions)) for rank, actions in compute.actions.items()}
            explicit = SchedulePlan(kind="explicit", num_microbatches=counts, order=order)
            is_same = compute.actions == build_compute(graph, "coarse").actions
            assert runs_alike(graph, explicit, coarse, MACHINE) == is_same
            num_others += not is_same
            if is_same:
                steps = [simulated(layout, evaluator, schedule).simulation for schedule in (explicit, coarse)]
                assert steps[0] == steps[1]
    assert num_others


def test_replicas_of_an_encoder_own_whole_microbatches_where_that_is_faster() -> None:
    """With one image a sample, one of four replicas would work on each LLM microbatch and the others idle."""
    settings = recipe(
        vision={**VISION, "hidden": 512, "heads": 8, "ffn": 2048},
        parallel={"llm": {"tp": 1, "pp": 4, "dp": 1}, "vision": {"tp": 1, "pp": 1}},
    )
    one_image = np.full(64, 36, dtype=np.int64)
    side, tokens = np.full(64, 6, dtype=np.int64), np.full(64, 330, dtype=np.int64)
    images = ItemLengths(np.arange(65), side, side, one_image, one_image // 4)
    samples = SampleLengths(tokens, tokens // 2, {"vision": images})
    problem = formulate_problem(settings, samples, world_size=4, hardware="h100-80g", recipe_sha256="f" * 64)
    merged = search_colocated(Evaluator(problem), 4)
    divided = [candidate for candidate in merged.candidates if candidate.assignment.num_microbatches["vision"] == 8]
    fastest = min(merged.candidates, key=lambda candidate: candidate.step_time_s)
    assert fastest.assignment.num_microbatches == {"vision": 2, "llm": 8}
    assert fastest.step_time_s < 0.95 * min(candidate.step_time_s for candidate in divided)
    build_program(fastest.graph, kind=fastest.schedule.kind, order=fastest.schedule.order)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_no_order_is_faster_than_the_busiest_rank(recompute: str) -> None:
    settings = recipe(global_batch=8, parallel={unit: {"recompute": recompute} for unit in ("vision", "llm")})
    evaluator = evaluator_for(settings)
    for layout in layouts(settings, 2):
        coarse = SchedulePlan(kind="coarse", num_microbatches=dict(layout.num_microbatches))
        candidate = simulated(layout, evaluator, coarse)
        least_s = _least_seconds_of_busiest_rank(candidate.fitted_graph, evaluator.layer_costs)
        assert 0 < least_s <= candidate.step_time_s


def test_the_search_stops_at_the_first_mesh_whose_lower_bound_is_slower() -> None:
    results = search_colocated(evaluator_for(recipe()), 4)
    fastest_s = results.merged().fastest_s
    bounds = [loser.candidate.time_lower_bound_s for loser in results.rejected if "its work cannot" in loser.reason]
    assert len(bounds) == 1
    assert bounds[0] > fastest_s
    assert max(candidate.time_lower_bound_s for candidate in results.candidates) <= bounds[0]


def test_a_recipe_may_require_a_colocated_plan() -> None:
    settings = recipe(parallel={"placement": "colocated"})
    chosen = plan_recipe(settings, lengths(), world_size=4, hardware="cpu-core", recipe_sha256="f")
    assert chosen.placement == "colocated"
    assert chosen.predicted.scheduling_efficiency is not None
    assert f"{chosen.predicted.scheduling_efficiency:.0%} of the encoders' work runs inside" in plan_table(chosen)
    coarse = chosen.predicted.coarse_scheduling_efficiency
    assert coarse is not None
    assert coarse < chosen.predicted.scheduling_efficiency, "layers in the pipeline's bubbles lie inside, too"
    assert {other.placement for other in chosen.alternatives} == {"colocated"}
    ends = [list(map(int, ranks.split("-"))) for ranks in chosen.predicted.peak_memory_gib]
    assert sorted(rank for end in ends for rank in range(end[0], end[-1] + 1)) == list(range(4)), "each rank once"
    build_program(
        stage_graph(chosen, build_model_shape(settings)), kind=chosen.schedule.kind, order=chosen.schedule.order
    )


def test_orders_that_hold_too_much_are_replaced_by_ones_that_fit() -> None:
    parallel = {"placement": "colocated", "llm": {"pp": 2, "tp": 1}, "vision": {"num_microbatches": 32}}
    settings = recipe(global_batch=32, parallel=parallel)
    evaluator = evaluator_for(settings)
    unlimited = search_colocated(evaluator, 2)
    recomputed = set()
    for share in (0.8, 0.5, 0.4):
        tight = with_memory(evaluator, share * min(candidate.peak_bytes for candidate in unlimited.candidates))
        results = search_colocated(tight, 2)
        assert results.candidates or results.rejected
        for candidate in results.candidates:
            assert candidate.peak_bytes <= tight.memory_bytes
            assert candidate.memory == evaluator.layer_costs.memory(
                candidate.graph, peak_in_flight(build_program(candidate.graph, None, *order_of(candidate)))
            )
            recomputed |= {name for name, unit in candidate.layout.units.items() for s in unit.stages if s.recompute}
    assert "vision" in recomputed
    none_fits = search_colocated(with_memory(evaluator, 1e4), 2)
    assert none_fits.candidates == ()
    assert all("does not fit" in loser.reason for loser in islice(none_fits.rejected, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"placement": "colocated", "vision": {"pp": 3}, "llm": {"pp": 2}}}, "divide the LLM's"),
        ({"parallel": {"placement": "colocated"}, "cluster": {"memory_gib": 0.001}}, "no plan fits"),
    ],
)
def test_an_impossible_colocated_plan_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_recipe(recipe(**changes), lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f")


def test_layouts_come_in_the_order_of_their_whole_bounds() -> None:
    narrow = replace(DEFAULT_BUDGET.colocated, bound_class_ratio=1.001, max_laid_out=1000)
    evaluator = Evaluator(problem_for(recipe()), replace(DEFAULT_BUDGET, colocated=narrow))
    bound, levels = _StepBound(evaluator.layer_costs), _recompute_levels(evaluator.layer_costs, narrow.recompute_shares)
    attempts = [_Attempt(candidate, evaluator, levels) for candidate in _enumerate(evaluator, 8, bound)]
    candidates = [attempt.candidate for attempt in _by_bound(attempts, evaluator, bound, lambda: math.inf)]
    assert len(attempts) > 5
    assert {str(c.assignment) for c in candidates} == {str(attempt.candidate.assignment) for attempt in attempts}
    assert all(c.time_lower_bound_s >= bound.seconds(c.assignment) for c in candidates)
    assert any(c.time_lower_bound_s > bound.seconds(c.assignment) for c in candidates)
    bounds = [c.time_lower_bound_s for c in candidates]
    assert all(after >= before / narrow.bound_class_ratio for before, after in pairwise(bounds))


def test_among_equal_bounds_layouts_with_fewest_passes_come_first() -> None:
    wide = replace(DEFAULT_BUDGET.colocated, bound_class_ratio=1e6, max_laid_out=7)
    evaluator = Evaluator(problem_for(recipe()), replace(DEFAULT_BUDGET, colocated=wide))
    bound, levels = _StepBound(evaluator.layer_costs), _recompute_levels(evaluator.layer_costs, wide.recompute_shares)
    attempts = [_Attempt(candidate, evaluator, levels) for candidate in _enumerate(evaluator, 8, bound)]
    tried = [attempt.candidate for attempt in _by_bound(attempts, evaluator, bound, lambda: math.inf)]
    num_passes = [candidate.assignment.passes_of_step for candidate in tried]
    assert len(num_passes) == wide.max_laid_out < len(attempts)
    assert num_passes == sorted(num_passes)
    assert len(set(num_passes)) > 1


def test_layouts_of_very_many_passes_wait_for_the_next_class_of_bounds() -> None:
    colocated = replace(DEFAULT_BUDGET.colocated, max_laid_out=1_000)
    problem = problem_for(recipe())

    def tried(max_passes: int) -> tuple[list[int], list[float]]:
        budget = replace(DEFAULT_BUDGET, colocated=replace(colocated, max_passes_to_come_first=max_passes))
        evaluator = Evaluator(problem, budget)
        bound = _StepBound(evaluator.layer_costs)
        levels = _recompute_levels(evaluator.layer_costs, colocated.recompute_shares)
        attempts = [_Attempt(candidate, evaluator, levels) for candidate in _enumerate(evaluator, 8, bound)]
        candidates = [attempt.candidate for attempt in _by_bound(attempts, evaluator, bound, lambda: math.inf)]
        return [c.assignment.passes_of_step for c in candidates], [c.time_lower_bound_s for c in candidates]

    all_passes, _ = tried(10**9)
    limit = sorted(all_passes)[len(all_passes) // 2]
    num_passes, bounds = tried(limit)
    assert sorted(num_passes) == sorted(all_passes)
    assert num_passes != all_passes
    for (passes_before, bound_before), (passes_after, bound_after) in pairwise(zip(num_passes, bounds, strict=True)):
        if passes_before > limit >= passes_after:
            assert bound_after > bound_before
