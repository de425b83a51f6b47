"""Tiny generators of ours and of `diffusers` with the same weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.families.diffusers_pixart import pixart_weights
from mmtrain.families.diffusers_unet import unet_weights
from mmtrain.models.generator.generator_stage import build_generator_layer
from mmtrain.models.megatron import LayerFactory, ParallelGroups, prepare_megatron
from mmtrain.models.shapes.generator_shapes import generator_layers
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.generator_input import GeneratorContext, GeneratorInput, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

CPU = torch.device("cpu")
LLM_HIDDEN = 24
DIT: dict[str, Any] = {
    "kind": "dit", "widths": (32,), "heads": (4,), "layers": 3, "channels": 4, "patch": 2, "context_width": 20,
    "context_tokens": 5, "sample_size": 8,
}  # fmt: skip
UNET: dict[str, Any] = {
    "kind": "unet", "widths": (16, 32, 32), "heads": (2, 4, 8), "layers": 2, "channels": 4, "context_width": 20,
    "context_tokens": 5, "norm_groups": 4, "sample_size": 8,
}  # fmt: skip


def factory_of(layers: tuple[LayerShape, ...], groups: ParallelGroups | None = None) -> LayerFactory:
    prepare_megatron(CPU)
    block = next(layer for layer in layers if layer.mixer is not None)
    return LayerFactory(
        block=block,
        activation="gelu_tanh",
        norm_eps=1e-6,
        groups=groups or ParallelGroups.single(),
        dtype=torch.float32,
        attention="sdpa",
        sequence_parallel=False,
    )


def build(
    settings: GeneratorSettings, groups: ParallelGroups | None = None, seed: int = 0, llm_hidden: int = LLM_HIDDEN
) -> nn.ModuleList:
    """Build all layers, the projector of the context first, with random weights."""
    layers = generator_layers(settings, llm_hidden)
    factory = factory_of(layers, groups)
    modules = nn.ModuleList(build_generator_layer(settings, layer, factory) for layer in layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in modules.parameters():
            param.normal_(std=0.2, generator=generator)
    return modules


def run(modules: nn.ModuleList, state: GeneratorState, inputs: GeneratorInput) -> Tensor:
    context = GeneratorContext(inputs, CPU)
    for module in modules:
        state = module(state, context)
    assert state.hidden is not None
    return state.hidden


def patches_of(images: list[Tensor], patch: int) -> Tensor:
    """Cut images (C, H, W) into packed patches (N, C * patch * patch)."""
    rows = []
    for image in images:
        channels, height, width = image.shape
        grid = image.reshape(channels, height // patch, patch, width // patch, patch)
        rows.append(grid.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch))
    return torch.cat(rows)


def images_of(patches: Tensor, sizes: list[tuple[int, int]], patch: int) -> list[Tensor]:
    """Undo `patches_of` for images of these sizes in patches."""
    images = []
    for part, (rows, cols) in zip(patches.split([r * c for r, c in sizes]), sizes, strict=True):
        grid = part.reshape(rows, cols, -1, patch, patch)
        images.append(grid.permute(2, 0, 3, 1, 4).reshape(-1, rows * patch, cols * patch))
    return images


def load(modules: nn.ModuleList, tensors: Mapping[str, Tensor], settings: GeneratorSettings) -> None:
    """Copy the tensors of a model of `diffusers` into our layers behind the projector of the context."""
    family = {"dit": pixart_weights, "unet": unet_weights}[settings.kind]
    ours = {f"generator.layers.{name}": param for name, param in modules.named_parameters()}
    with torch.no_grad():
        for source in family(settings.model_dump()):
            param = ours[source.name]
            source.check_cover(tuple(param.shape))
            for block in source.blocks:
                part = tensors[block.tensor][tuple(slice(lo, hi) for lo, hi in block.tensor_box)]
                region = param[tuple(slice(lo, hi) for lo, hi in block.view_box)]
                region.copy_(part.reshape(region.shape))


def shuffle(model: nn.Module, seed: int = 0) -> None:
    """Move every parameter off its initial value, so that norms and biases matter too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn(param.shape, generator=generator)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def assert_equal_gradients(ours: nn.ModuleList, theirs: nn.Module, settings: GeneratorSettings) -> None:
    """Compare the gradients of all layers behind the projector of the context."""
    expected = build(settings)  # holds their gradients under our names
    load(expected, {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}, settings)
    expected_gradients = dict(expected[1:].named_parameters())
    for name, param in ours[1:].named_parameters():
        assert param.grad is not None, name
        assert relative_error(param.grad, expected_gradients[name]) < 1e-3, name
