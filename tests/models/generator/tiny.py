"""Tiny generators of ours and of `diffusers` with the same weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.models.generator.generator_input import GeneratorContext, GeneratorInput, GeneratorState
from mmtrain.models.generator.layer_modules import build_generator_layer
from mmtrain.models.generator_shapes import generator_layers
from mmtrain.models.layer_shape import LayerShape
from mmtrain.models.megatron import LayerFactory, ParallelGroups, prepare_megatron
from mmtrain.recipe.generator_settings import GeneratorSettings

CPU = torch.device("cpu")
LLM_HIDDEN = 24
DIT: dict[str, Any] = {
    "kind": "dit", "widths": (32,), "heads": (4,), "layers": 3, "channels": 4, "patch": 2, "context_width": 20,
    "context_tokens": 5, "sample_size": 8,
}  # fmt: skip


def factory_of(layers: tuple[LayerShape, ...], groups: ParallelGroups | None = None) -> LayerFactory:
    prepare_megatron(CPU)
    block = next(layer for layer in layers if layer.heads)
    return LayerFactory(
        block=block,
        activation="gelu_tanh",
        norm_eps=1e-6,
        groups=groups or ParallelGroups.single(),
        dtype=torch.float32,
        attention="sdpa",
        sequence_parallel=False,
    )


def build(settings: GeneratorSettings, groups: ParallelGroups | None = None, seed: int = 0) -> nn.ModuleList:
    """Build all layers, the projector of the context first, with random weights."""
    layers = generator_layers(settings, LLM_HIDDEN)
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


def load_dit(modules: nn.ModuleList, weights: Mapping[str, Tensor], settings: GeneratorSettings) -> None:
    """Copy the weights of a `PixArtTransformer2DModel` into our layers, behind the projector of the context."""
    _, embed, *blocks, out = modules
    (heads,) = settings.heads

    def set_linear(linear: Any, *names: str) -> None:
        """Set a linear; of several names, the rows are joined head by head."""
        for kind in ("weight", "bias"):
            parts = [weights[f"{name}.{kind}"] for name in names]
            if len(parts) > 1:
                split = [part.unflatten(0, (heads, -1)) for part in parts]
                parts = [torch.cat(split, dim=1).flatten(0, 1)]
            getattr(linear, kind).copy_(parts[0].reshape(getattr(linear, kind).shape))

    with torch.no_grad():
        set_linear(embed.proj, "pos_embed.proj")
        set_linear(embed.time_fc1, "adaln_single.emb.timestep_embedder.linear_1")
        set_linear(embed.time_fc2, "adaln_single.emb.timestep_embedder.linear_2")
        set_linear(embed.modulation, "adaln_single.linear")
        for index, block in enumerate(blocks):
            prefix = f"transformer_blocks.{index}"
            block.modulation.copy_(weights[f"{prefix}.scale_shift_table"])
            set_linear(block.self_attention.linear_qkv, *(f"{prefix}.attn1.to_{x}" for x in "qkv"))
            set_linear(block.self_attention.linear_proj, f"{prefix}.attn1.to_out.0")
            set_linear(block.cross_attention.linear_q, f"{prefix}.attn2.to_q")
            set_linear(block.cross_attention.linear_kv, *(f"{prefix}.attn2.to_{x}" for x in "kv"))
            set_linear(block.cross_attention.linear_proj, f"{prefix}.attn2.to_out.0")
            set_linear(block.mlp.linear_fc1, f"{prefix}.ff.net.0.proj")
            set_linear(block.mlp.linear_fc2, f"{prefix}.ff.net.2")
        out.modulation.copy_(weights["scale_shift_table"])
        for kind in ("weight", "bias"):  # rows are (row, column, channel) there, (channel, row, column) here
            rows = weights[f"proj_out.{kind}"].unflatten(0, (settings.patch, settings.patch, -1))
            getattr(out.proj, kind).copy_(rows.movedim(2, 0).flatten(0, 2))
