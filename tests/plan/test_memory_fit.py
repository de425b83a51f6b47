"""The microbatch that a plan makes room for: a little more than drawn, never more than can come."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.plan.estimate.layer_costs import UNSAMPLED_LOAD_FACTOR, batch_split_of
from mmtrain.plan.search.layer_partition import anchor_layout, layout_graph
from mmtrain.plan.search.mesh_enumeration import mesh_assignments
from tests.plan import factory

DP = (("vision", 1, 8), ("llm", 1, 8))


def test_room_is_left_for_what_the_drawn_batches_do_not_show() -> None:
    layer_costs, _ = factory.layer_costs_for(factory.recipe(seq_len=384))
    drawn = [(mb.unit, load) for loads in layer_costs.loads(DP) for mb, load in loads.loads.items()]
    images = max((load for unit, load in drawn if unit == "vision"), key=lambda load: load.tokens)
    found = layer_costs.largest_load("vision", DP)
    assert found.tokens == round(UNSAMPLED_LOAD_FACTOR * images.tokens)
    assert found.sum_sq == round(UNSAMPLED_LOAD_FACTOR**2 * images.sum_sq)
    assert found.num_sequences == images.num_sequences


@pytest.mark.parametrize("seq_len", [384, 4096])
def test_a_text_is_never_longer_than_a_sequence_may_be(seq_len: int) -> None:
    layer_costs, _ = factory.layer_costs_for(factory.recipe(seq_len=seq_len))
    largest = max(x.tokens for loads in layer_costs.loads(DP) for mb, x in loads.loads.items() if mb.unit == "llm")
    found = layer_costs.largest_load("llm", DP)
    assert found.tokens == min(seq_len, round(UNSAMPLED_LOAD_FACTOR * largest))
    assert found.num_sequences > 1


def test_the_longest_sample_may_come_alone() -> None:
    layer_costs, _ = factory.layer_costs_for(factory.recipe(seq_len=4096))
    lengths = layer_costs.batches.lengths
    long = replace(lengths, tokens=np.append(lengths.tokens[:-1], 9000).astype(np.int64))
    layer_costs = replace(layer_costs, batches=replace(layer_costs.batches, lengths=long), seq_len=8192)
    found = layer_costs.largest_load("llm", DP)
    assert (found.tokens, found.num_sequences, found.sum_sq) == (8192, 1, 8192**2)


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("frozen", [True, False])
def test_cuts_are_judged_with_the_working_memory_that_ranks_are_counted_with(frozen: bool, recompute: str) -> None:
    vision = {**factory.VISION, "freeze": frozen}
    settings = factory.recipe(vision=vision, parallel={u: {"recompute": recompute} for u in ("vision", "llm")})
    layer_costs, choices = factory.layer_costs_for(settings)
    for assignment in (s for s in mesh_assignments(choices, 4) if s.placement == "disaggregated"):
        layout = anchor_layout(assignment, layer_costs, choices)
        assert layout is not None
        graph = layout_graph(layout, layer_costs)
        held = layer_costs.memory(graph)
        for stage in graph.stages:
            mesh, (lo, hi) = graph.mesh(stage.id.unit), stage.layers
            line = layer_costs.unit_costs(stage.id.unit, mesh.tp, batch_split_of(graph))
            working = line.working_bytes[lo:hi].max() + line.input_bytes[lo] + line.input_bytes[hi - 1]
            if mesh.vpp == 1:
                assert held[stage.tp_groups[0][0]].buffers == working, stage.id
