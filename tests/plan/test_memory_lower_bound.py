"""What a rank must hold at least, against what plans' ranks hold."""

from dataclasses import replace
from typing import Any

import pytest

from mmtrain.plan.estimate.memory_lower_bound import unit_memory_bound
from mmtrain.plan.search.layer_partition import layer_chains, layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, mesh_assignments
from mmtrain.program.ir.graph import LLM
from tests.plan.exhaustive import everything, random_instance
from tests.plan.factory import VISION, layer_costs_for, recipe

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


def behind(assignment: MeshAssignment, unit: str) -> int:
    """Microbatches of an encoder that are under way in the LLM's pipeline on ranks of its own, at least."""
    if assignment.placement != "disaggregated" or unit == LLM:
        return 0
    return assignment.meshes[LLM].pp * assignment.num_microbatches[unit] // assignment.num_microbatches[LLM]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_no_rank_does_with_less(case: str, world_size: int) -> None:
    layer_costs, choices = layer_costs_for(recipe(**CASES[case]))
    room, closest = unit_memory_bound(layer_costs), 0.0
    again = {
        u.name: frozenset(range(len(u.layers)))
        for u in layer_costs.shape.units
        if layer_costs.recompute[u.name] == "auto"
    }
    for assignment in list(mesh_assignments(choices, world_size))[::3]:
        chains = layer_chains(assignment, layer_costs, choices)
        cuts = tuple(chain.anchor for chain in chains if chain.anchor is not None)
        if len(cuts) < len(chains):
            continue
        for recompute in ({}, again):
            memory = layer_costs.memory(
                layout_graph(partitioned_layout(assignment, layer_costs, cuts, recompute), layer_costs)
            )
            fullest = max(m.total for m in memory.values())
            for name, size in assignment.meshes.items():
                least = room(name, size, assignment.paces[name], behind(assignment, name))
                assert least <= fullest * (1 + 1e-9), (assignment, name)
                closest = max(closest, least / fullest)
    assert closest > 0.4


@pytest.mark.parametrize("seed", range(6))
def test_it_rules_out_nothing_that_fits(seed: int) -> None:
    given = random_instance(seed, most_cuts=60)
    room = unit_memory_bound(given.layer_costs)
    for _, assignment in given.assignments:
        least = max(
            room(name, size, assignment.paces[name], behind(assignment, name))
            for name, size in assignment.meshes.items()
        )
        for judged in everything(replace(given, assignments=[(0.0, assignment)])):
            assert least <= judged.peak_bytes
