"""Random plans of every placement, chunked, merged, recomputed: the checker accepts each, and memory holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planning.layer_costs.layer_partition import layout_graph, partitioned_layout
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program import build_program, peak_in_flight_by_stage
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.exhaustive import all_candidates
from tests.planning.factory import evaluator_for, recipe, with_memory

EVALUATOR = evaluator_for(recipe(llm={"layers": 6}, global_batch=8))
CANDIDATES = [candidate for num_ranks in (1, 2, 3, 4, 6) for candidate in all_candidates(EVALUATOR, num_ranks)]


def holds(data: st.DataObject) -> None:
    candidate = data.draw(st.sampled_from(CANDIDATES))
    layer_costs = EVALUATOR.layer_costs
    partition = []
    for chain in EVALUATOR.layer_chains(candidate):
        length = len(chain.costs.seconds)
        num_bounds = chain.num_chunks - 1
        bounds = st.lists(st.integers(1, length - 1), min_size=num_bounds, max_size=num_bounds, unique=True)
        partition.append((0, *sorted(data.draw(bounds)), length))
    graph = layout_graph(partitioned_layout(candidate.assignment, layer_costs, tuple(partition)), layer_costs)
    peak = max(memory.total for memory in layer_costs.memory(graph).values())
    small = with_memory(EVALUATOR, data.draw(st.floats(0.5, 1.1)) * peak)
    num_in_flight = EVALUATOR.estimator(None).in_flight(candidate.assignment, tuple(partition))
    assert num_in_flight == in_flight_microbatches(graph)
    fitted = small.fit(candidate.partitioned(tuple(partition)), num_in_flight)
    if not isinstance(fitted, Candidate):
        assert fitted.need_gib is not None
        assert fitted.need_gib * 2**30 > small.memory_bytes
        return
    assert fitted.fit is not None
    graph = fitted.fit.graph
    program = build_program(graph)
    for stage in graph.stages:
        peaks = peak_in_flight_by_stage(graph, program.actions[stage.tp_groups[0][0]])
        assert peaks[stage.id] <= num_in_flight[stage.id]
    assert max(memory.total for memory in layer_costs.memory(graph).values()) <= small.memory_bytes
    for unit in layer_costs.shape.units:
        layers = [stage.layers for stage in fitted.layout.units[unit.name].stages]
        assert (layers[0][0], layers[-1][1]) == (0, len(unit.layers))
        assert all(a[1] == b[0] for a, b in pairwise(layers))


@given(st.data())
def test_every_plan_is_accepted_and_fits(data: st.DataObject) -> None:
    holds(data)


@pytest.mark.slow
@given(st.data())
def test_a_thousand_plans_are_accepted_and_fit(data: st.DataObject) -> None:
    holds(data)
