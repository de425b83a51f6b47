"""Adapters: what they add to a linear, on one rank and on several, and what trains beside them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.costs import AnalyticCosts, TokenLoad, num_parameters, num_trained_parameters, preset, state_bytes
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.layer_arithmetic import unit_flops
from mmtrain.costs.rank_memory import layer_state
from mmtrain.errors import RecipeError
from mmtrain.models.kernels.keyed_dropout import token_keys
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.shapes.freezing import parameter_names
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.stage_module import StageModule
from tests.distributed import run_ranks
from tests.models.factory import images, settings, shape_of, stage, text
from tests.models.whole_tensors import join_tp_shards

EVERYWHERE: dict[str, Any] = {"rank": 4, "alpha": 12, "targets": ("*",)}
PARTS = {"rank": 4, "alpha": 12, "targets": ("llm.*.linear_q", "llm.*.linear_v", "llm.*.linear_fc1_up", "*proj")}
MOE = {"experts": 4, "top_k": 2, "ffn": 8, "shared_ffn": 12, "shared_gate": True}
PLACES = (1, 2, 3, 4, 9, 10, 11, 12, 13, 20)


def test_a_new_adapter_changes_nothing_and_only_adapters_train() -> None:
    plain, adapted = stage(settings(), "llm"), stage(settings(), "llm", lora=EVERYWHERE)
    inputs, features = text(8, 17, places=PLACES), {"vision": torch.randn(10, 48)}
    loss = adapted(None, inputs, features)
    loss.backward()
    assert torch.equal(loss, plain(None, inputs, features))
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == {
        f"layers.{i}.{linear}.lora.{half}"
        for i in (1, 2, 3)
        for linear in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        for half in "ab"
    }
    for name, param in adapted.named_parameters():
        assert (param.grad is not None) == param.requires_grad
        if name.endswith(".lora.b"):
            assert param.grad.abs().max() > 0


def test_an_adapter_is_the_same_as_its_product_added_to_the_weight() -> None:
    model = settings(llm={"qkv_bias": True})
    adapted, merged = _taught(stage(model, "llm", lora=EVERYWHERE)), stage(model, "llm")
    values = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, param in merged.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora.a" in values:
                param += 3 * values[f"{module}.lora.b"] @ values[f"{module}.lora.a"]
    inputs, features = text(8, 17, places=PLACES), {"vision": torch.randn(10, 48)}
    torch.testing.assert_close(adapted(None, inputs, features), merged(None, inputs, features), rtol=1e-5, atol=0)


def test_parts_are_products_added_to_their_rows_of_the_weight() -> None:
    """Rows of a KV head: its queries, key, value. Rows of the first linear of an MLP: gates, then the others."""
    model = settings()
    adapted, merged = _taught(stage(model, "llm", lora=PARTS)), stage(model, "llm")
    values = dict(adapted.named_parameters())
    llm = model.llm
    groups, width = llm.kv_heads or llm.heads, llm.head_dim or llm.hidden // llm.heads
    with torch.no_grad():
        for name, param in merged.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora.a" not in values:
                continue
            a, b = values[f"{module}.lora.a"], values[f"{module}.lora.b"]
            if name.endswith("linear_qkv.weight"):
                of_group, low = b.unflatten(0, (groups, -1)), a.split(4)
                rows = param.view(groups, -1, llm.hidden)
                rows[:, : -2 * width] += 3 * of_group[:, : -2 * width] @ low[0]
                rows[:, -width:] += 3 * of_group[:, -width:] @ low[1]
            elif name.endswith("linear_fc1.weight"):
                param[len(b) // 2 :] += 3 * b[len(b) // 2 :] @ a
            else:
                param += 3 * b @ a
    inputs, features = text(8, 17, places=PLACES), {"vision": torch.randn(10, 48)}
    torch.testing.assert_close(adapted(None, inputs, features), merged(None, inputs, features), rtol=1e-5, atol=0)


def test_names_of_adapters_are_known_without_modules() -> None:
    model = settings()
    for unit in shape_of(model, lora=EVERYWHERE).units:
        module = stage(model, unit.name, lora=EVERYWHERE)
        for index, layer in enumerate(unit.layers):
            names_in_module = {n for n, _ in module.layers[str(index)].named_parameters()}
            assert set(parameter_names(layer, getattr(model, unit.name))) == names_in_module


def test_what_also_trains_is_named_and_what_is_frozen_stays_frozen() -> None:
    lora = {"rank": 2, "targets": ("llm.*.linear_qkv",), "also_train": ("vision.projector.*", "llm.layers.4.norm.*")}
    shape = shape_of(settings(), ("vision.projector.linear_1.*",), lora)
    vision, llm = shape.unit("vision").layers, shape.unit("llm").layers
    assert [layer.trainable for layer in vision] == [False, False, False, True]
    assert vision[3].frozen == {"linear_1.weight", "linear_1.bias"}
    assert [(layer.trainable, layer.trains_weights) for layer in llm] == [
        (False, False), (True, False), (True, False), (True, False), (True, True),
    ]  # fmt: skip


@pytest.mark.parametrize("moe", [None, MOE])
@pytest.mark.parametrize("qkv", ["*.linear_qkv", "llm.*.linear_[qv]"])
def test_costs_know_that_only_adapters_train(moe: dict[str, Any] | None, qkv: str) -> None:
    lora = {"rank": 4, "targets": (qkv, "*.linear_fc2", "vision.projector.linear_1")}
    model = settings(llm={"moe": moe})
    bare_shape, shape = shape_of(model), shape_of(model, lora=lora)
    costs, load = AnalyticCosts(preset("h100-80g"), "bf16"), TokenLoad(512, 512**2, 512, 1)
    for unit in shape.units:
        module = stage(model, unit.name, lora=lora)
        for index, (layer, bare) in enumerate(zip(unit.layers, bare_shape.unit(unit.name).layers, strict=True)):
            params = list(module.layers[str(index)].parameters())
            assert num_parameters(layer) == sum(p.numel() for p in params)
            assert num_trained_parameters(layer) == sum(p.numel() for p in params if p.requires_grad)
            weights, gradients, optimizer = layer_state(layer, 2, 1, state_bytes("bf16"))
            trained = num_trained_parameters(layer, 2)
            assert (weights, gradients, optimizer) == (2 * num_parameters(layer, 2), 4 * trained, 12 * trained)
            if layer.lora is not None:
                forward, bare_forward = (costs.seconds(LayerWork(x, 1, load, "forward")) for x in (layer, bare))
                backward, bare_backward = (unit_flops([x], load, [True]) for x in (layer, bare))
                assert forward > bare_forward
                assert backward < bare_backward  # no gradients of the weights
                pieces = costs.pieces(LayerWork(layer, 2, load, "backward"))
                assert sum(map(sum, pieces)) == pytest.approx(costs.seconds(LayerWork(layer, 2, load, "backward")))


def test_norms_that_train_beside_adapters_cost_no_gradients_of_matrices() -> None:
    lora = {"rank": 4, "targets": ("llm.*.linear_qkv",)}
    model, load = settings(), TokenLoad(512, 512**2, 512, 1)
    blocks = {
        name: shape_of(model, lora={**lora, "also_train": also}).unit("llm").layers[2]
        for name, also in {"norms": ("llm.layers.2.*norm.*",), "fc1": ("llm.layers.2.*fc1.weight",), "none": ()}.items()
    }
    module = stage(model, "llm", lora={**lora, "also_train": ("llm.layers.2.*norm.*",)}).layers["2"]
    assert num_trained_parameters(blocks["norms"]) == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert num_trained_parameters(blocks["fc1"]) == num_parameters(blocks["fc1"])
    flops = {name: unit_flops([block], load, [False]) for name, block in blocks.items()}
    assert flops["norms"] == flops["none"] < flops["fc1"]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ("llm.*.q_proj",)}, r"^train\.lora\.targets\.0: llm\.\*\.q_proj matches no linear .*linear_"),
        (
            {"targets": ("up_proj",)},
            r"up_proj matches no linear .*; up_proj is part of llm\.\*\.linear_fc1; ",
        ),
        (
            {"targets": ("llm.layers.[12].mlp.experts.[0-2].linear_fc2",)},
            r"^train\.lora\.targets: name linear_fc2 of 3 of the 4 experts of llm\.layers\.1\.mlp, allowed: that of",
        ),
        (
            {"targets": ("llm.*.router",)},
            r"^train\.lora\.targets\.0: llm\.\*\.router matches no linear",
        ),
        (
            {"dropout": 0.1, "targets": ("llm.*.linear_fc1",)},
            r"^train\.lora\.dropout: adapters on llm\.layers\.1\.mlp\.experts\.0\.linear_fc1, .*; leave it out of",
        ),
        (
            {"also_train": ("vision.projektor.*",)},
            r"^train\.lora\.also_train\.0: vision\.projektor\.\* matches no .* vision\.projector",
        ),
    ],
)
def test_targets_that_cannot_have_adapters_are_an_error_with_the_nearest_names(lora: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        shape_of(settings(llm={"moe": MOE}), lora=lora)


class _Results:
    """Loss and gradients of one rank; plain attributes because it is pickled."""

    def __init__(self, llm_settings: dict[str, Any], lora: dict[str, Any], groups: ParallelGroups, sp: bool) -> None:
        model = settings(llm=llm_settings)
        units = [
            _taught(stage(model, unit, groups=groups, recompute=(1,), sequence_parallel=sp, lora=lora), groups)
            for unit in ("vision", "llm")
        ]
        features = units[0](None, images((4, 4), (6, 4)))
        self.loss = units[1](None, text(8, 17, 0, 5, places=PLACES), {"vision": features})
        self.loss.backward()
        self.loss = self.loss.detach()
        self.specs: dict[str, ParamSpec] = {}
        self.grads: dict[str, Tensor] = {}
        for unit in units:
            specs = stage_param_specs(unit, unit.unit, groups.tp_size)
            for name, param in unit.named_parameters():
                if param.requires_grad:
                    if getattr(param, "sequence_parallel", False):
                        dist.all_reduce(param.grad, group=groups.tp)
                    self.specs[specs[name].name], self.grads[specs[name].name] = specs[name], param.grad


# With one KV head, a rank of two holds some rows of the queries, and the other one the rest, keys and values.
ADAPTED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, EVERYWHERE),
    ({"kv_heads": 1, "qkv_bias": True}, EVERYWHERE),
    ({}, PARTS),
    ({"kv_heads": 1, "qkv_bias": True}, PARTS),
)


def _on_two_ranks() -> list[_Results]:
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    return [_Results(llm, lora, groups, sp) for sp in (False, True) for llm, lora in ADAPTED]


def test_two_tensor_parallel_ranks_equal_one_with_and_without_sequence_parallelism() -> None:
    on_ranks = run_ranks(2, _on_two_ranks)
    whole = [_Results(llm, lora, ParallelGroups.single(), False) for llm, lora in ADAPTED] * 2
    for ranks, expected in zip(zip(*on_ranks, strict=True), whole, strict=True):
        for rank in ranks:
            torch.testing.assert_close(rank.loss, expected.loss, rtol=1e-6, atol=0)
        for name, spec in expected.specs.items():
            joined = join_tp_shards([rank.grads[name] for rank in ranks], ranks[0].specs[name])
            reference = expected.grads[name].reshape(spec.full_shape)
            torch.testing.assert_close(joined, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))
            if spec.dim is None:  # every rank holds all of it
                assert torch.equal(ranks[0].grads[name], ranks[1].grads[name])


def _taught(module: StageModule, groups: ParallelGroups | None = None) -> StageModule:
    """Give the second matrices of the adapters values that do not depend on the number of ranks."""
    tp, rank = (groups.tp_size, groups.tp_rank) if groups else (1, 0)
    specs = stage_param_specs(module, module.unit, tp)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name.endswith(".lora.b"):
                spec = specs[name]
                generator = torch.Generator().manual_seed(len(spec.name) + spec.full_shape[-2])
                full = torch.randn(spec.full_shape, generator=generator) * 0.1
                shard = full if spec.dim is None else full.chunk(tp, spec.dim)[rank]
                param.copy_(shard.reshape(param.shape))
    return module


def test_adapters_drop_inputs_where_tokens_have_keys_and_cost_what_that_takes() -> None:
    lora = EVERYWHERE | {"dropout": 0.5}
    module, plain = (_taught(stage(settings(), "llm", lora=each)) for each in (lora, EVERYWHERE))
    inputs, features = text(8, 17, places=PLACES), {"vision": torch.randn(10, 48)}
    assert torch.equal(module(None, inputs, features), plain(None, inputs, features))  # as in evaluation
    keyed = [replace(inputs, token_keys=torch.from_numpy(token_keys((first, 5), (8, 17)))) for first in (3, 4)]
    losses = [module(None, each, features) for each in (*keyed, keyed[0])]
    assert torch.equal(losses[0], losses[2])
    assert losses[0] != losses[1]
    load, costs = TokenLoad(512, 512**2, 512, 1), AnalyticCosts(preset("h100-80g"), "bf16")
    with_dropout, without = (
        costs.seconds(LayerWork(shape_of(settings(), lora=each).unit("llm").layers[1], 1, load, "forward"))
        for each in (lora, EVERYWHERE)
    )
    assert with_dropout > without
