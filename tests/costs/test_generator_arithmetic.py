"""Costs of generators against their modules: FLOPs exactly, saved activations closely."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.costs import AnalyticCosts, TokenLoad, preset
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.cost_model import LayerWork
from mmtrain.models.shapes.generator_shapes import generator_layers
from mmtrain.models.stage.generator_input import GeneratorInput, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from tests.models.generator.tiny import DIT, LLM_HIDDEN, UNET, build, run

IMAGES, SIDE = 3, 8


def build_module(settings: dict[str, Any]) -> tuple[GeneratorSettings, nn.ModuleList, GeneratorInput, TokenLoad]:
    """Return the settings, the layers, some noisy images, and their load."""
    g = GeneratorSettings(**settings)
    side = SIDE // g.patch
    cells = torch.randn(IMAGES * side**2, g.channels * g.patch**2)
    inputs = GeneratorInput((side,) * IMAGES, (side,) * IMAGES, cells, torch.arange(IMAGES))
    return g, build(g), inputs, TokenLoad.of(np.full(IMAGES, side**2))


@pytest.mark.parametrize("llm_trains", [True, False])
@pytest.mark.parametrize("settings", [UNET, DIT], ids=["unet", "dit"])
def test_flops_equal_those_torch_counts(settings: dict[str, Any], llm_trains: bool) -> None:
    g, modules, inputs, load = build_module(settings)
    layers = generator_layers(g, LLM_HIDDEN)
    rows = torch.randn(IMAGES * g.context_tokens, LLM_HIDDEN, requires_grad=llm_trains)
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no fused attention on a CPU
        with FlopCounterMode(display=False) as forward:
            out = run(modules, GeneratorState(rows), inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    assert sum(analytic.forward_flops(x, load) for x in layers) == forward.get_total_flops()
    needs = [llm_trains, *[True] * (len(layers) - 1)]  # the projector of the context trains
    expected = sum(
        analytic.backward_flops(layer, load, weight_grad=True, input_grad=need)
        for layer, need in zip(layers, needs, strict=True)
    )
    assert expected == backward.get_total_flops()


@pytest.mark.parametrize("settings", [UNET, DIT], ids=["unet", "dit"])
def test_activations_are_those_that_autograd_saves(settings: dict[str, Any]) -> None:
    g, modules, inputs, load = build_module(settings)
    weights = {p.untyped_storage().data_ptr() for p in modules.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run(modules, GeneratorState(torch.randn(IMAGES * g.context_tokens, LLM_HIDDEN)), inputs)
    assert out.requires_grad
    predicted = sum(analytic.activation_bytes(x, load, 4) for x in generator_layers(g, LLM_HIDDEN))
    assert sum(saved.values()) == pytest.approx(predicted, rel=0.2)


def test_tensor_parallelism_splits_the_blocks_of_a_transformer() -> None:
    """Each GEMM is split along one side; biases after a reduction and the modulation are on every rank."""
    g, _, _, load = build_module(DIT)
    (wide,) = g.widths
    for layer in generator_layers(g, LLM_HIDDEN):
        is_block = layer.kind == "dit_block"
        for tp in (2, 4):
            share = tp if is_block else 1
            assert analytic.forward_flops(layer, load, tp) * share == analytic.forward_flops(layer, load)
            copies = 9 * wide * (tp - 1) if is_block else 0
            assert analytic.num_parameters(layer, tp) * share == analytic.num_parameters(layer) + copies
            unsplit, split = (analytic.activation_bytes(layer, load, 2, n) for n in (1, tp))
            if is_block:
                assert unsplit / tp < split < unsplit
            else:
                assert split == unsplit


def test_a_frozen_generator_still_passes_gradients_to_the_llm() -> None:
    g, _, _, load = build_module(UNET)
    embed = next(x for x in generator_layers(g, LLM_HIDDEN) if x.kind == "unet_embed")
    for layer in generator_layers(g, LLM_HIDDEN):
        flops = analytic.backward_flops(layer, load, weight_grad=False, input_grad=True)
        assert (flops == 0) == (layer == embed)  # noise needs no gradient


def test_every_layer_has_a_cost() -> None:
    costs = AnalyticCosts(preset("h100-80g"), "bf16")
    for settings in (UNET, DIT):
        g, _, _, load = build_module(settings)
        for layer in generator_layers(g, LLM_HIDDEN):
            forward_s, backward_s = (costs.seconds(LayerWork(layer, 1, load, k)) for k in ("forward", "backward"))
            assert 0 < forward_s < backward_s < 1e-2
            assert 0 < costs.activation_bytes(layer, 1, load, True) <= costs.activation_bytes(layer, 1, load, False)
