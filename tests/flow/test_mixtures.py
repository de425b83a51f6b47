"""Mixtures of experts compute under any plan what one process does sample by sample."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe
from tests.flow.cells import ADAPTED
from tests.flow.equality import assert_equals_one_process
from tests.flow.gather import whole
from tests.flow.orders import PIPELINE, TOGETHER
from tests.flow.test_replicated import change_plan, replicated
from tests.tiers import mostly_long

ALL = (0, 1, 2, 3, 4)
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


@pytest.mark.parametrize(("changes", "recompute"), [(SHARED, ()), (MOE, ALL)])
def test_a_sharded_mixture_computes_what_one_process_does(changes: dict[str, Any], recompute: tuple[int, ...]) -> None:
    settings = recipe(**changes)
    assert_equals_one_process(settings, replicated(settings, 2, 2, recompute, "all"), texts_between=True)


SIX_EXPERTS: dict[str, Any] = {
    "model__llm__moe": {"experts": 6, "top_k": 2, "ffn": 16, "dense_blocks": (1,)},
    "train__optimizer__clip_norm": 0.05,
}
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
    "ep4 of dp2 cp2": (
        {"model__llm__moe": {"experts": 4, "top_k": 1, "ffn": 16}},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), cp=2, dp=2, split="even", ep=4)},
    ),
}


@pytest.mark.parametrize("case", mostly_long(EXPERT_PARALLEL, every=2))
def test_ranks_that_share_experts_compute_what_one_process_does(case: str) -> None:
    changes, meshes = EXPERT_PARALLEL[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True)


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
