"""The least that a rank must hold, against what the ranks of layouts hold."""

from dataclasses import replace
from typing import Any

import pytest

from mmtrain.planning.evaluate.lower_bounds import UnitMemoryBound
from mmtrain.planning.layer_costs.layer_partition import layer_chains, layout_graph, partitioned_layout
from mmtrain.planning.search.mesh_enumeration import in_flight_behind
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.program.ir.graph import LLM, StageId
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.exhaustive import everything, random_instance
from tests.planning.factory import VISION, evaluator_for, recipe
from tests.plans import mesh_assignments

CASES: dict[str, dict[str, Any]] = {
    "deep": {"llm": {"layers": 7}, "global_batch": 16},
    "tied": {"llm": {"layers": 2, "tie_embeddings": True, "vocab": 4096}},
    "frozen": {"vision": {**VISION, "freeze": True}, "llm": {"layers": 6}},
    "kept": {"parallel": {"vision": {"recompute": "none"}, "llm": {"recompute": "none"}}},
    "recomputed": {"parallel": {"llm": {"recompute": "all"}}, "llm": {"layers": 8}},
    "merged": {"parallel": {"vision": {"num_microbatches": 2}}},
    "split": {"parallel": {"vision": {"num_microbatches": 16}}},
    "text": {"vision": None, "llm": {"layers": 9}},
}


def min_bytes(bound: UnitMemoryBound, assignment: MeshAssignment) -> dict[str, float]:
    """Return the lower bound of each unit."""
    bounds = {}
    for unit, mesh in assignment.meshes.items():
        behind = 0
        if assignment.placement == "disaggregated" and unit != LLM:
            behind = in_flight_behind(assignment, unit)
        asked = (unit, mesh, assignment.pipeline_microbatches[unit], behind)
        bounds[unit] = bound(*asked)
        for ratio in (0.9, 1.0, 1.01, 1.5, 3.0):  # the quick answer is that of the bound
            assert bound.may_fit(*asked, bounds[unit] * ratio) == (ratio >= 1)
    return bounds


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_fullest_rank_holds_no_less(case: str, num_ranks: int) -> None:
    evaluator = evaluator_for(recipe(**CASES[case]))
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    closest = 0.0
    all_layers = {
        unit.name: frozenset(range(len(unit.layers)))
        for unit in layer_costs.shape.units
        if layer_costs.recompute[unit.name] == "auto"
    }
    for assignment in list(mesh_assignments(choices, num_ranks))[::3]:
        chains = layer_chains(assignment, layer_costs, choices)
        anchors = tuple(chain.anchor for chain in chains if chain.anchor is not None)
        if len(anchors) < len(chains):
            continue
        for recompute in ({}, all_layers):
            layout = partitioned_layout(assignment, layer_costs, anchors, recompute)
            memory = layer_costs.memory(layout_graph(layout, layer_costs))
            fullest = max(rank.total for rank in memory.values())
            for unit, bound in min_bytes(evaluator.memory_lower_bound, assignment).items():
                assert bound <= fullest * (1 + 1e-9), (assignment, unit)
                closest = max(closest, bound / fullest)
    assert closest > 0.4


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 4)), 3, 5])
def test_the_bound_excludes_nothing_that_fits(seed: int) -> None:
    instance = random_instance(seed, max_partitions=60)
    for candidate in instance.candidates:
        bound = max(min_bytes(instance.evaluator.memory_lower_bound, candidate.assignment).values())
        for simulated in everything(replace(instance, candidates=[candidate])):
            assert bound <= simulated.peak_bytes


@pytest.mark.parametrize("merged", [1, 2])
def test_encoders_hold_no_fewer_microbatches_than_the_bound_counts(merged: int) -> None:
    """Before LLMs of all depths, interleaved or not: the first stage of an encoder holds the most."""
    evaluator = evaluator_for(recipe(llm={"layers": 14}, global_batch=24))
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    num_interleaved = 0
    for num_ranks in (3, 5, 6):
        for assignment in mesh_assignments(choices, num_ranks):
            vision, num_vision = assignment.meshes["vision"], assignment.num_microbatches["vision"]
            if assignment.placement != "disaggregated" or num_vision * merged != assignment.num_microbatches[LLM]:
                continue
            chains = layer_chains(assignment, layer_costs, choices)
            layout = partitioned_layout(assignment, layer_costs, tuple(chain.anchor or () for chain in chains))
            held = in_flight_microbatches(layout_graph(layout, layer_costs))[StageId("vision", 0)]
            assert held >= min(vision.pp + in_flight_behind(assignment, "vision"), num_vision), assignment
            num_interleaved += assignment.meshes[LLM].vpp > 1
    assert num_interleaved > 3
