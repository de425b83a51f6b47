"""Random plans of every placement, chunked, merged, recomputed: the checker accepts each, and memory holds."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs import machine_for
from mmtrain.plan.estimate.memory_fit import FittedLayout, fit_memory
from mmtrain.plan.estimate.step_time_estimator import StepTimeEstimator
from mmtrain.plan.search.layer_partition import layer_chains, layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import mesh_assignments
from mmtrain.program import build_program, peak_in_flight_by_stage
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.plan.factory import layer_costs_for, recipe

SETTINGS = recipe(llm={"layers": 6}, global_batch=8)
PRICING, CHOICES = layer_costs_for(SETTINGS)
MACHINE = machine_for(SETTINGS, "cpu-core")
SIZINGS = [s for world_size in (1, 2, 3, 4, 6) for s in mesh_assignments(CHOICES, world_size)]
RATER = StepTimeEstimator(PRICING, MACHINE, None)


def holds(data: st.DataObject) -> None:
    assignment = data.draw(st.sampled_from(SIZINGS))
    cuts = []
    for chain in layer_chains(assignment, PRICING, CHOICES):
        length = len(chain.costs.seconds)
        inner = st.lists(
            st.integers(1, length - 1), min_size=chain.num_chunks - 1, max_size=chain.num_chunks - 1, unique=True
        )
        cuts.append((0, *sorted(data.draw(inner)), length))
    free = layout_graph(partitioned_layout(assignment, PRICING, tuple(cuts)), PRICING)
    peak = max(memory.total for memory in PRICING.memory(free).values())
    small = replace(MACHINE, memory_bytes=data.draw(st.floats(0.5, 1.1)) * peak)
    alive = RATER.in_flight(assignment, tuple(cuts))
    assert alive == in_flight_microbatches(free)
    found = fit_memory(assignment, PRICING, tuple(cuts), small, alive)
    if not isinstance(found, FittedLayout):
        assert found.need_gib * 2**30 > small.memory_bytes
        return
    program = build_program(found.graph)
    for stage in found.graph.stages:
        assert peak_in_flight_by_stage(found.graph, program.actions[stage.tp_groups[0][0]])[stage.id] <= alive[stage.id]
    assert max(memory.total for memory in PRICING.memory(found.graph).values()) <= small.memory_bytes
    for unit in PRICING.shape.units:
        layers = [s.layers for s in found.layout.units[unit.name].stages]
        assert (layers[0][0], layers[-1][1]) == (0, len(unit.layers))
        assert all(a[1] == b[0] for a, b in pairwise(layers))


@given(st.data())
def test_every_plan_is_accepted_and_fits(data: st.DataObject) -> None:
    holds(data)


@pytest.mark.slow
@given(st.data())
def test_a_thousand_plans_are_accepted_and_fit(data: st.DataObject) -> None:
    holds(data)
