import itertools
import math
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.models.optim import parameter_specs
from mmtrain.models.optim.parameter_specs import UnitRates, initialize_parameters, stage_param_specs, tp_shard
from mmtrain.models.shapes.param_spec import ParamSpec
from tests.models.factory import settings, stage
from tests.models.whole_tensors import join_tp_shards

GATED = ParamSpec("llm.layers.1.mlp.linear_fc1.weight", (2, 8, 3), 1)


def test_layers_learn_slower_the_farther_they_are_from_the_head() -> None:
    rates = UnitRates(lr_scale=0.5, weight_decay=0.1, layer_decay=0.75, num_blocks=3)
    scales = [rates.lr_scale_of(f"llm.layers.{layer}.a.weight") for layer in range(5)]
    assert scales == [0.5 * 0.75**3, 0.5 * 0.75**2, 0.5 * 0.75, 0.5, 0.5]
    alike = UnitRates(lr_scale=0.5, weight_decay=0.1, num_blocks=3)
    assert {alike.lr_scale_of(f"llm.layers.{layer}.a.weight") for layer in range(5)} == {0.5}


def test_parameters_of_one_rate_and_decay_are_one_group() -> None:
    names = {
        torch.nn.Parameter(torch.zeros(shape)): f"llm.layers.{layer}.a" for layer in (1, 2) for shape in (3, (3, 3))
    }
    groups = UnitRates(1.0, 0.1, layer_decay=0.5, num_blocks=2).groups(names)
    found = {(group["lr_scale"], group["weight_decay"]): group["params"] for group in groups}
    expected = [(0.5, 0.0), (0.5, 0.1), (1.0, 0.0), (1.0, 0.1)]
    assert found == dict(zip(expected, ([param] for param in names), strict=True))
    assert len(UnitRates(1.0, 0.1).groups(names)) == 2


def test_a_gated_shard_holds_gate_rows_then_up_rows() -> None:
    full = torch.arange(48.0).view(GATED.full_shape)
    gate, up = full
    local = tp_shard(full, GATED, tp_rank=1, tp=4).reshape(4, 3)
    assert torch.equal(local, torch.cat([gate[2:4], up[2:4]]))
    assert GATED.local_shape(4) == (2, 2, 3)


@pytest.mark.parametrize(
    "spec", [GATED, ParamSpec("a", (4, 6), 0), ParamSpec("b", (4, 6), 1), ParamSpec("c", (5,), None)]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_joining_tp_shards_inverts_splitting(spec: ParamSpec, tp: int) -> None:
    full = torch.randn(spec.full_shape, generator=torch.Generator().manual_seed(0))
    shards = [tp_shard(full, spec, rank, tp).reshape(-1) for rank in range(tp)]
    assert torch.equal(join_tp_shards(shards, spec), full)


def test_specs_name_every_parameter_and_its_split_dimension() -> None:
    specs = stage_param_specs(stage(settings(llm={"qkv_bias": True}), "llm", (0, 2)), "llm", 1)
    described = {name: (spec.full_shape, spec.dim) for name, spec in specs.items()}
    assert described == {
        "layers.0.table.weight": ((128, 48), 0),
        "layers.1.input_layernorm.weight": ((48,), None),
        "layers.1.self_attention.linear_qkv.weight": ((4 * 12 + 2 * 2 * 12, 48), 0),
        "layers.1.self_attention.linear_qkv.bias": ((96,), 0),
        "layers.1.self_attention.linear_proj.weight": ((48, 48), 1),
        "layers.1.pre_mlp_layernorm.weight": ((48,), None),
        "layers.1.mlp.linear_fc1.weight": ((2, 80, 48), 1),
        "layers.1.mlp.linear_fc2.weight": ((48, 80), 1),
    }
    assert all(spec.name == f"llm.{name}" for name, spec in specs.items())


def test_specs_of_the_vision_unit() -> None:
    specs = stage_param_specs(stage(settings(vision={"class_token": True}), "vision"), "vision", 1)
    cut = {name.removeprefix("layers."): spec.dim for name, spec in specs.items() if not name.startswith("layers.2.")}
    assert cut == {
        "0.proj.weight": None,
        "0.proj.bias": None,
        "0.class_token": None,
        "0.row_positions": None,
        "0.col_positions": None,
        "1.input_layernorm.weight": None,
        "1.input_layernorm.bias": None,
        "1.self_attention.linear_qkv.weight": 0,
        "1.self_attention.linear_qkv.bias": 0,
        "1.self_attention.linear_proj.weight": 1,
        "1.self_attention.linear_proj.bias": None,
        "1.pre_mlp_layernorm.weight": None,
        "1.pre_mlp_layernorm.bias": None,
        "1.mlp.linear_fc1.weight": 0,
        "1.mlp.linear_fc1.bias": 0,
        "1.mlp.linear_fc2.weight": 1,
        "1.mlp.linear_fc2.bias": None,
        "3.post_norm.weight": None,
        "3.post_norm.bias": None,
        "3.linear_1.weight": 0,
        "3.linear_1.bias": 0,
        "3.linear_2.weight": 1,
        "3.linear_2.bias": None,
    }


def test_initial_weights_do_not_depend_on_the_split() -> None:
    whole = dict(stage(settings(), "vision").named_parameters())
    for span in itertools.pairwise((0, 1, 3, 4)):
        for name, param in stage(settings(), "vision", span).named_parameters():
            assert torch.equal(param, whole[name]), name


def test_initial_weights_depend_on_seed_and_name() -> None:
    first, second = stage(settings(), "llm", seed=1), stage(settings(), "llm", seed=2)
    weights = [m.get_parameter(f"layers.{i}.mlp.linear_fc1.weight") for m in (first, second) for i in (1, 2)]
    for weight, other_weight in itertools.combinations(weights, 2):
        assert not torch.equal(weight, other_weight)


def test_initial_scales() -> None:
    model = settings(llm={"hidden": 96, "ffn": 256, "qkv_bias": True})
    params = {name.split(".", 2)[2]: p for name, p in stage(model, "llm", (1, 2)).named_parameters()}
    assert params["mlp.linear_fc1.weight"].std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert params["mlp.linear_fc2.weight"].std().item() == pytest.approx((6 * 256) ** -0.5, rel=0.05)
    assert params["self_attention.linear_proj.weight"].std().item() == pytest.approx((6 * 96) ** -0.5, rel=0.05)
    assert params["self_attention.linear_qkv.bias"].count_nonzero() == 0
    assert torch.equal(params["input_layernorm.weight"], torch.ones(96))


def test_a_shard_is_initialized_as_its_part_of_the_full_tensor() -> None:
    module = stage(settings(), "llm", (1, 2))
    described = stage_param_specs(module, "llm", 2)  # as if this rank held one of two shards of a model twice as wide
    initialize_parameters(module, described, seed=3, tp_rank=0, tp=2)
    first = {name: param.detach().clone() for name, param in module.named_parameters()}
    initialize_parameters(module, described, seed=3, tp_rank=1, tp=2)
    for name, param in module.named_parameters():
        full = join_tp_shards([first[name], param.detach()], described[name])
        assert tuple(full.shape) == described[name].full_shape
        assert torch.equal(first[name], param) == (described[name].dim is None), name


def _drawn(spec: ParamSpec, seed: int, tp_rank: int, tp: int) -> torch.Tensor:
    shape = spec.local_shape(tp)
    return parameter_specs.initial_values(spec, seed, 2, tp_rank, tp, (0, math.prod(shape))).view(shape)


@given(st.data())
def test_any_elements_of_any_shard_are_those_of_the_whole(data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4]))
    shape = data.draw(st.sampled_from([(2, 8, 3), (8, 6), (4, 8), (12,)]))
    dim = data.draw(st.sampled_from([None, *(i for i, size in enumerate(shape) if size % 4 == 0)]))
    spec, rank = ParamSpec("a.b.c", shape, dim), data.draw(st.integers(0, tp - 1))
    expected = tp_shard(_drawn_in_small_blocks(spec, 0, 1, None).view(shape), spec, rank, tp).flatten()
    first, last = sorted(data.draw(st.integers(0, len(expected))) for _ in range(2))
    assert torch.equal(_drawn_in_small_blocks(spec, rank, tp, (first, last)), expected[first:last])


