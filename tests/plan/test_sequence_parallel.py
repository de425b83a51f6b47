"""Sequence parallelism as a choice: on where it costs no time, and where nothing fits without it."""

from dataclasses import replace
from typing import Any

import pytest

from mmtrain.costs import machine_for
from mmtrain.errors import PlanError
from mmtrain.plan import Plan
from mmtrain.plan.estimate.evaluate import evaluate_layout, model_timing
from mmtrain.plan.estimate.layer_costs import batch_split_of
from mmtrain.plan.estimate.step_time_estimator import StepTimeEstimator
from mmtrain.plan.planner import plan
from mmtrain.plan.search.layer_partition import anchor_layout, layer_chains, layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import mesh_assignments
from mmtrain.plan.search.sequence_parallel import SequenceParallelSetting, with_sequence_parallelism
from mmtrain.program.ir.actions import Send
from mmtrain.program.ir.graph import Microbatch
from tests.plan.exhaustive import least_step, random_instance, squeezed
from tests.plan.factory import layer_costs_for, lengths, recipe
from tests.plan.test_search import holds

WIDE: dict[str, Any] = {"hidden": 4096, "heads": 32, "ffn": 16384}


def planned(sp: object, hardware: str = "cpu-core", memory_gib: float | None = None) -> Plan:
    parallel = {
        "placement": "unified",
        "vision": {"sp": sp, "recompute": "none"},
        "llm": {"tp": 2, "dp": 1, "sp": sp, "recompute": "none"},
    }
    settings = recipe(parallel=parallel, cluster={"memory_gib": memory_gib})
    return plan(settings, lengths(), world_size=2, hardware=hardware, recipe_sha256="f" * 64)


def test_it_is_left_off_where_it_takes_time() -> None:
    assert not any(unit.sp for unit in planned("auto").units.values())
    assert planned("auto").predicted == planned(False).predicted


def test_it_is_on_where_memory_demands_it() -> None:
    """A processor core exchanges small messages slowly; what does not fit otherwise is run that way nevertheless."""
    without, sliced = (max(planned(sp).predicted.peak_memory_gib.values()) for sp in (False, True))
    limit = (without + sliced) / 2
    assert all(unit.sp for unit in planned("auto", memory_gib=limit).units.values())
    with pytest.raises(PlanError, match=r"makes room: .*parallel\.vision\.sp: true and parallel\.llm\.sp: true"):
        planned(False, memory_gib=limit)
    with pytest.raises(PlanError) as error:  # it has been tried
        planned("auto", memory_gib=sliced / 2)
    assert "sp: true" not in str(error.value)


def test_it_is_on_where_it_costs_no_time_and_never_takes_more_memory() -> None:
    settings = recipe(llm=WIDE, seq_len=4096, global_batch=2)
    layer_costs, choices = layer_costs_for(settings, "h100-80g")
    asked: dict[str, SequenceParallelSetting] = dict.fromkeys(choices, "auto")
    found = with_sequence_parallelism(layer_costs, asked, choices, machine_for(settings, "h100-80g"))
    assert found.has_sp("llm", 2)
    assert not found.has_sp("llm", 1)
    for assignment in mesh_assignments(choices, 4):
        layout = anchor_layout(assignment, layer_costs, choices)
        if layout is None:
            continue
        graph = layout_graph(layout, layer_costs)
        off, on = layer_costs.memory(graph), found.memory(graph)
        tp = assignment.meshes["llm"].tp
        for rank in on:
            assert on[rank].total <= off[rank].total
        if found.has_sp("llm", tp):
            assert sum(m.activations for m in on.values()) < sum(m.activations for m in off.values())


def test_what_the_recipe_says_holds() -> None:
    settings = recipe()
    layer_costs, choices = layer_costs_for(settings)
    machine = machine_for(settings, "cpu-core")
    found = with_sequence_parallelism(layer_costs, {"vision": True, "llm": False}, choices, machine)
    assert [found.has_sp("vision", tp) for tp in (1, 2, 4)] == [False, True, True]
    assert not found.sp["llm"]
    assert not with_sequence_parallelism(
        layer_costs, {"vision": True, "llm": False}, choices, machine, at_any_price=True
    ).sp["llm"]


@pytest.mark.parametrize("seed", [100, 103])
def test_the_best_of_all_that_fit_is_found_with_slices(seed: int) -> None:
    """Against everything simulated, where memory decides."""
    given = random_instance(seed, most_cuts=60)
    everywhere = {name: frozenset(unit.tp) - {1} for name, unit in given.choices.items()}
    sliced = squeezed(replace(given, layer_costs=replace(given.layer_costs, sp=everywhere, _lines={})), 0.7)
    holds(sliced, least_step(sliced))


def test_each_rank_sends_its_own_rows_to_the_next_stage() -> None:
    settings = recipe(parallel={"placement": "unified"})
    layer_costs, choices = layer_costs_for(settings)
    machine = machine_for(settings, "cpu-core")
    sliced = with_sequence_parallelism(layer_costs, {"vision": False, "llm": True}, choices, machine)
    assignment = next(
        s
        for s in mesh_assignments(choices, 4)
        if (s.meshes["llm"].tp, s.meshes["llm"].pp, s.meshes["llm"].vpp) == (2, 2, 1)
    )
    bytes_sent = []
    for one in (layer_costs, sliced):
        layout = anchor_layout(assignment, one, choices)
        assert layout is not None
        assert layout.units["llm"].sp == one.has_sp("llm", 2)
        graph = layout_graph(layout, one)
        loads = one.loads(batch_split_of(graph))[0]
        timing = model_timing(graph, one, loads, machine)
        llm = [e for e in graph.edges if e.src.unit == e.dst.unit == "llm"]
        mb = Microbatch("llm", 0, 0)
        sends = [Send(e, mb, mb, graph.tp_group(e.dst, 0)[0], "activation") for e in llm]
        bytes_sent.append([timing.message(graph.tp_group(s.edge.src, 0)[0], s).nbytes for s in sends])
        (chain,) = layer_chains(assignment, one, choices)
        assert chain.anchor is not None
        rating = StepTimeEstimator(one, machine, None).estimate(assignment, (chain,), [(chain.anchor,)], [None])[0]
        judged = evaluate_layout(partitioned_layout(assignment, one, (chain.anchor,)), one, machine)
        assert judged.step_time_s * (1 - 0.05) <= rating <= judged.step_time_s * (1 + 1e-9)
    tokens, width = loads.loads[mb].tokens, 4 * layer_costs.shape.unit("llm").layers[0].out
    assert bytes_sent[0] == [tokens * width] * len(llm)
    assert bytes_sent[1] == [-(-tokens // 2) * width] * len(llm)
    assert llm
