"""Memory is planned for a microbatch a little larger than the sampled ones, never larger than the largest possible."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import layout_graph
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.sample_batches import UnitSplit, batch_split_of
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning import factory
from tests.plans import mesh_assignments

SPLIT = (UnitSplit("vision", 1, 8), UnitSplit("llm", 1, 8))
SURPLUS = DEFAULT_BUDGET.sampling.unsampled_load_ratio


def test_memory_is_planned_for_more_than_the_sampled_batches_show() -> None:
    layer_costs = factory.evaluator_for(factory.recipe(seq_len=384)).layer_costs
    sampled = [
        (mb.unit, load) for loads in factory.loads_of_steps(layer_costs, SPLIT) for mb, load in loads.loads.items()
    ]
    images = max((load for unit, load in sampled if unit == "vision"), key=lambda load: load.tokens)
    largest = layer_costs.loads.largest("vision", SPLIT)
    assert largest.tokens == round(SURPLUS * images.tokens)
    assert largest.sum_sq == round(SURPLUS**2 * images.sum_sq)
    assert largest.num_sequences == images.num_sequences


@pytest.mark.parametrize("seq_len", [384, 4096])
def test_a_text_is_never_longer_than_a_sequence_may_be(seq_len: int) -> None:
    layer_costs = factory.evaluator_for(factory.recipe(seq_len=seq_len)).layer_costs
    sampled = [
        load
        for loads in factory.loads_of_steps(layer_costs, SPLIT)
        for mb, load in loads.loads.items()
        if mb.unit == "llm"
    ]
    largest = layer_costs.loads.largest("llm", SPLIT)
    assert largest.tokens == min(seq_len, round(SURPLUS * max(load.tokens for load in sampled)))
    assert largest.num_sequences > 1


def test_the_longest_sample_may_come_alone() -> None:
    problem = factory.problem_for(factory.recipe(seq_len=4096))
    lengths = problem.batches.lengths
    long = replace(lengths, tokens=np.append(lengths.tokens[:-1], 9000).astype(np.int64))
    layer_costs = LayerCosts(replace(problem, batches=replace(problem.batches, lengths=long), seq_len=8192))
    largest = layer_costs.loads.largest("llm", SPLIT)
    assert (largest.tokens, largest.num_sequences, largest.sum_sq) == (8192, 1, 8192**2)


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("frozen", [True, False])
def test_partitions_are_compared_by_the_working_memory_that_ranks_are_counted_with(
    frozen: bool, recompute: str
) -> None:
    vision = {**factory.VISION, "freeze": frozen}
    parallel = {unit: {"recompute": recompute} for unit in ("vision", "llm")}
    evaluator = factory.evaluator_for(factory.recipe(vision=vision, parallel=parallel))
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    for assignment in (a for a in mesh_assignments(choices, 4) if a.placement == "disaggregated"):
        layout = factory.anchor_layout(assignment, layer_costs, choices)
        assert layout is not None
        graph = layout_graph(layout, layer_costs)
        memory = layer_costs.memory(graph)
        for stage in graph.stages:
            mesh, (lo, hi) = graph.mesh(stage.id.unit), stage.layers
            costs = layer_costs.unit_costs(stage.id.unit, mesh.tp, batch_split_of(graph))
            freed = [costs.kept_bytes[layer + 1 : hi].sum() for layer in range(lo, hi)]  # behind each
            working = (costs.working_bytes[lo:hi] - freed).max() + costs.input_bytes[lo] + costs.input_bytes[hi - 1]
            num_in_flight = in_flight_microbatches(graph)[stage.id]
            messages = layer_costs.graph_memory(graph).held_layers(graph, stage, num_in_flight).under_way_bytes
            if mesh.vpp == 1:
                assert memory[stage.tp_groups[0][0]].buffers == working + messages, stage.id