def _drawn_in_small_blocks(spec: ParamSpec, rank: int, tp: int, elements: tuple[int, int] | None) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_specs, "MAX_ELEMENTS_DRAWN_AT_ONCE", 10)
        return parameter_specs.initial_values(spec, 7, 2, rank, tp, elements or (0, math.prod(spec.local_shape(tp))))


@pytest.mark.parametrize(
    "spec",
    [
        ParamSpec("llm.layers.1.mlp.linear_fc1.weight", (2, 24, 5), 1),
        ParamSpec("llm.layers.1.mlp.linear_fc2.weight", (7, 48), 1),
        ParamSpec("llm.layers.0.table.weight", (96, 3), 0),
        ParamSpec("vision.layers.0.proj.weight", (12, 20), None),
    ],
)
def test_a_rank_draws_its_own_shard_of_a_large_parameter(spec: ParamSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_specs, "MAX_ELEMENTS_DRAWN_AT_ONCE", 100)
    sizes: list[int] = []
    normal = torch.Tensor.normal_

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(tensor.numel())
        return normal(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    whole = _drawn(spec, 7, 0, 1)
    num_elements = whole.numel()
    assert sum(sizes) == num_elements
    assert 0.7 < float(whole.std()) / spec.full_shape[-1] ** -0.5 / (0.5 if "fc2" in spec.name else 1) < 1.3
    for first, last in ((0, 1), (3, 3), (17, 60), (100, num_elements), (num_elements - 2, num_elements)):
        sizes.clear()
        part = parameter_specs.initial_values(spec, 7, 2, 0, 1, (first, last))
        assert torch.equal(part, whole.view(-1)[first:last])
        if spec.dim in (0, None):  # rows of the first dimension are whole blocks
            assert sum(sizes) <= last - first + 2 * num_elements / parameter_specs._num_draws(spec)
    for tp in (2, 3, 4):
        sizes.clear()
        shards = [_drawn(spec, 7, rank, tp) for rank in range(tp)]
        assert all(torch.equal(shards[rank], tp_shard(whole, spec, rank, tp)) for rank in range(tp))
        if spec.dim is not None:
            assert sum(sizes) <= num_elements * 1.5  # of a block that two ranks share, each draws all


def test_a_small_parameter_is_drawn_as_it_was_before_there_were_blocks() -> None:
    spec = ParamSpec("llm.layers.1.self_attention.linear_qkv.weight", (6, 4), 0)
    generator = torch.Generator().manual_seed(zlib.crc32(f"3:{spec.name}".encode()))
    expected = torch.empty(6, 4).normal_(std=0.5, generator=generator)
    assert torch.equal(_drawn(spec, 3, 0, 1), expected)
