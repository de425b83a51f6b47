"""Tensor-parallel ranks compute the same loss and features as one rank and, joined, the same gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.shapes.layer_shape import WITHOUT_GRADIENT
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.distributed import run_ranks
from tests.models.factory import (
    GROWING,
    MERGED,
    PIXTRAL,
    POOLED,
    RESAMPLED,
    SCALED,
    SHARED_KV,
    STANDARDIZED,
    TWO_KINDS,
    WINDOWED,
    gradients,
    images,
    settings,
    stage,
    text,
)
from tests.models.whole_tensors import join_tp_shards, stage_logits

TP = 2
VARIANTS = {
    "plain": settings(),
    "biases": settings(
        vision={"class_token": True, "pre_norm": True, "projector": {"norm": True}},
        llm={"qkv_bias": True, "head_dim": 16},
    ),
    "tied": settings(vision={"qkv_bias": False, "activation": "quick_gelu"}, llm={"tie_embeddings": True}),
    "gemma": settings(
        vision=POOLED,
        llm={
            "qk_norm": True,
            "zero_centered_norms": True,
            "post_norms": True,
            "mlp": "geglu",
            "query_scale": 9,
            "scale_embeddings": True,
            "tie_embeddings": True,
            "window": 5,
            "window_rope_base": 100.0,
        },
    ),
    "one kv head": settings(llm={"kv_heads": 1, "qkv_bias": True}),
    "normalized heads, windows": settings(
        llm={"qk_norm": True, "head_dim": 16, "window": 5, "full_attention_blocks": (1,)}
    ),
    "frozen": settings(vision={"freeze": True}, llm={"freeze": True}),
    "windows": settings(vision=WINDOWED),
    "scaled": settings(vision=SCALED),
    "merged": settings(vision=MERGED),
    "pixtral": settings(vision=PIXTRAL, llm=GROWING),
    "standardized": settings(vision=STANDARDIZED),
    "resampled": settings(vision=RESAMPLED),
    "two kinds of attention": settings(llm=TWO_KINDS),
    "two kinds of attention, values apart": settings(
        llm=TWO_KINDS | {"kv_heads": 1, "full_attention": {"head_dim": 24, "kv_heads": 2}}
    ),
    "shared keys and values": settings(llm=SHARED_KV),
}
# By how much more than others they may differ: norms of small products of a gate and a block's input enlarge rounding.
ROUNDING = {"shared keys and values": 6.0}
PLACES = (1, 2, 3, 4, 9, 10, 11, 12, 13, 20)


class Outcome:
    """The results of one rank; plain attributes because it is pickled."""

    def __init__(
        self,
        model: ModelSettings,
        groups: ParallelGroups,
        recompute: tuple[int, ...],
        sp: bool = False,
        tp_chunks: int = 1,
    ) -> None:
        vision, llm = (
            stage(model, unit, groups=groups, recompute=recompute, sequence_parallel=sp, tp_chunks=tp_chunks)
            for unit in ("vision", "llm")
        )
        inputs = text(8, 17, 0, 5, places=PLACES)
        features = vision(None, images((4, 4), (6, 4)))
        loss = llm(None, inputs, {"vision": features})
        loss.backward()
        self.loss, self.features = loss.detach(), features.detach()
        self.logits = stage_logits(llm, None, inputs, {"vision": features}).detach()
        self.specs: dict[str, ParamSpec] = {}
        self.params: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        for module in (vision, llm):
            described = stage_param_specs(module, module.unit, groups.tp_size)
            self.specs |= {spec.name: spec for spec in described.values()}
            self.params |= {f"{module.unit}.{name}": param.detach() for name, param in module.named_parameters()}
            for param in module.parameters():
                if not param.requires_grad:
                    param.grad = torch.zeros_like(param)
                elif getattr(param, "sequence_parallel", False):
                    dist.all_reduce(param.grad, group=groups.tp)
            self.grads |= gradients(module)


def _groups() -> ParallelGroups:
    """Make one TP group of all ranks of the world."""
    return replace(ParallelGroups.single(), tp=dist.group.WORLD)


def _on_this_rank(recompute: tuple[int, ...]) -> dict[str, Outcome]:
    groups = _groups()
    return {name: Outcome(model, groups, recompute) for name, model in VARIANTS.items()}


@cache
def _two_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(TP, _on_this_rank, ())


def _with_fewer_kv_heads(recompute: tuple[int, ...]) -> list[Outcome]:
    return [
        Outcome(settings(llm={"kv_heads": n, "qkv_bias": True, "qk_norm": True}), _groups(), recompute) for n in (1, 2)
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_two_tensor_parallel_ranks_equal_one(name: str) -> None:
    ranks = [outcomes[name] for outcomes in _two_ranks()]
    _assert_equal(ranks, Outcome(VARIANTS[name], ParallelGroups.single(), ()), name)


def test_four_ranks_share_one_or_two_kv_heads() -> None:
    on_ranks = run_ranks(4, _with_fewer_kv_heads, (1, 3))
    for ranks, whole in zip(zip(*on_ranks, strict=True), _with_fewer_kv_heads(()), strict=True):
        _assert_equal(list(ranks), whole)


def _with_slices(recompute: tuple[int, ...]) -> dict[str, Outcome]:
    groups = _groups()
    return {name: Outcome(model, groups, recompute, sp=True) for name, model in VARIANTS.items()}


@pytest.mark.slow
def test_sequence_parallelism_changes_no_result() -> None:
    """Use 30 tokens of text and 42 of images, which 4 ranks do not divide."""
    on_ranks = run_ranks(4, _with_slices, (1, 3))
    for name, model in VARIANTS.items():
        _assert_equal([outcomes[name] for outcomes in on_ranks], Outcome(model, ParallelGroups.single(), ()), name)


def _in_chunks(sp: bool, num_chunks: int) -> dict[str, Outcome]:
    groups = _groups()
    return {name: Outcome(model, groups, (1,), sp, num_chunks) for name, model in VARIANTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "sp", "num_chunks"), [(2, False, 4), (2, True, 3), (4, False, 3), (4, True, 100)])
def test_chunks_change_no_result(tp: int, sp: bool, num_chunks: int) -> None:
    """30 tokens of text and 42 of images are no multiples of the chunks; 100 are more than there are tokens."""
    on_ranks = run_ranks(tp, _in_chunks, sp, num_chunks)
    for name, model in VARIANTS.items():
        _assert_equal([outcomes[name] for outcomes in on_ranks], Outcome(model, ParallelGroups.single(), (1,)), name)


def _empty_with_slices() -> list[float]:
    llm = stage(settings(), "llm", groups=_groups(), sequence_parallel=True)
    loss = llm(None, text(0), {"vision": torch.zeros(0, 48)})
    loss.backward()
    return [float(loss.detach()), *(float(g.abs().sum()) for g in gradients(llm).values())]


def test_sequence_parallelism_without_tokens_gives_zero_gradients() -> None:
    num_params = sum(1 for _ in stage(settings(), "llm").parameters())
    assert run_ranks(TP, _empty_with_slices) == [[0.0] * (1 + num_params)] * TP


def _assert_equal(ranks: list[Outcome], whole: Outcome, name: str = "plain") -> None:
    rounding = ROUNDING.get(name, 1.0)
    for rank in ranks:
        torch.testing.assert_close(rank.loss, whole.loss, rtol=rounding * 1e-6, atol=0)
        for result, reference in ((rank.features, whole.features), (rank.logits, whole.logits)):
            # Rounding goes with the largest terms of a sum, so the tolerance goes with the tensor's scale.
            atol = rounding * 2e-6 * float(reference.abs().max())
            torch.testing.assert_close(result, reference, rtol=1e-5, atol=atol)
    largest = max(gradient.norm() for gradient in whole.grads.values())
    for full_name, spec in whole.specs.items():
        if full_name.endswith(WITHOUT_GRADIENT):
            continue
        # Of a parameter that is whole on every rank, each may have a part of the gradient until these are summed.
        partial = {rank.specs[full_name].is_gradient_partial for rank in ranks}
        assert len(partial) == 1
        expected_spec = replace(spec, is_gradient_partial=partial.pop())
        assert all(rank.specs[full_name] == expected_spec for rank in ranks)
        param = join_tp_shards([rank.params[full_name] for rank in ranks], spec)
        assert torch.equal(param, whole.params[full_name].view(spec.full_shape)), full_name
        gradient = join_tp_shards([rank.grads[full_name] for rank in ranks], spec)
        expected = whole.grads[full_name].view(spec.full_shape)
        assert (gradient - expected).norm() <= rounding * 1e-5 * max(expected.norm(), 1e-3 * largest), full_name
        if spec.dim is None:  # whole on every rank, and must stay the same there
            for other in ranks[1:]:
                torch.testing.assert_close(ranks[0].grads[full_name], other.grads[full_name], rtol=0, atol=0)


def _recomputed() -> tuple[float, bool]:
    groups = _groups()
    plain = Outcome(VARIANTS["biases"], groups, ())
    again = Outcome(VARIANTS["biases"], groups, (0, 1, 2, 3, 4))
    return again.loss.item() - plain.loss.item(), all(
        torch.equal(again.grads[name], plain.grads[name]) for name in plain.grads
    )


def test_recompute_repeats_the_collectives_of_tensor_parallelism() -> None:
    assert run_ranks(TP, _recomputed) == [(0.0, True)] * TP
