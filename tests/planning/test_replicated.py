"""The replicated placement: what a pass of sharded units takes, how steps are dispatched, and when it is chosen."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, ItemLengths, SampleLengths
from mmtrain.costs import CostTable, num_trained_parameters
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.sharded_layers import overlapped_seconds
from mmtrain.data import GroupStream, build_index
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.advise.finish import stage_balance
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.graph_memory import MemoryPhase, memory_phases, schedule_in_flight
from mmtrain.planning.artifact.plan import AS_FAST_RATIO, Plan
from mmtrain.planning.artifact.plan_change import plan_layout
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import model_timing, simulate_first_batch
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.planner import plan
from mmtrain.planning.search import replicated
from mmtrain.planning.search.replicated import ReplicatedStrategy, shard_sizes
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate, MeshAssignment
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program import Backward, Forward, Microbatch, StageId, build_program, simulate
from mmtrain.recipe import Recipe
from tests.planning import factory
from tests.plans import plan_recipe


@given(st.lists(st.tuples(*[st.floats(0, 9)] * 3), min_size=1, max_size=6), st.floats(0, 1))
def test_overlapped_layers_follow_their_dependencies(layers: list[tuple[float, float, float]], slowdown: float) -> None:
    compute, gathers, reductions = (list(column) for column in zip(*layers, strict=True))
    # Event by event: one compute stream, one communication stream, and a barrier where layers change.
    clock = gathers[0]
    for i, seconds in enumerate(compute):
        comm = clock
        if i + 1 < len(compute):
            comm += gathers[i + 1]
        if i > 0:
            comm += reductions[i - 1]
        clock = max(clock + seconds + slowdown * min(seconds, comm - clock), comm)
    elapsed = overlapped_seconds(np.array(compute), np.array(gathers), np.array(reductions), slowdown)
    assert elapsed == pytest.approx(clock + reductions[-1])


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "sizes"),
    [
        (16, 8, [1, 2, 4, 8, 16]),
        (12, 8, [1, 2, 4, 12]),
        (64, 72, [1, 2, 4, 8, 16, 32, 64]),  # fewer than an NVL72 has: any divisor stays inside
        (144, 72, [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72, 144]),
        (1, 8, [1]),
    ],
)
def test_shards_lie_inside_a_node_or_on_whole_ones(num_ranks: int, per_node: int, sizes: list[int]) -> None:
    assert list(shard_sizes(num_ranks, per_node)) == sizes
    for size in sizes:
        groups = [range(first, first + size) for first in range(0, num_ranks, size)]
        on_nodes = {len({rank // per_node for rank in group}) for group in groups}
        assert on_nodes == {1} or size % per_node == 0 or size == num_ranks


def test_a_plan_of_the_placement_is_proved_and_says_its_shards() -> None:
    settings = factory.recipe(parallel={"placement": "replicated", "shard": 2})
    chosen = plan_recipe(settings, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    assert chosen.placement == "replicated"
    assert {unit.shard for unit in chosen.units.values()} == {2}
    whole = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"shard": "all"})})
    sharded = plan_recipe(whole, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    kinds = [next(iter(p.predicted.memory_kinds_gib.values()))["optimizer"] for p in (chosen, sharded)]
    assert kinds[0] == pytest.approx(2 * kinds[1], abs=2e-4)


def test_tensor_parallelism_is_planned_inside_of_shards() -> None:
    """Eight ranks in four TP groups: each holds an eighth of what TP splits, and gathers half of every layer."""
    plans = {}
    for tp in (1, 2):
        parallel = {"placement": "replicated", "shard": "all", "dispatch": "none", "schedule": "1f1b"}
        settings = factory.recipe(parallel=parallel | {"llm": {"tp": tp}}, global_batch=8)
        plans[tp] = plan_recipe(settings, factory.lengths(), world_size=8, hardware="h100-80g", recipe_sha256="x")
    split, whole = plans[2], plans[1]
    assert {(unit.tp, unit.dp, unit.shard) for unit in split.units.values()} == {(2, 4, 4)}
    assert plan_layout(split).summary == "replicated: 8 ranks, tp 2, shard 4, 2 mini-batches, dispatch none"
    kinds = {tp: next(iter(chosen.predicted.memory_kinds_gib.values())) for tp, chosen in plans.items()}
    layers = [layer for unit in build_model_shape(settings).units for layer in unit.layers]
    of_two, of_one = (sum(num_trained_parameters(layer, tp) for layer in layers) for tp in (2, 1))
    assert of_one / 2 < of_two < 0.6 * of_one
    assert kinds[1]["optimizer"] * GIB == pytest.approx(12 * of_one / 8, abs=1e-4 * GIB)
    assert kinds[2]["optimizer"] * GIB == pytest.approx(12 * of_two / 4, abs=1e-4 * GIB)
    assert split.predicted.bubbles["tp_layers"] > 0
    assert whole.predicted.bubbles["tp_layers"] == 0


def test_context_parallelism_is_planned_inside_of_shards() -> None:
    """State is shared by all ranks as without it, and activations of a microbatch are divided."""
    held, cp_exchange_s = {}, {}
    for cp in (1, 2):
        parallel = {"placement": "replicated", "shard": "all", "dispatch": "none", "schedule": "1f1b"}
        settings = factory.recipe(parallel=parallel | {"llm": {"tp": 1, "cp": cp}}, global_batch=8)
        chosen = plan_recipe(settings, factory.lengths(), world_size=8, hardware="h100-80g", recipe_sha256="x")
        assert (chosen.units["llm"].cp, chosen.units["llm"].dp, chosen.units["vision"].dp) == (cp, 8 // cp, 8)
        assert {unit.shard for unit in chosen.units.values()} == {8}
        [held[cp]] = chosen.predicted.memory_kinds_gib.values()
        problem = formulate_problem(settings, factory.lengths(), world_size=8, hardware="h100-80g", recipe_sha256="x")
        graph, layer_costs = stage_graph(chosen, problem.shape), LayerCosts(problem)
        split = batch_split_of(graph)
        cp_exchange_s[cp] = layer_costs.unit_times("llm", 1, split).mean.sum()
    assert plan_layout(chosen).summary == "replicated: 8 ranks, cp 2, shard 8, 2 mini-batches, dispatch none"
    assert held[1]["optimizer"] == held[2]["optimizer"]
    assert held[2]["activations"] < held[1]["activations"]
    assert cp_exchange_s[2] > cp_exchange_s[1] / 2


def test_expert_parallelism_is_planned_inside_of_shards() -> None:
    """Of many large experts and few tokens, gathering all takes longer than bringing tokens to them."""
    llm = {"hidden": 1024, "moe": {"experts": 16, "top_k": 2, "ffn": 2048, "dense_blocks": (0,)}}
    chosen, held = {}, {}
    for ep in (None, 1, 4):
        of_llm = {"tp": 1, "ep": ep} if ep else {"tp": 1}
        parallel = {"placement": "replicated", "shard": 4, "dispatch": "none", "schedule": "1f1b", "llm": of_llm}
        settings = factory.recipe(llm=llm, parallel=parallel, global_batch=8)
        chosen[ep] = plan_recipe(settings, factory.lengths(), world_size=8, hardware="h100-80g", recipe_sha256="x")
        [held[ep]] = chosen[ep].predicted.memory_kinds_gib.values()
    assert plan_layout(chosen[4]).summary == "replicated: 8 ranks, ep 4, shard 4, 1 mini-batch, dispatch none"
    assert held[4]["optimizer"] == pytest.approx(held[1]["optimizer"], abs=2e-4), "copies on four ranks either way"
    assert held[4]["buffers"] < held[1]["buffers"], "a rank gathers a quarter of the experts"
    assert chosen[4].predicted.step_time_s < chosen[1].predicted.step_time_s
    assert chosen[None].predicted.experts is not None
    assert chosen[None].predicted.experts.steps_s.keys() == {1, 2, 4, 8}
    fixed = min(plan.predicted.step_time_s for ep, plan in chosen.items() if ep)
    assert chosen[None].predicted.step_time_s <= AS_FAST_RATIO * fixed


def test_open_sizes_of_tp_groups_give_the_fastest_of_the_fixed_ones() -> None:
    """Though larger groups are left out whose compute alone takes longer than the best so far."""
    step_s = {}
    for tp in (None, 1, 2, 4):
        llm = {"tp": tp} if tp else {}
        for hardware, memory_gib in (("h100-80g", 80), ("cpu-core", 0.0135)):
            settings = factory.recipe(
                parallel={"placement": "replicated", "llm": llm}, cluster={"memory_gib": memory_gib}, global_batch=8
            )
            try:
                chosen = plan_recipe(settings, _lopsided(), world_size=8, hardware=hardware, recipe_sha256="x")
            except PlanError:
                continue
            step_s[hardware, tp] = chosen.predicted.step_time_s
    for hardware in ("h100-80g", "cpu-core"):
        fixed = [seconds for (of, tp), seconds in step_s.items() if of == hardware and tp]
        assert step_s[hardware, None] == min(fixed)


def test_a_unit_that_cannot_have_the_tp_of_the_others_is_named() -> None:
    vision = factory.VISION | {"heads": 1}
    settings = factory.recipe(parallel={"placement": "replicated", "llm": {"tp": 2}}, vision=vision)
    with pytest.raises(PlanError, match=r"with one tp for all units, pp 1, and a dp x cp of 4 / tp \(vision: tp 1;"):
        plan_recipe(settings, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")


def test_without_a_mesh_of_the_placement_the_plan_is_refused() -> None:
    settings = factory.recipe(parallel={"placement": "replicated"})
    with pytest.raises(PlanError, match=r"replicated: every unit runs on all 3 ranks with one tp for all units"):
        plan_recipe(settings, factory.lengths(), world_size=3, hardware="cpu-core", recipe_sha256="x")
    three = factory.recipe(parallel={"placement": "replicated", "shard": 3})
    with pytest.raises(PlanError, match=r"parallel.shard 3 does not divide 4 ranks"):
        plan_recipe(three, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    tight = factory.recipe(parallel={"placement": "replicated", "llm": {"tp": 1}}, cluster={"memory_gib": 0.004})
    with pytest.raises(
        PlanError,
        match=r"replicated: 4 ranks, shard 4, 2 mini-batches, dispatch all, encoders first in 2: does not fit with",
    ):
        plan_recipe(tight, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")


@pytest.mark.parametrize("shard", ["all", "auto", 1])
def test_a_model_that_fits_on_no_rank_however_sharded_is_refused_with_the_memory_that_it_needs(
    shard: str | int,
) -> None:
    """The LLM alone is too large; what it needs is named, and a run with as much is planned."""
    settings = {"placement": "replicated", "shard": shard, "llm": {"tp": 1}}

    def planned(memory_gib: float) -> Plan:
        asked = factory.recipe(parallel=settings, cluster={"memory_gib": memory_gib})
        return plan_recipe(asked, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")

    with pytest.raises(PlanError) as refused:
        planned(0.004)
    message = str(refused.value)
    least = 1 if shard == 1 else 4
    assert f"replicated: 4 ranks, shard {least}," in message
    assert "does not fit with all layers recomputed that may be: rank 0 needs" in message
    needed = re.search(r"ranks with ([0-9.]+) GiB", message)
    assert needed is not None
    assert planned(float(needed[1])).shard == least


def test_auto_chooses_it_where_it_is_predicted_to_be_the_fastest() -> None:
    """Many images in few samples: elsewhere the rank that has such a sample keeps the others waiting."""
    in_few_samples = {"lengths": _lopsided(), "world_size": 4, "hardware": "cpu-core", "recipe_sha256": "x"}
    chosen = plan_recipe(factory.recipe(), **in_few_samples)
    assert (chosen.placement, chosen.dispatch) == ("replicated", "all")
    sharded, whole = (
        plan_recipe(factory.recipe(parallel={"placement": "replicated", "zero": zero}), **in_few_samples)
        for zero in (3, 1)
    )
    assert chosen.units == whole.units, "copies around shards cost such small layers more than the rest of a step"
    assert whole.predicted.step_time_s * AS_FAST_RATIO < sharded.predicted.step_time_s
    assert chosen.predicted.step_time_s == whole.predicted.step_time_s
    others = {other.placement: other for other in reversed(chosen.alternatives) if other.placement != "replicated"}
    assert set(others) == {"unified", "disaggregated", "colocated"}
    assert all(other.step_time_s > chosen.predicted.step_time_s for other in others.values() if other.step_time_s)
    forced = plan_recipe(factory.recipe(parallel={"placement": "unified"}), **in_few_samples)
    assert forced.predicted.step_time_s == others["unified"].step_time_s
    assert not [other for other in forced.alternatives if other.placement == "replicated"]


@pytest.mark.slow
def test_auto_shows_it_where_another_placement_is_the_fastest() -> None:
    chosen = plan_recipe(factory.recipe(), factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    shown = next(other for other in chosen.alternatives if other.placement == "replicated")
    assert chosen.placement != "replicated"
    assert shown.step_time_s is not None
    assert shown.step_time_s > chosen.predicted.step_time_s
    assert shown.balance is not None


def test_auto_leaves_it_out_on_one_rank(tmp_path: Path) -> None:
    generates = factory.with_generator(factory.recipe(), tmp_path / "lengths.csv", factory.UNET)
    for settings, num_ranks, has_it in (
        (factory.recipe(), 1, False),
        (factory.recipe(), 2, True),
        (generates, 1, False),
        (generates, 2, True),
    ):
        samples = build_index(settings).lengths if settings.model.generator else factory.lengths()
        problem = formulate_problem(settings, samples, world_size=num_ranks, hardware="cpu-core", recipe_sha256="x")
        assert ("replicated" in problem.constraints.placements) == has_it


def test_images_to_draw_are_dispatched_and_balanced(tmp_path: Path) -> None:
    """Half of the samples draw one image or two, so without dispatch most of them wait for the rank that draws most."""
    phases, dispatch_s = {}, {}
    for dispatch in ("llm", "all"):
        parallel = {"placement": "replicated", "dispatch": dispatch, "shard": 4}
        settings = factory.with_generator(factory.recipe(parallel=parallel), tmp_path / "lengths.csv", factory.UNET)
        data = settings.data.model_copy(update={"grouping": "random"})  # `matched` makes groups even already
        settings = settings.model_copy(update={"data": data})
        samples = build_index(settings).lengths
        chosen = plan_recipe(settings, samples, world_size=4, hardware="cpu-core", recipe_sha256="x")
        assert chosen.dispatch == dispatch
        balance = chosen.predicted.balance
        assert balance is not None
        assert balance.phases is not None
        phases[dispatch], dispatch_s[dispatch] = balance.phases["generator"], balance.dispatch_s
    assert phases["all"].over_mean[1] < phases["llm"].over_mean[1]
    assert dispatch_s["llm"] == 0
    assert dispatch_s["all"] > 0


def test_where_it_cannot_fit_the_line_says_what_the_least_needs() -> None:
    settings = factory.recipe(vision=None, cluster={"memory_gib": 0.0115})
    chosen = plan_recipe(settings, factory.text_lengths(), world_size=2, hardware="cpu-core", recipe_sha256="x")
    shown = next(other for other in chosen.alternatives if other.placement == "replicated")
    assert shown.step_time_s is None
    assert shown.summary == "replicated: 2 ranks, tp 2, shard 1, 8 mini-batches, dispatch llm"
    assert "does not fit" in shown.reason


def _lopsided() -> SampleLengths:
    """Return texts, and every tenth sample with eight images in place of most of its words."""
    num_images = np.where(np.arange(400) % 10 == 0, 8, 0)
    tokens = np.full(400, 180, dtype=np.int64)
    items = np.full(int(num_images.sum()), 16, dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(num_images)])
    return SampleLengths(tokens, tokens // 2, {"vision": ItemLengths(first, items, items, items**2, items)})


def test_the_planner_dispatches_where_items_are_in_few_samples() -> None:
    """And a dispatched step is predicted faster than one that is not."""
    plans = {
        mode: plan_recipe(
            factory.recipe(parallel={"placement": "replicated", "shard": "all", "dispatch": mode}, global_batch=8),
            _lopsided(),
            world_size=4,
            hardware="h100-80g",
            recipe_sha256="x",
        )
        for mode in ("auto", "all", "llm", "none")
    }
    assert {mode: chosen.dispatch for mode, chosen in plans.items()} == {
        "auto": "all",
        "all": "all",
        "llm": "llm",
        "none": "none",
    }
    step_s = {mode: chosen.predicted.step_time_s for mode, chosen in plans.items()}
    assert step_s["auto"] == step_s["all"] < min(step_s["llm"], step_s["none"])
    assert plans["all"].predicted.bubbles["dispatch"] > 0
    assert plans["llm"].predicted.bubbles["dispatch"] == 0
    phases = {mode: chosen.predicted.balance.phases for mode, chosen in plans.items() if chosen.predicted.balance}
    for mode in ("all", "llm", "none"):
        of_mode = phases[mode]
        assert of_mode is not None
        assert of_mode["vision"].max_before == phases["none"]["vision"].max_before > 2 * of_mode["vision"].mean
    assert all(load.max_after == load.max_before for load in phases["none"].values())
    assert phases["all"]["vision"].max_after < 1.1 * phases["all"]["vision"].mean < phases["llm"]["vision"].max_after
    balance = plans["all"].predicted.balance
    assert balance.dispatch_s == plans["all"].predicted.bubbles["dispatch"] * step_s["all"]
    assert any(other.balance is not None and other.balance.phases for other in plans["auto"].alternatives)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "encoder_first"])
@pytest.mark.parametrize("dispatch", ["all", "llm", "none"])
def test_one_rank_stands_for_all_in_the_simulation(dispatch: str, schedule: str, tp: int, cp: int) -> None:
    """All run every pass together, for as long as the slowest of them takes."""
    parallel = {"placement": "replicated", "shard": 8, "dispatch": dispatch, "schedule": schedule}
    parallel["llm"] = {"tp": tp, "cp": cp}
    settings = factory.recipe(parallel=parallel, global_batch=32)
    problem = formulate_problem(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    evaluator = Evaluator(problem)
    [candidate] = ReplicatedStrategy().search(evaluator, None).results.candidates
    graph, layer_costs = candidate.graph, evaluator.layer_costs
    loads = layer_costs.loads.of_step(batch_split_of(graph), 0)
    timing = model_timing(graph, layer_costs, loads, problem.hardware)
    assert candidate.schedule.kind == schedule
    program = build_program(graph, kind=candidate.schedule.kind)
    of_all_ranks = simulate(program, timing, graph.num_groups, timing.waits)
    assert len(of_all_ranks.bubbles) == 16
    first_batch_s = simulate_first_batch(graph, candidate.schedule, layer_costs, problem.hardware).step_time_s
    assert first_batch_s == pytest.approx(of_all_ranks.step_time_s, rel=1e-3)


@pytest.mark.parametrize(("exchange", "tp"), [("all_to_all", 1), ("all_to_all", 2), ("all_gather", 1)])
def test_features_between_nodes_are_those_of_the_routes(exchange: str, tp: int) -> None:
    """Two nodes of eight: count the rows of every route whose replicas lie apart, on each rank of their TP groups."""
    volumes = {}
    for node_wise in (True, False):
        parallel = {"placement": "replicated", "shard": 8, "dispatch": "all", "schedule": "1f1b", "llm": {"tp": tp}}
        settings = factory.recipe(parallel={**parallel, "exchange": exchange, "node_wise": node_wise}, global_batch=32)
        problem = formulate_problem(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
        evaluator = Evaluator(problem)
        [candidate] = ReplicatedStrategy().search(evaluator, None).results.candidates
        off_node = stage_balance(candidate, evaluator).off_node
        if exchange == "all_gather":
            assert off_node == {}
            continue
        expected = []
        for loads in factory.loads_of_steps(evaluator.layer_costs, batch_split_of(candidate.graph)):
            source, _, destination, _, rows = loads.routes["vision", "llm"].pairs.T
            expected.append(tp * int(rows[source * tp // 8 != destination * tp // 8].sum()))
        row_bytes = problem.shape.edge("vision", "llm").width * ELEMENT_BYTES[problem.precision]
        volumes[node_wise] = off_node["vision"]
        assert volumes[node_wise].total == pytest.approx(np.mean(expected) * row_bytes)
        assert 0 < volumes[node_wise].fullest < volumes[node_wise].total
    if volumes:
        assert volumes[True].total <= volumes[False].total
        assert volumes[True].fullest < volumes[False].fullest or tp > 1  # few groups on a node are even anyhow


def _dispatch_seconds(chosen: Plan) -> float:
    return chosen.predicted.bubbles["dispatch"] * chosen.predicted.step_time_s


def test_a_measured_all_to_all_prices_dispatches_and_messages_do_without_one(tmp_path: Path) -> None:
    """The second table's all-to-all takes ten times as long as messages of as many bytes; the first has none."""
    dispatch_s = []
    sources = []
    message = {"kind": "p2p", "size": 2, "nbytes": (1000, 10**6), "seconds": (1e-2, 10.0)}
    exchange = {"kind": "all_to_all", "size": 4, "nbytes": (1333, 4 * 10**6 // 3), "seconds": (0.1, 100.0)}
    for number, messages in enumerate(((message,), (message, exchange))):
        table = CostTable.model_validate(
            {"hardware": "h100-80g", "device": "NVIDIA H100", "precision": "bf16", "software": {}, "date": "2026-11-24",
             "messages": messages}
        )  # fmt: skip
        table.save(tmp_path / f"{number}.json")
        parallel = {"placement": "replicated", "shard": "all", "dispatch": "all", "schedule": "1f1b", "llm": {"tp": 1}}
        settings = factory.recipe(parallel=parallel, cluster={"costs": tmp_path / f"{number}.json"}, global_batch=8)
        chosen = plan_recipe(settings, _lopsided(), world_size=4, hardware="h100-80g", recipe_sha256="x")
        dispatch_s.append(_dispatch_seconds(chosen))
        sources.append(chosen.predicted.cost_source)
    assert dispatch_s[1] == pytest.approx(10 * dispatch_s[0], rel=0.05)
    assert "all-to-alls of 4 ranks, which the table lacks, by messages between two ranks" in sources[0]
    assert "all-to-all" not in sources[1]


def test_an_all_gather_is_predicted_to_take_longer_than_an_all_to_all() -> None:
    seconds = []
    for exchange in ("all_to_all", "all_gather"):
        parallel = {"placement": "replicated", "shard": 8, "dispatch": "all", "exchange": exchange}
        chosen = plan_recipe(
            factory.recipe(parallel=parallel, global_batch=8),
            _lopsided(),
            world_size=8,
            hardware="h100-80g",
            recipe_sha256="x",
        )
        assert {unit.exchange for unit in chosen.units.values()} == {exchange}
        seconds.append(_dispatch_seconds(chosen))
    assert 0 < seconds[0] < seconds[1]


def test_an_all_gather_holds_the_features_of_all_ranks() -> None:
    buffers_gib = {}
    for exchange in ("all_to_all", "all_gather"):
        parallel = {"placement": "replicated", "shard": 8, "dispatch": "all", "schedule": "1f1b", "exchange": exchange}
        settings = factory.recipe(parallel=parallel, global_batch=8)
        chosen = plan_recipe(settings, _lopsided(), world_size=8, hardware="h100-80g", recipe_sha256="x")
        [of_ranks] = chosen.predicted.memory_kinds_gib.values()
        buffers_gib[exchange] = of_ranks["buffers"]
    gathered_bytes = 8 * _lopsided().tokens.max() * factory.LLM["hidden"] * ELEMENT_BYTES["bf16"]
    assert buffers_gib["all_gather"] - buffers_gib["all_to_all"] > gathered_bytes / GIB


def test_an_all_gather_holds_what_all_ranks_send_to_the_generator(tmp_path: Path) -> None:
    buffers_gib, samples = {}, None
    for exchange in ("all_to_all", "all_gather"):
        parallel = {"placement": "replicated", "shard": 4, "dispatch": "all", "exchange": exchange}
        settings = factory.with_generator(factory.recipe(parallel=parallel), tmp_path / "lengths.csv", factory.UNET)
        samples = build_index(settings).lengths
        chosen = plan_recipe(settings, samples, world_size=4, hardware="h100-80g", recipe_sha256="x")
        [of_ranks] = chosen.predicted.memory_kinds_gib.values()
        buffers_gib[exchange] = of_ranks["buffers"]
    assert samples is not None
    gathered_bytes = 4 * samples.tokens.max() * factory.LLM["hidden"] * ELEMENT_BYTES["bf16"]
    assert buffers_gib["all_gather"] - buffers_gib["all_to_all"] > gathered_bytes / GIB


def test_a_plan_that_dispatches_nothing_names_no_exchange() -> None:
    parallel = {"placement": "replicated", "exchange": "all_gather"}
    settings = factory.recipe(parallel=parallel, global_batch=8)
    request = PlanRequest(explain=True)
    chosen = plan_recipe(settings, _lopsided(), world_size=4, hardware="h100-80g", recipe_sha256="x", request=request)
    summaries = [other.summary for other in chosen.alternatives]
    assert any("dispatch llm" in summary for summary in summaries)
    assert not any("dispatch llm by" in summary for summary in summaries)
    assert any("dispatch all by all-gather" in summary for summary in (*summaries, plan_layout(chosen).summary))


@pytest.mark.parametrize("node_wise", [True, False])
def test_targets_name_nodes_where_places_depend_on_them(node_wise: bool) -> None:
    settings = factory.recipe(
        parallel={"placement": "replicated", "dispatch": "all", "node_wise": node_wise}, cluster={"ranks_per_node": 2}
    )
    chosen = plan_recipe(settings, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    targets = derive_step_targets(settings, chosen, factory.lengths())
    assert targets.replica_nodes == (dict.fromkeys(("vision", "llm"), (0, 0, 1, 1)) if node_wise else {})
    problem = formulate_problem(
        settings, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x", budget=DEFAULT_BUDGET
    )
    assert problem.batches.ranks_per_node == (2 if node_wise else None)


def test_the_simulator_sees_what_node_wise_places_save() -> None:
    """Eight nodes of two ranks, and features that take longer between nodes than on them."""
    seconds = []
    for node_wise in (True, False):
        parallel = {"placement": "replicated", "shard": 16, "dispatch": "all", "node_wise": node_wise}
        settings = factory.recipe(parallel=parallel, cluster={"ranks_per_node": 2}, global_batch=16)
        chosen = plan_recipe(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
        seconds.append(_dispatch_seconds(chosen))
    assert 0 < seconds[0] < seconds[1]


def test_a_policy_decides_by_which_cost_a_phase_is_balanced() -> None:
    """A plan predicts it as steps do it: packed items are less even where they are balanced as if padded."""
    lengths = _lopsided()
    items = np.random.default_rng(5).integers(4, 60, len(lengths.items["vision"].rows))
    vision = replace(lengths.items["vision"], rows=items, cols=items, tokens=items**2, features=items)
    lengths = replace(lengths, items={"vision": vision})
    predicted, computed = {}, {}
    for policy in ("auto", "packed", "padded"):
        parallel = {"placement": "replicated", "shard": "all", "dispatch": "all", "schedule": "1f1b"}
        settings = factory.recipe(parallel=parallel | {"vision": {"balance_policy": policy}}, global_batch=8)
        chosen = plan_recipe(settings, lengths, world_size=4, hardware="h100-80g", recipe_sha256="x")
        assert chosen.predicted.balance is not None
        assert chosen.predicted.balance.phases is not None
        predicted[policy] = chosen.predicted.step_time_s, chosen.predicted.balance.phases["vision"].over_mean[1]
        targets = derive_step_targets(settings, chosen, lengths)
        assert targets.balance_as_padded == ({} if policy == "auto" else {"vision": policy == "padded"})
        stream = GroupStream(lengths, Grouping.of(settings.data, 8), seed=1)
        dp = {name: unit.dp for name, unit in chosen.units.items()}
        tables = [
            stream.batch(step, 8, dp, chosen.schedule.num_microbatches, targets).items["vision"] for step in range(8)
        ]
        loads = [np.bincount(table.replica + 4 * table.index, table.tokens, 8).reshape(2, 4) for table in tables]
        computed[policy] = float(np.mean([of_step.max(axis=1).sum() for of_step in loads]))
    assert predicted["auto"] == predicted["packed"] < predicted["padded"]
    assert predicted["packed"][1] < predicted["padded"][1]
    assert computed["auto"] == computed["packed"] < computed["padded"]


def _plan_schedule(
    schedule: str,
    encoder: dict[str, Any] = factory.VISION,
    encoder_microbatches: int | None = None,
    memory_gib: float = 80,
    recompute: str = "auto",
) -> Plan:
    parallel = {
        "vision": {"num_microbatches": encoder_microbatches, "recompute": recompute},
        "llm": {"recompute": recompute},
    }
    settings = factory.recipe(
        parallel={"placement": "replicated", "shard": "all", "dispatch": "all", "schedule": schedule, **parallel},
        cluster={"memory_gib": memory_gib},
        vision=encoder,
        global_batch=16,
    )
    return plan_recipe(settings, _lopsided(), world_size=4, hardware="h100-80g", recipe_sha256="x")


def test_encoders_run_first_where_that_is_predicted_to_be_faster() -> None:
    """A frozen encoder runs once either way, and then gathers its weights once, not in each of four mini-batches."""
    frozen = factory.VISION | {"freeze": True}
    plans = {schedule: _plan_schedule(schedule, frozen) for schedule in ("auto", "1f1b", "encoder_first")}
    step_s = {schedule: chosen.predicted.step_time_s for schedule, chosen in plans.items()}
    assert step_s["auto"] == step_s["encoder_first"] < step_s["1f1b"]
    assert plans["auto"].schedule.kind == "encoder_first"
    assert plans["auto"].schedule.num_microbatches == {"vision": 1, "llm": 4}
    assert plans["1f1b"].schedule.num_microbatches == {"vision": 4, "llm": 4}


def test_an_encoder_that_trains_pays_for_a_second_forward() -> None:
    """With as many mini-batches as the LLM nothing makes up for it."""
    plans = {
        schedule: _plan_schedule(schedule, encoder_microbatches=4) for schedule in ("auto", "1f1b", "encoder_first")
    }
    step_s = {schedule: chosen.predicted.step_time_s for schedule, chosen in plans.items()}
    assert step_s["auto"] == step_s["1f1b"] < step_s["encoder_first"]
    assert plans["auto"].schedule.kind == "1f1b"


def test_encoders_first_keep_features_and_no_activations_beside_the_llm() -> None:
    """Where the recipe fixes the mini-batches, memory is that of the larger unit and not of both."""
    held = {}
    for schedule in ("1f1b", "encoder_first"):
        chosen = _plan_schedule(schedule, encoder_microbatches=4)
        [held[schedule]] = chosen.predicted.memory_kinds_gib.values()
    assert held["encoder_first"]["activations"] < held["1f1b"]["activations"]


@pytest.mark.parametrize(("shard", "frozen"), [("all", False), ("all", True), (None, False)])
def test_encoders_first_count_only_the_phase_that_computes(shard: str | None, frozen: bool) -> None:
    """In the LLM's phase an encoder takes state and what it keeps, without gradients where it is sharded."""
    parallel = {"placement": "replicated", "dispatch": "all", "schedule": "encoder_first"}
    parallel |= {"zero": 1} if shard is None else {"shard": shard}
    vision = factory.VISION | {"freeze": frozen}
    settings = factory.recipe(vision=vision, parallel=parallel, global_batch=16)
    problem = formulate_problem(settings, _lopsided(), world_size=4, hardware="h100-80g", recipe_sha256="x")
    chosen = plan(problem)
    shape, layer_costs = build_model_shape(settings), LayerCosts(problem)
    graph = stage_graph(chosen, shape)
    num_in_flight = schedule_in_flight(graph, chosen.schedule)
    phases = memory_phases(graph, num_in_flight)
    assert [{stage.unit for stage in phase.computed} for phase in phases] == [{"llm"}, {"vision"}]
    of_llm, of_vision = (layer_costs.phase_memory(graph, phase)[0] for phase in phases)
    at_once = MemoryPhase(num_in_flight, frozenset(stage.id for stage in graph.stages))
    together = layer_costs.phase_memory(graph, at_once)[0]
    assert min(of_llm.buffers, of_vision.buffers) < max(of_llm.buffers, of_vision.buffers) <= together.buffers
    assert of_llm.activations + of_vision.activations >= together.activations
    assert (max(of_llm.activations, of_vision.activations) < together.activations) == (not frozen)
    num_trained = sum(num_trained_parameters(layer) for layer in shape.unit("vision").layers)
    assert of_vision.gradients == together.gradients
    assert together.gradients - of_llm.gradients == (0 if shard is None else 4 * num_trained / 4)
    assert layer_costs.memory(graph, num_in_flight)[0] == max(of_llm, of_vision, key=lambda memory: memory.total)


@pytest.mark.parametrize(("recompute", "num_microbatches"), [("auto", 1), ("none", 4)])
def test_where_memory_is_short_encoders_first_are_recomputed_or_have_more_mini_batches(
    recompute: str, num_microbatches: int
) -> None:
    """Recomputation takes less time here than gathering weights more often."""
    deep = factory.VISION | {"layers": 12, "hidden": 256, "ffn": 1024}
    roomy = _plan_schedule("encoder_first", deep, recompute=recompute)
    [needed_gib] = roomy.predicted.peak_memory_gib.values()
    tight = _plan_schedule("encoder_first", deep, recompute=recompute, memory_gib=0.95 * needed_gib)
    assert (roomy.schedule.num_microbatches["vision"], roomy.units["vision"].num_recomputed) == (1, 0)
    assert tight.schedule.num_microbatches["vision"] == num_microbatches
    assert (tight.units["vision"].num_recomputed > 0) == (recompute == "auto")


@pytest.mark.parametrize("pad", [False, True])
def test_plans_and_steps_exchange_samples_between_ranks_that_dispatch(pad: bool) -> None:
    """Under any grouping, so that samples stay as random as it has them; a plan predicts it as steps do it."""
    lengths = factory.lengths()
    lengths = replace(lengths, tokens=np.random.default_rng(3).integers(4, 60, len(lengths)))
    llm = {}
    for dispatch in ("none", "llm", "all"):
        parallel = {"placement": "replicated", "shard": "all", "dispatch": dispatch, "schedule": "1f1b"}
        settings = factory.recipe(parallel=parallel, global_batch=8)
        data = settings.data.model_copy(update={"grouping": "random", "pad": pad})
        settings = settings.model_copy(update={"data": data})
        chosen = plan_recipe(settings, lengths, world_size=4, hardware="cpu-core", recipe_sha256="x")
        assert chosen.predicted.balance is not None
        assert chosen.predicted.balance.phases is not None
        predicted = chosen.predicted.balance.phases["llm"].over_mean[1]
        targets = derive_step_targets(settings, chosen, lengths)
        assert (targets.sample_cost is None) == (dispatch == "none")
        stream = GroupStream(lengths, Grouping.of(data, 8), seed=1)
        dp = {name: unit.dp for name, unit in chosen.units.items()}
        batches = [stream.batch(step, 8, dp, chosen.schedule.num_microbatches, targets) for step in range(8)]
        computed = [np.bincount(b.replica + 4 * b.index, b.tokens, 8).reshape(2, 4) for b in batches]
        llm[dispatch] = predicted, np.mean([of_step.max(axis=1) / of_step.mean(axis=1) for of_step in computed])
    for dispatch in ("llm", "all"):
        assert llm[dispatch][0] < llm["none"][0]
        assert llm[dispatch][1] < llm["none"][1]


@pytest.mark.parametrize("schedule", ["1f1b", "encoder_first"])
@pytest.mark.parametrize("dispatch", ["all", "llm"])
def test_whole_weights_are_planned_by_name(dispatch: str, schedule: str) -> None:
    """Every rank holds them, and shares the optimizer's state; passes are its own, and nothing is gathered in them."""
    plans = {}
    for zero in (1, 3):
        parallel = {"placement": "replicated", "dispatch": dispatch, "schedule": schedule, "zero": zero}
        settings = factory.recipe(parallel=parallel, global_batch=32)
        plans[zero] = plan_recipe(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    whole, sharded = plans[1], plans[3]
    assert (whole.placement, whole.shard, whole.dispatch) == ("replicated", None, dispatch)
    assert whole.schedule.kind == sharded.schedule.kind == schedule
    assert plan_layout(whole).summary.startswith("replicated: 16 ranks, zero 1, 2 mini-batches")
    assert (whole.predicted.bubbles["dispatch"] > 0) == (dispatch == "all")
    assert whole.predicted.bubbles["dp_reduce"] > 0  # behind the last backward, and before the next step's forwards
    kinds = next(iter(whole.predicted.memory_kinds_gib.values()))
    trained = num_trained(settings)
    assert kinds["gradients"] * GIB == pytest.approx(4 * trained, abs=1e-4 * GIB)
    assert kinds["optimizer"] * GIB == pytest.approx(12 * trained / 16, abs=1e-4 * GIB)
    assert whole.predicted.balance is not None
    assert whole.predicted.balance.phases is not None
    problem = formulate_problem(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    graph = stage_graph(whole, problem.shape)
    layer_costs = Evaluator(problem).layer_costs
    timings = [
        model_timing(graph, layer_costs, loads, problem.hardware)
        for loads in factory.loads_of_steps(layer_costs, batch_split_of(graph))
    ]
    program = build_program(graph, kind=schedule)
    steps = [simulate(program, timing, graph.num_groups, timing.waits).step_time_s for timing in timings]
    assert whole.predicted.step_time_s == pytest.approx(np.mean(steps), rel=1e-6)


@pytest.mark.parametrize("shard", ["all", 4])
def test_weights_that_stay_whole_through_a_step_are_planned_by_name(shard: str | int) -> None:
    plans = {}
    for zero in (2, 3):
        parallel = {"placement": "replicated", "dispatch": "llm", "schedule": "1f1b", "zero": zero, "shard": shard}
        settings = factory.recipe(parallel=parallel, global_batch=32)
        plans[zero] = plan_recipe(settings, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    kept, sharded = plans[2], plans[3]
    num_shards = 16 if shard == "all" else 4
    assert (kept.shard, kept.keeps_weights, sharded.keeps_weights) == (num_shards, True, False)
    assert plan_layout(kept).summary.startswith(f"replicated: 16 ranks, shard {num_shards} zero 2, 2 mini-batches")
    assert kept.predicted.step_time_s < sharded.predicted.step_time_s
    kinds, kinds_of_sharded = (next(iter(p.predicted.memory_kinds_gib.values())) for p in (kept, sharded))
    trained = num_trained(settings)
    assert kinds["parameters"] * GIB == pytest.approx(2 * trained * (1 + 1 / num_shards), abs=1e-4 * GIB)
    assert kinds["gradients"] * GIB == pytest.approx(4 * trained / num_shards, abs=1e-4 * GIB)
    assert kinds["optimizer"] == kinds_of_sharded["optimizer"]
    assert Plan.model_validate_json(kept.model_dump_json()) == kept
    assert "keeps_weights" not in sharded.model_dump_json()


@pytest.mark.parametrize(
    ("parallel", "tried"),
    [
        ({"placement": "auto"}, {"zero 1", "zero 3"}),  # the fastest has shards of one rank, which gather nothing
        ({"placement": "replicated"}, {"zero 3"}),  # which stands for FSDP
    ],
)
def test_less_is_sharded_only_where_the_placement_is_open(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], tried: set[str]
) -> None:
    """They are tried once, in the place of the fastest, and are left where they are no faster."""
    recipe = factory.recipe(parallel=parallel, global_batch=32)
    problem = formulate_problem(recipe, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    simulated: list[Candidate] = []
    simulate_one = Evaluator.simulate_unless_slow

    def noting(evaluator: Evaluator, candidate: Candidate, max_first_batch_s: float) -> Candidate | None:
        simulated.append(candidate)
        return simulate_one(evaluator, candidate, max_first_batch_s)

    monkeypatch.setattr(Evaluator, "simulate_unless_slow", noting)
    candidates = ReplicatedStrategy().search(Evaluator(problem), None).results.candidates
    kinds = Counter(_sharded(candidate.assignment) for candidate in simulated)
    assert set(kinds) == tried
    assert all(kinds[kind] == 1 for kind in tried - {"zero 3"})
    fully = min(c.step_time_s for c in candidates if _sharded(c.assignment) == "zero 3")
    less = [c.step_time_s for c in candidates if _sharded(c.assignment) != "zero 3"]
    assert all(seconds * AS_FAST_RATIO < fully for seconds in less)


@pytest.mark.parametrize("parallel", [{}, {"llm": {"tp": 2}}])
def test_candidates_that_one_batch_shows_to_be_slow_are_put_off_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    recipe = factory.recipe(parallel={"placement": "replicated", **parallel}, global_batch=32)
    problem = formulate_problem(recipe, _lopsided(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    few = ReplicatedStrategy().search(Evaluator(problem), None).results
    monkeypatch.setattr(replicated, "MAX_FIRST_BATCH_RATIO", math.inf)
    everything = ReplicatedStrategy().search(Evaluator(problem), None).results
    assert few.best is not None
    assert everything.best is not None
    assert few.best.step_time_s == everything.best.step_time_s
    assert few.best.assignment == everything.best.assignment
    assert len(few.candidates) < len(everything.candidates)


def _sharded(assignment: MeshAssignment) -> str:
    if assignment.shard is None:
        return "zero 1"
    return "zero 2" if assignment.keeps_weights else "zero 3"


@pytest.mark.parametrize("schedule", ["1f1b", "encoder_first"])
def test_kept_weights_are_gathered_by_the_first_forward_of_a_step_alone(schedule: str) -> None:
    """By what each pass takes where links are so slow that a gather decides it."""
    seconds = {}
    for zero in (2, 3):
        parallel = {"placement": "replicated", "dispatch": "llm", "schedule": schedule, "zero": zero, "shard": "all"}
        parallel |= {"vision": {"num_microbatches": 2}, "llm": {"tp": 1}}
        cluster = {"intra_node_gb_per_s": 1e-3, "ranks": 4}
        settings = factory.recipe(parallel=parallel, global_batch=8, cluster=cluster)
        problem = formulate_problem(settings, factory.lengths(), world_size=4, hardware="h100-80g", recipe_sha256="x")
        chosen, layer_costs = plan(problem), Evaluator(problem).layer_costs
        graph = stage_graph(chosen, problem.shape)
        loads = layer_costs.loads.of_step(batch_split_of(graph), 0)
        timing = model_timing(graph, layer_costs, loads, problem.hardware)
        for unit in ("vision", "llm"):
            for index in (0, 1):
                mb = Microbatch(unit, 0, index)
                for kind, action in {"F": Forward, "B": Backward}.items():
                    seconds[zero, unit, index, kind] = timing.sharded_pass(action(StageId(unit, 0), mb))
    for unit in ("vision", "llm"):
        gathered = seconds[3, unit, 0, "F"]
        assert seconds[2, unit, 0, "F"] == gathered
        assert seconds[2, unit, 1, "F"] < 0.1 * gathered
        num_gathers = 2 if schedule == "encoder_first" and unit == "vision" else 1  # its forward runs again
        for index in (0, 1):
            saved = seconds[3, unit, index, "B"] - seconds[2, unit, index, "B"]
            # While gradients leave, weights come, one after the other over the same links.
            assert saved == pytest.approx(num_gathers * gathered, rel=0.05)


def num_trained(settings: Recipe) -> int:
    """Return the number of trained parameters of the model."""
    layers = [layer for unit in build_model_shape(settings).units for layer in unit.layers]
    return sum(num_trained_parameters(layer, 1) for layer in layers)
