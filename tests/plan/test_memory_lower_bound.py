"""What a rank must hold at least, against what plans' ranks hold."""

from dataclasses import replace
from typing import Any

import pytest

from mmtrain.plan.estimate.memory_lower_bound import unit_room
from mmtrain.plan.search.layer_partition import graph_for, laid_out, tracks_of
from mmtrain.plan.search.mesh_enumeration import Sizing, sizings
from mmtrain.program.ir.graph import LLM
from tests.plan.exhaustive import everything, random_instance
from tests.plan.factory import VISION, pricing_for, recipe

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


def behind(sizing: Sizing, unit: str) -> int:
    """Microbatches of an encoder that are under way in the LLM's pipeline on ranks of its own, at least."""
    if sizing.placement != "disaggregated" or unit == LLM:
        return 0
    return sizing.sizes[LLM].pp * sizing.counts[unit] // sizing.counts[LLM]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_no_rank_does_with_less(case: str, world_size: int) -> None:
    pricing, choices = pricing_for(recipe(**CASES[case]))
    room, closest = unit_room(pricing), 0.0
    again = {
        u.name: frozenset(range(len(u.layers))) for u in pricing.shape.units if pricing.recompute[u.name] == "auto"
    }
    for sizing in list(sizings(choices, world_size))[::3]:
        tracks = tracks_of(sizing, pricing, choices)
        cuts = tuple(track.anchor for track in tracks if track.anchor is not None)
        if len(cuts) < len(tracks):
            continue
        for recompute in ({}, again):
            memory = pricing.memory(graph_for(laid_out(sizing, pricing, cuts, recompute), pricing))
            fullest = max(m.total for m in memory.values())
            for name, size in sizing.sizes.items():
                least = room(name, size, sizing.paces[name], behind(sizing, name))
                assert least <= fullest * (1 + 1e-9), (sizing, name)
                closest = max(closest, least / fullest)
    assert closest > 0.4


@pytest.mark.parametrize("seed", range(6))
def test_it_rules_out_nothing_that_fits(seed: int) -> None:
    given = random_instance(seed, most_cuts=60)
    room = unit_room(given.pricing)
    for _, sizing in given.sizings:
        least = max(room(name, size, sizing.paces[name], behind(sizing, name)) for name, size in sizing.sizes.items())
        for judged in everything(replace(given, sizings=[(0.0, sizing)])):
            assert least <= judged.peak_bytes
