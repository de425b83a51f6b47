"""Mixtures of experts compute under any plan what one process does sample by sample."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, preset
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT
from mmtrain.costs.rank_memory import StateBytes, layer_state, rank_memory
from mmtrain.costs.recorded_costs import RecordedRatios, costs_of_table, recorded_table
from mmtrain.models.kernels import grouped_gemm
from mmtrain.models.megatron.experts import ExpertMlp
from mmtrain.models.megatron.router import Router
from mmtrain.models.shapes.model_shape import build_model_shape, with_expert_spread
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.data_dependencies import gradient_buckets, participants
from mmtrain.program.ir.graph import Microbatch, StageId
from mmtrain.recipe import Recipe
from mmtrain.report.metrics_record import ExpertMetrics
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.expert_reduction import ExpertLoadReducer, ratios_at_spread
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import SAMPLES, Mesh, Reference, batch, plan, recipe, step_data
from tests.flow.cells import ADAPTED
from tests.flow.equality import assert_equals_one_process, train_steps
from tests.flow.gather import whole
from tests.flow.orders import PIPELINE, TOGETHER
from tests.flow.test_replicated import BY_ALL_GATHER, SPEECH, ZERO_2, change_plan, replicated
from tests.tiers import mostly_long

ALL = (0, 1, 2, 3, 4)
NO_LOAD = TokenLoad(0, 0, 0, 0)
# Five experts of unequal load; the second of three blocks is dense.
MOE: dict[str, Any] = {
    "model__llm__moe": {"experts": 5, "top_k": 2, "ffn": 16, "dense_blocks": (1,)},
    "model__llm__qk_norm": True,
}
UNNORMALIZED: dict[str, Any] = {"model__llm__moe": {"experts": 3, "top_k": 1, "ffn": 12, "normalize": False}}
# What DeepSeek-V3 and GLM-4.5 do, with losses of the router, and with a gate; the first block is dense.
SHARED: dict[str, Any] = {
    "model__llm__moe": {
        "experts": 6, "top_k": 2, "ffn": 16, "dense_blocks": (0,), "shared_ffn": 20, "shared_gate": True,
        "scores": "sigmoid", "selection_bias": True, "selection_bias_rate": 0.05, "groups": 3, "top_groups": 2,
        "weight_scale": 1.5, "balance_loss": 0.3, "z_loss": 0.02,
    }
}  # fmt: skip
LOSSES: dict[str, Any] = {
    "model__llm__moe": {"experts": 6, "top_k": 2, "ffn": 16, "shared_ffn": 12, "balance_loss": 0.3, "z_loss": 0.02}
}

# name -> (recipe changes, meshes). LLM layers: 0 embedding, 1-3 blocks, 4 head.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "tp2 with slices of tokens, pp2, recomputed": (
        MOE,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True),
            "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True, recompute=(1, 3)),
        },
    ),
    "tp2, router and a block frozen, activations again": (
        UNNORMALIZED | {"train__freeze": ("llm.*router*", "llm.layers.2.*"), "parallel__llm__recompute": "selective"},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2)},
    ),
    "dp2 pp2 vpp2": (MOE, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2)}),
    "one expert trains, tp4 with slices of tokens": (
        MOE | {"train__freeze": ("llm.layers.*.mlp.experts.[1-4].*",), "model__llm__kv_heads": 1},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1, 2, 3), tp=4, sp=True)},
    ),
    "adapters beside experts, dp2": (
        MOE | ADAPTED,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)},
    ),
    "shared sequences": (MOE, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2, split="even")}),
    "shared expert and losses, dp2 pp2 vpp2": (
        SHARED,
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2)},
    ),
    "shared expert and losses, shared sequences": (
        SHARED,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2, split="even")},
    ),
    "shared expert and losses, ring, tp2, activations again": (
        LOSSES | {"parallel__llm__recompute": "selective"},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1, 2, 3), cp=2, tp=2, sp=True, method="ring", split="even")},
    ),
    "shared expert and losses, a router frozen with its bias": (
        SHARED | {"train__freeze": ("llm.layers.2.mlp.router.*", "llm.layers.3.mlp.router.selection.bias")},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))},
    ),
}
ORDERED: dict[str, tuple[dict[str, Any], dict[str, Mesh], dict[int, Any]]] = {
    "in parts, tp2 with slices of tokens, recomputed": (
        MOE,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 2)),
            "llm": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 3)),
        },
        {0: TOGETHER, 1: TOGETHER},
    ),
    "in parts, tp2": (
        UNNORMALIZED,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (0, 1), tp=2)},
        {0: TOGETHER, 1: TOGETHER},
    ),
    "in parts, tp2, shared expert and losses": (
        SHARED,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (0, 1), tp=2)},
        {0: TOGETHER, 1: TOGETHER},
    ),
    "in parts, a pipeline": (MOE, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}, PIPELINE),
}


@pytest.mark.parametrize("case", mostly_long(CASES, every=2))
def test_a_mixture_computes_what_one_process_does(case: str) -> None:
    changes, meshes = CASES[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True)


@pytest.mark.parametrize("case", mostly_long(ORDERED, every=2))
def test_a_mixture_in_pieces_computes_what_one_process_does(case: str) -> None:
    changes, meshes, order = ORDERED[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, "explicit", order, **meshes))


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [(SHARED, ()), (MOE, ALL), pytest.param(SHARED | ADAPTED, (1, 3), marks=pytest.mark.slow)],
)
def test_a_sharded_mixture_computes_what_one_process_does(changes: dict[str, Any], recompute: tuple[int, ...]) -> None:
    settings = recipe(**changes)
    assert_equals_one_process(settings, replicated(settings, 2, 2, recompute, "all"), texts_between=True)


SIX_EXPERTS: dict[str, Any] = {
    "model__llm__moe": {"experts": 6, "top_k": 2, "ffn": 16, "dense_blocks": (1,)},
    "train__optimizer__clip_norm": 0.05,
}
WITH_LOSSES: dict[str, Any] = {
    "model__llm__moe": {**SIX_EXPERTS["model__llm__moe"], "balance_loss": 0.3, "z_loss": 0.02}
}
ALL_BUT_EXPERTS = ("llm.layers.[04].*", "llm.*norm*", "llm.*.linear_qkv*", "llm.*.linear_proj*", "llm.*.mlp.[!e]*")
ONE_EXPERT = SIX_EXPERTS | {"train__freeze": ("vision.*", *ALL_BUT_EXPERTS, "llm.layers.*.mlp.experts.[1-5].*")}
# Replicas that hold the experts of a block together.
EXPERT_PARALLEL: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "ep2": (SIX_EXPERTS, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2, ep=2)}),
    "ep2 of dp4, tp2 with slices of tokens, recomputed": (
        SIX_EXPERTS,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True),
            "llm": Mesh((), tuple(range(8)), tp=2, dp=4, ep=2, sp=True, recompute=(1, 3)),
        },
    ),
    "ep2 pp2 vpp2": (SIX_EXPERTS, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2, ep=2)}),
    "ep3 pp2, experts frozen but one": (
        SIX_EXPERTS | {"train__freeze": ("llm.layers.*.mlp.experts.[1-5].*",), "train__global_batch": 6},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), tuple(range(1, 7)), dp=3, ep=3)},
    ),
    "ep2 of dp2, tp2 with slices of tokens, shared expert and losses, recomputed": (
        SHARED,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True),
            "llm": Mesh((), (0, 1, 2, 3), tp=2, dp=2, ep=2, sp=True, recompute=(1, 3)),
        },
    ),
    "ep2 of cp2": (SIX_EXPERTS, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2, split="even", ep=2)}),
    "ep2 of dp4, tp2, adapters on all": (
        SHARED | ADAPTED,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), tuple(range(8)), tp=2, dp=4, ep=2, recompute=(1,))},
    ),
    "ep4 of dp2 cp2": (
        {"model__llm__moe": {"experts": 4, "top_k": 1, "ffn": 16}},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), cp=2, dp=2, split="even", ep=4)},
    ),
    "ep2, tp2 with slices of tokens, adapters on experts": (
        SIX_EXPERTS | {"train__lora": {"rank": 3, "alpha": 9.0, "targets": ("llm.*.experts.*",)}},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), tp=2, dp=2, ep=2, sp=True)},
    ),
    "ep4, adapters on all": (
        {"model__llm__moe": {"experts": 4, "top_k": 1, "ffn": 16}} | ADAPTED,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), dp=4, ep=4)},
    ),
    "ep2, one expert alone trains": (
        ONE_EXPERT,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2, ep=2)},
    ),
    "ep2 pp2, experts alone train": (
        SHARED | {"train__freeze": ("vision.*", *ALL_BUT_EXPERTS), "model__llm__moe__selection_bias_rate": 0.0},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), dp=2, ep=2, recompute=(2,))},
    ),
    "ep2, tp2, experts frozen": (
        SHARED | {"train__freeze": ("llm.*.experts.*", "llm.*.selection.bias")},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), tp=2, dp=2, ep=2)},
    ),
    "ep2, tp2 with slices of tokens, routers alone train": (
        LOSSES | {"train__lora": {"targets": ("llm.layers.3.*.linear_proj",), "also_train": ("llm.*.router.weight",)}},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), tp=2, dp=2, ep=2, sp=True, recompute=(1,))},
    ),
}


@pytest.mark.parametrize("case", mostly_long(EXPERT_PARALLEL, every=2))
def test_ranks_that_share_experts_compute_what_one_process_does(case: str) -> None:
    changes, meshes = EXPERT_PARALLEL[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True)


FOUR_EXPERTS: dict[str, Any] = {
    "model__llm__moe": {"experts": 4, "top_k": 2, "ffn": 16, "dense_blocks": (1,)},
    "train__optimizer__clip_norm": 0.05,
}
# Sharded replicas that hold the experts of a block together: (recipe changes, ranks, shard or None for whole weights,
# ep, what `replicated` takes beside).
SHARDED: dict[str, tuple[dict[str, Any], int, int | None, int, dict[str, Any]]] = {
    "ep2 of 2": (SIX_EXPERTS, 2, 2, 2, {}),
    "ep2 of 4, two copies, tp2 with slices of tokens, shared expert and losses, recomputed": (
        SHARED,
        4,
        1,
        2,
        {"tp": 2, "sp": True, "recompute": (1, 3)},
    ),
    "ep2 of 4, one copy, recomputed, all dispatched": (
        SIX_EXPERTS,
        4,
        4,
        2,
        {"recompute": ALL, "dispatch": "all"},
    ),
    "ep4 of 4, each copy on two ranks, kept weights": (FOUR_EXPERTS | ZERO_2, 4, 2, 4, {}),
    "ep2 of 4, copies on two ranks, encoders first, audio, by all-gather": (
        SIX_EXPERTS | SPEECH | BY_ALL_GATHER,
        4,
        2,
        2,
        {"dispatch": "all", "encoder_first_in": 1},
    ),
    "ep4 of 4, one copy, shared expert and losses": (
        SHARED | {"model__llm__moe": SHARED["model__llm__moe"] | {"experts": 12}},
        4,
        4,
        4,
        {"dispatch": "llm"},
    ),
    "ep2 of 2, experts frozen but one": (
        SIX_EXPERTS | {"train__freeze": ("llm.layers.*.mlp.experts.[1-5].*",)},
        2,
        2,
        2,
        {},
    ),
    "ep2 of 2, adapters": (SIX_EXPERTS | ADAPTED, 2, 2, 2, {"recompute": (1, 3)}),
    "ep2 of dp2 cp2": (SIX_EXPERTS, 4, 4, 2, {"cp": 2, "split": "even"}),
    "ep2 of 4, whole weights": (SIX_EXPERTS, 4, None, 2, {"dispatch": "none"}),
}


@pytest.mark.parametrize("case", mostly_long(SHARDED, every=3))
def test_sharded_ranks_that_share_experts_compute_what_one_process_does(case: str) -> None:
    changes, num_ranks, shard, ep, others = SHARDED[case]
    settings = recipe(**changes)
    layout = replicated(settings, num_ranks, shard, ep=ep, **others)
    assert_equals_one_process(settings, layout, texts_between=True)


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize(("before", "after"), [((4, 2), (2, 1)), ((4, 4), (4, 2)), ((2, 1), (1, 4)), ((4, 2), None)])
def test_sharded_experts_go_over_to_other_degrees(
    before: tuple[int, int], after: tuple[int, int] | None, tmp_path: Path
) -> None:
    """A run goes on with another (shard, ep), or in one pipeline (None), as with those that it had."""
    settings = recipe(**FOUR_EXPERTS)
    first, second = (
        plan(settings, vision=Mesh((), (0, 1, 2, 3), dp=4), llm=Mesh((), (0, 1, 2, 3), tp=2, dp=2, ep=2))
        if sizes is None
        else replicated(settings, 4, sizes[0], ep=sizes[1])
        for sizes in (before, after)
    )
    ranks = run_ranks(4, change_plan, settings, first, second, tmp_path)
    losses, next_losses = (sum(rank[i] for rank in ranks) for i in (0, 1))
    assert next_losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow  # 4 s
def test_selection_biases_are_saved_and_go_over_to_another_plan(tmp_path: Path) -> None:
    settings = recipe(**SHARED)
    first = plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (0, 1), dp=2, ep=2))
    ranks = run_ranks(2, change_plan, settings, first, replicated(settings, 2, 2), tmp_path)
    losses, next_losses = (sum(rank[i] for rank in ranks) for i in (0, 1))
    assert next_losses == pytest.approx(losses, rel=1e-6)
    saved = whole([piece for rank in ranks for piece in rank[2]])
    biases = [saved[f"llm.layers.{block}.mlp.router.selection.bias"] for block in (2, 3)]  # the first block is dense
    rate = settings.model.llm.moe.selection_bias_rate if settings.model.llm.moe else 0.0
    for bias in biases:
        assert bias.dtype == torch.float32
        assert set(bias.sign().tolist()) >= {-1.0, 1.0}, "some experts had more tokens than others"
        assert torch.allclose(bias.abs(), rate * bias.sign().abs())


@pytest.mark.parametrize(
    ("changes", "num_fullest"),
    [
        ({"train__freeze": ("llm.layers.1.mlp.experts.[1-5].*",)}, 2),  # half of the ranks hold no expert that trains
        pytest.param({"train__lora": {"targets": ("llm.*",)}}, 4, marks=pytest.mark.slow),
        pytest.param({"train__freeze": ("llm.*.experts.*",)}, 4, marks=pytest.mark.slow),
    ],
)
def test_costs_count_the_state_of_experts_that_ranks_hold_apart(changes: dict[str, Any], num_fullest: int) -> None:
    settings = recipe(**SIX_EXPERTS | changes)
    layout = plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (1, 2, 3, 4), dp=4, ep=2))
    counted = run_ranks(layout.world_size, _count_of_rank, settings, layout)[1:]
    model = planned_shape(layout, build_model_shape(settings))
    states = [layer_state(layer, 1, 4, StateBytes(1, 1, 1)) for layer in model.unit("llm").layers]
    parameters, gradients, optimizer = map(sum, zip(*states, strict=True))
    assert {count.parameters for count in counted} == {parameters}
    assert max(count.gradients for count in counted) == gradients
    fullest = [count for count in counted if count.gradients == gradients]
    assert len(fullest) == num_fullest
    assert sum(count.optimizer for count in fullest) == pytest.approx(num_fullest * optimizer, rel=0.01)
    of_step = batch(0, SAMPLES, {"vision": 1, "llm": 4}, layout.schedule.num_microbatches)
    timing = plan_timing(settings, layout, of_step)
    reductions = gradient_buckets(timing.graph, 1)
    group = participants(timing.graph, 1, next(iter(reductions)))
    reduced_bytes = sum(timing.collective(1, reduction, group).nbytes for reduction in reductions)
    assert reduced_bytes == BYTES_PER_GRADIENT * gradients


def test_costs_count_the_state_of_experts_that_sharded_ranks_hold_apart() -> None:
    settings = recipe(**FOUR_EXPERTS)
    layout = replicated(settings, 4, 4, ep=2)
    counted = run_ranks(4, _shards_of_rank, settings, layout)
    model = planned_shape(layout, build_model_shape(settings))
    layers = tuple(layer for unit in model.units for layer in unit.layers)
    nothing = (False,) * len(layers)
    held = HeldLayers(layers, nothing, nothing, 1, 4, 0, NO_LOAD, shard=4)
    memory = rank_memory([held], AnalyticCosts(preset("cpu-core"), "fp32"), "fp32", StateBytes(1, 1, 1), tied=False)
    assert sum(counted) == pytest.approx(4 * memory.parameters, rel=0.01)
    assert max(counted) == pytest.approx(memory.parameters, rel=0.1)  # rows of small weights do not divide evenly


def _shards_of_rank(settings: Recipe, layout: Plan) -> int:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    units = build_rank_context(settings, layout, world).units.values()
    parameters = (p for unit in units for stage in unit.stages.values() for p in stage.parameters())
    return sum(p.to_local().numel() for p in parameters)


def test_every_plan_records_the_same_loads_of_experts() -> None:
    settings = recipe(**WITH_LOSSES)
    alone = plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (0,)))
    llm = Mesh((2,), (1, 2, 3, 4, 5, 6, 7, 8), dp=2, tp=2, ep=2, recompute=(1, 3))
    shared = plan(settings, vision=Mesh((), (0,)), llm=llm)
    [expected], loads = (run_ranks(p.world_size, _loads_of_step, settings, p) for p in (alone, shared))
    assert set(expected.max_over_mean) == {"llm.layers.1", "llm.layers.3"}
    assert min(expected.max_over_mean.values()) > 1
    assert expected.fullest_rank == 1
    for of_rank in loads:
        assert of_rank.max_over_mean == pytest.approx(expected.max_over_mean)
        assert of_rank.dead == expected.dead
        assert 1 < of_rank.fullest_rank < 2
        assert of_rank.spread > 0
        assert of_rank.balance_loss == pytest.approx(expected.balance_loss, rel=1e-5)
        assert of_rank.z_loss == pytest.approx(expected.z_loss, rel=1e-5)


def test_recorded_costs_price_unequal_loads_of_experts_once() -> None:
    """Steps recorded with uneven experts are predicted as recorded by the table made of them, at its spread."""
    moe = {"experts": 6, "top_k": 2, "ffn": 4096}  # which take most of the step
    settings = recipe(model__llm__moe=moe, parallel__llm__expert_spread=0.3)
    layout = plan(settings, vision=Mesh((), (0,)), llm=Mesh((2,), (1, 2, 3, 4), dp=2, ep=2))
    of_step = batch(0, SAMPLES, {"vision": 1, "llm": 2}, layout.schedule.num_microbatches)
    timing = plan_timing(settings, layout, of_step)
    machine, uneven = preset("cpu-core"), replace(timing, shape=with_expert_spread(timing.shape, 0.9))
    passes = [kind(StageId("llm", stage), Microbatch("llm", 0, 0)) for kind in (Forward, Backward) for stage in (0, 1)]
    ratio = {
        kind: sum(uneven.compute(run) for run in passes if isinstance(run, kind))
        / sum(timing.compute(run) for run in passes if isinstance(run, kind))
        for kind in (Forward, Backward)
    }
    assert min(ratio.values()) > 1.03
    recorded = RecordedRatios({"llm": ratio[Forward], "vision": 2.0}, {"llm": 3 * ratio[Backward]})
    ratios = ratios_at_spread(recorded, timing, 0.9)
    assert ratios.forward == pytest.approx({"llm": 1.0, "vision": 2.0}, rel=0.02)
    assert ratios.backward == pytest.approx({"llm": 3.0}, rel=0.02)
    table = recorded_table(timing.costs, machine, "fp32", timing.shape, ratios, None, 0.9)
    again = replace(uneven, costs=costs_of_table(table, machine, "fp32"))
    for run in passes:
        scale = 3.0 if isinstance(run, Backward) else 1.0
        assert again.compute(run) == pytest.approx(scale * uneven.compute(run), rel=0.02)
    alone = replace(timing, graph=stage_graph(plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (0,))), timing.shape))
    assert ratios_at_spread(recorded, alone, 0.9) == recorded


@pytest.mark.slow  # 6 s
@pytest.mark.parametrize("changes", [WITH_LOSSES, SHARED])
def test_losses_of_routers_are_those_of_one_process_that_computes_sample_by_sample(changes: dict[str, Any]) -> None:
    settings = recipe(**changes)
    [expected] = run_ranks(1, _router_losses_alone, settings)
    assert expected[0] > 1, "experts are loaded unevenly"
    vision = Mesh((), (0,))
    for layout in (
        plan(settings, vision=vision, llm=Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2, ep=2)),
        plan(settings, vision=vision, llm=Mesh((), (1, 2), cp=2, split="even", ep=2)),
        plan(settings, vision=vision, llm=Mesh((2,), (1, 2, 3, 4), tp=2, sp=True, recompute=(1, 2, 3))),
        replicated(settings, 2, 2, (), "all"),
    ):
        for loads in run_ranks(layout.world_size, _loads_of_step, settings, layout):
            assert (loads.balance_loss, loads.z_loss) == pytest.approx(expected, rel=1e-5), layout.units


def _router_losses_alone(settings: Recipe) -> tuple[float, float]:
    reference = Reference(settings)
    reference.step()
    taken = [module.take_losses() for module in reference.stages["llm"].modules() if isinstance(module, Router)]
    balance, z_loss = torch.stack([losses for losses in taken if losses is not None]).mean(dim=0).tolist()
    return balance, z_loss


def _loads_of_step(settings: Recipe, layout: Plan) -> ExpertMetrics:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, layout, world)
    context.train(step_data(context, 0), 1e-3)
    loads = ExpertLoadReducer(context).reduce()
    assert loads is not None
    return loads


class CountOfRank(NamedTuple):
    """Elements of the LLM that a rank holds."""

    parameters: int
    gradients: int
    optimizer: int


def _count_of_rank(settings: Recipe, layout: Plan) -> CountOfRank:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, layout, world)
    parameters = [p for unit in context.units.values() for stage in unit.stages.values() for p in stage.parameters()]
    stepped = [
        shard.tensor.numel()
        for unit in context.optimizer.units.values()
        for shard in unit.shards()
        if shard.name.endswith("#exp_avg")
    ]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return CountOfRank(sum(p.numel() for p in parameters), trained, sum(stepped))


@pytest.mark.parametrize(
    ("most", "changes"),
    [
        ("rows", SIX_EXPERTS),
        pytest.param("rows", ONE_EXPERT, marks=pytest.mark.slow),
        ("tokens", SIX_EXPERTS),
        pytest.param("rows", SHARED, marks=pytest.mark.slow),
    ],
)
def test_an_expert_with_most_tokens_is_computed_in_chunks(most: str, changes: dict[str, Any]) -> None:
    """Ranks that get more rows than they have room for compute what one process does, whether recomputed or not."""
    settings = recipe(**changes)
    llm = Mesh((), tuple(range(1, 5)), tp=2, dp=2, ep=2, sp=True, recompute=(1,))
    layout = plan(settings, vision=Mesh((), (0,)), llm=llm)
    train = partial(_train_in_chunks, max_rows=5 if most == "rows" else None)
    assert_equals_one_process(settings, layout, texts_between=True, train=train)


def _train_in_chunks(settings: Recipe, layout: Plan, texts_between: bool | range, max_rows: int | None) -> Any:
    """Train steps with little room, which `ExpertMlp` learns when it is built; see `train_steps`."""
    run, numbers = ExpertMlp.num_chunks, []

    def num_chunks(mixture: ExpertMlp, counts: torch.Tensor, max_tokens: int | None) -> int:
        mixture.max_rows = max_rows
        numbers.append(run(mixture, counts, max_tokens if max_rows else max_tokens and 3))
        return numbers[-1]

    with patch.object(ExpertMlp, "num_chunks", num_chunks):
        steps = train_steps(settings, layout, texts_between)
    assert not numbers or max(numbers) > 2
    return steps


def test_experts_by_grouped_gemms_compute_what_one_process_does() -> None:
    """The CPU has the operation too, without being faster by it."""
    settings = recipe(**SIX_EXPERTS)
    layout = plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (1, 2, 3, 4), tp=2, dp=2, ep=2))
    assert_equals_one_process(settings, layout, texts_between=True, train=_train_grouped)


def _train_grouped(settings: Recipe, layout: Plan, texts_between: bool | range) -> Any:
    with (
        patch.object(grouped_gemm, "grouped_gemm_problem", lambda *_: None),
        patch.object(grouped_gemm, "_grouped_mm", wraps=grouped_gemm._grouped_mm) as grouped,
    ):
        steps = train_steps(settings, layout, texts_between)
    assert grouped.called == (torch.distributed.get_rank() > 0)
    return steps
