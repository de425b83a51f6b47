"""Sequence parallelism is chosen where it costs no time, and where nothing fits without it."""

from dataclasses import replace
from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import model_timing
from mmtrain.planning.layer_costs.layer_partition import layout_graph, partitioned_layout
from mmtrain.planning.layer_costs.token_splits import choose_sequence_parallelism
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program.ir.actions import Send
from mmtrain.program.ir.graph import Microbatch
from tests.planning.exhaustive import least_step, random_instance, squeezed
from tests.planning.factory import anchor_layout, evaluator_for, lengths, problem_for, recipe, simulated
from tests.planning.test_search import holds
from tests.plans import mesh_assignments, plan_recipe

KEEPING_ALL: dict[str, Any] = {"recompute": "none", "recompute_activation_function": False}


def planned(sp: object, hardware: str = "cpu-core", memory_gib: float | None = None) -> Plan:
    parallel = {
        "placement": "unified",
        "vision": {"sp": sp, **KEEPING_ALL},
        "llm": {"tp": 2, "dp": 1, "sp": sp, **KEEPING_ALL},
    }
    settings = recipe(parallel=parallel, cluster={"memory_gib": memory_gib})
    return plan_recipe(settings, lengths(), world_size=2, hardware=hardware, recipe_sha256="f" * 64)


def test_sequence_parallelism_is_off_where_it_takes_time() -> None:
    assert not any(unit.sp for unit in planned("auto").units.values())
    assert planned("auto").predicted == planned(False).predicted


def test_sequence_parallelism_is_on_where_memory_demands_it() -> None:
    """Choose it on processor cores, which exchange small messages slowly, only where nothing else fits."""
    without, sliced = (max(planned(sp).predicted.peak_memory_gib.values()) for sp in (False, True))
    limit = (without + sliced) / 2
    assert all(unit.sp for unit in planned("auto", memory_gib=limit).units.values())
    with pytest.raises(PlanError, match=r"makes room: .*parallel\.vision\.sp: true and parallel\.llm\.sp: true"):
        planned(False, memory_gib=limit)
    with pytest.raises(PlanError) as error:  # it has been tried
        planned("auto", memory_gib=sliced / 2)
    assert "sp: true" not in str(error.value)


def test_sequence_parallelism_is_on_where_it_costs_no_time_and_never_takes_more_memory() -> None:
    """Norms of 8192 tokens are slow enough to pay for starting twice as many collectives."""
    wider = {"hidden": 8192, "heads": 64, "ffn": 16384}
    problem = problem_for(recipe(llm=wider, seq_len=8192, global_batch=2), "h100-80g")
    without = Evaluator(problem).layer_costs
    chosen = without.with_settings(sp=choose_sequence_parallelism(problem, without))
    assert chosen.has_sp("llm", 4)
    assert not chosen.has_sp("llm", 2), "two ranks gather and scatter at 0.8 of the rate at which they reduce"
    assert not chosen.has_sp("llm", 1)
    for assignment in mesh_assignments(problem.choices, 4):
        layout = anchor_layout(assignment, without, problem.choices)
        if layout is None:
            continue
        graph = layout_graph(layout, without)
        off = without.memory(graph)
        on = chosen.memory(graph)
        for rank in on:
            assert on[rank].total <= off[rank].total
        if chosen.has_sp("llm", assignment.meshes["llm"].tp):
            assert sum(m.activations for m in on.values()) < sum(m.activations for m in off.values())


@pytest.mark.parametrize("at_any_cost", [False, True])
def test_a_setting_of_the_recipe_holds(at_any_cost: bool) -> None:
    problem = problem_for(recipe(parallel={"vision": {"sp": True}, "llm": {"sp": False}}))
    sp = choose_sequence_parallelism(problem, Evaluator(problem).layer_costs, at_any_cost=at_any_cost)
    assert [tp in sp["vision"] for tp in (1, 2, 4)] == [False, True, True]
    assert not sp["llm"]


@pytest.mark.parametrize("seed", [100, 103])
def test_the_search_finds_the_fastest_of_all_plans_that_fit(seed: int) -> None:
    """Search with sequence parallelism, under a limit where memory decides."""
    instance = random_instance(seed, max_partitions=60)
    problem, layer_costs = instance.evaluator.problem, instance.evaluator.layer_costs
    everywhere = {unit: frozenset(choices.tp) - {1} for unit, choices in problem.choices.items()}
    evaluator = Evaluator(problem, layer_costs=layer_costs.with_settings(sp=everywhere))
    tight = squeezed(replace(instance, evaluator=evaluator), 0.7)
    holds(tight, least_step(tight))


def test_each_rank_sends_its_own_rows_to_the_next_stage() -> None:
    plain = evaluator_for(recipe(parallel={"placement": "unified"}))
    problem, without = plain.problem, plain.layer_costs
    with_sp = Evaluator(problem, layer_costs=without.with_settings(sp={"llm": frozenset({2, 4})}))
    assignments = mesh_assignments(problem.choices, 4)
    sizes = (2, 2, 1)
    assignment = next(a for a in assignments if (a.meshes["llm"].tp, a.meshes["llm"].pp, a.meshes["llm"].vpp) == sizes)
    bytes_sent = []
    for evaluator in (plain, with_sp):
        layer_costs = evaluator.layer_costs
        layout = anchor_layout(assignment, layer_costs, problem.choices)
        assert layout is not None
        assert layout.units["llm"].sp == layer_costs.has_sp("llm", 2)
        graph = layout_graph(layout, layer_costs)
        loads = layer_costs.loads.of_step(batch_split_of(graph), 0)
        timing = model_timing(graph, layer_costs, loads, problem.hardware)
        edges = [e for e in graph.edges if e.src.unit == e.dst.unit == "llm"]
        mb = Microbatch("llm", 0, 0)
        sends = [Send(e, mb, mb, graph.tp_group(e.dst, 0)[0], "activation") for e in edges]
        bytes_sent.append([timing.message(graph.tp_group(s.edge.src, 0)[0], s).nbytes for s in sends])
        (chain,) = evaluator.layer_chains(evaluator.enumerated(assignment))
        assert chain.anchor is not None
        [estimate_s] = evaluator.estimator(None).estimate(assignment, (chain,), [(chain.anchor,)], [None])
        step_time_s = simulated(partitioned_layout(assignment, layer_costs, (chain.anchor,)), evaluator).step_time_s
        assert step_time_s * (1 - 0.05) <= estimate_s <= step_time_s * (1 + 1e-9)
    tokens = loads.loads[mb].tokens
    width = 4 * without.shape.unit("llm").layers[0].out
    assert bytes_sent[0] == [tokens * width] * len(edges)
    assert bytes_sent[1] == [-(-tokens // 2) * width] * len(edges)
    assert edges
