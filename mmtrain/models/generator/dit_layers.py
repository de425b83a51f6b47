"""The layers of a diffusion transformer: PixArt (Chen et al., arXiv 2310.00426), equal to `diffusers`.

Each layer maps a `GeneratorState` to the next one. Images of any sizes are packed one after another; each attends to
itself and to its own context. Timesteps modulate all blocks by the same six vectors, to which every block adds a table
of its own. Tensor parallelism splits heads and the MLP's inner features of blocks.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.attention import AttentionOptions, attend, attend_to_context
from mmtrain.models.generator.timestep_features import position_table, timestep_features
from mmtrain.models.kernels.elementwise import activate
from mmtrain.models.shapes.layer_shape import NUM_MODULATION_VECTORS, LayerShape
from mmtrain.models.stage.generator_input import GeneratorContext, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

DIT_NORM_EPS = 1e-6  # of every norm of PixArt


class ContextProjector(nn.Module):
    """One linear from the LLM's outputs to the context that cross-attention reads.

    Every tensor-parallel rank holds all of it.
    """

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.linear = nn.Linear(shape.hidden, shape.out, dtype=factory.dtype)

    def forward(self, state: GeneratorState, context: GeneratorContext) -> GeneratorState:
        """Map outputs of the LLM (images * context tokens, llm_hidden) to (images * context tokens, context_width)."""
        return replace(state, context=self.linear(state.context))


class DitEmbed(nn.Module):
    """Linear map of patches, plus fixed positions; and the timestep's embedding and modulation.

    Every tensor-parallel rank holds all of it.
    """

    def __init__(self, settings: GeneratorSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        width = shape.out
        self.width = width
        self.time_width = shape.generator.time_width
        self.stretched_side = settings.stretched_side
        self.proj = nn.Linear(shape.media.patch_features, width, dtype=factory.dtype)
        self.time_fc1 = nn.Linear(shape.generator.time_width, width, dtype=factory.dtype)
        self.time_fc2 = nn.Linear(width, width, dtype=factory.dtype)
        self.modulation = nn.Linear(width, NUM_MODULATION_VECTORS * width, dtype=factory.dtype)

    def forward(self, state: GeneratorState, context: GeneratorContext) -> GeneratorState:
        """Embed noisy patches (N, features of a patch) and timesteps (images,)."""
        inputs, dtype = context.inputs, self.proj.weight.dtype
        assert inputs.cells is not None, "the stage with the embedding needs noisy patches"
        assert inputs.timesteps is not None, "the stage with the embedding needs timesteps"
        features = timestep_features(inputs.timesteps, self.time_width).to(dtype)
        timestep = self.time_fc2(F.silu(self.time_fc1(features)))
        modulation = self.modulation(F.silu(timestep)).unflatten(1, (NUM_MODULATION_VECTORS, self.width))
        tokens = self.proj(inputs.cells.to(dtype)) + self._positions(context)
        return GeneratorState(state.context, tokens, modulation, timestep)

    def _positions(self, context: GeneratorContext) -> Tensor:
        dtype, device = self.proj.weight.dtype, context.device
        sizes = zip(context.inputs.rows, context.inputs.cols, strict=True)
        tables = [position_table(*size, self.stretched_side, self.width, dtype, device) for size in sizes]
        return torch.cat(tables) if tables else torch.empty(0, self.width, dtype=dtype, device=device)


class DitBlock(nn.Module):
    """Modulated self-attention, cross-attention to the context, and a modulated MLP, with residual connections."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(NUM_MODULATION_VECTORS, shape.hidden, dtype=factory.dtype))
        self.self_attention = ImageSelfAttention(shape, factory)
        self.cross_attention = ContextAttention(shape, factory)
        self.mlp = ImageMlp(shape, factory)

    def forward(self, state: GeneratorState, context: GeneratorContext) -> GeneratorState:
        """Map hidden states (T, width) to (T, width)."""
        hidden = state.hidden
        assert hidden is not None
        assert state.context is not None
        assert state.modulation is not None
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.modulation + state.modulation).unbind(1)
        attended = self.self_attention(context.modulate(_normalize(hidden), shift, scale), context)
        hidden = context.add_gated(hidden, attended, gate)
        hidden = hidden + self.cross_attention(hidden, state.context, context)
        inner = self.mlp(context.modulate(_normalize(hidden), mlp_shift, mlp_scale))
        return state.with_hidden(context.add_gated(hidden, inner, mlp_gate))


class DitOut(nn.Module):
    """The last norm, modulated by the timestep, and a linear to every patch's noise and its variance."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(2, shape.hidden, dtype=factory.dtype))
        self.proj = nn.Linear(shape.hidden, shape.out, dtype=factory.dtype)

    def forward(self, state: GeneratorState, context: GeneratorContext) -> GeneratorState:
        """Map hidden states (T, width) to (T, 2 * features of a patch): the prediction, then its variance.

        Both have their features in the order of a patch's: (channel, row, column).
        """
        assert state.hidden is not None
        assert state.embedded_timestep is not None
        shift, scale = (self.modulation + state.embedded_timestep[:, None]).unbind(1)
        return state.with_hidden(self.proj(context.modulate(_normalize(state.hidden), shift, scale)))


class ImageSelfAttention(nn.Module):
    """Attention of the tokens of each image to each other. Rows of `linear_qkv` are [query, key, value] by head."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a block; its weights are uninitialized."""
        super().__init__()
        self.head_dim = shape.attention.head_dim
        self.options = AttentionOptions(factory.attention, causal=False)
        inner = shape.attention.inner_width
        self.linear_qkv = factory.column_linear(shape.hidden, 3 * inner, bias=True)
        self.linear_proj = factory.row_linear(inner, shape.hidden, bias=True)

    def forward(self, tokens: Tensor, context: GeneratorContext) -> Tensor:
        """Map (T, width) to (T, width)."""
        heads = self.linear_qkv(tokens)[0].unflatten(1, (-1, 3, self.head_dim))
        queries, keys, values = heads.unbind(2)
        attended = attend(queries, keys, values, context.layout, self.options)
        out: Tensor = self.linear_proj(attended.flatten(1))[0]
        return out


class ContextAttention(nn.Module):
    """Attention of the tokens of each image to its context. Rows of `linear_kv` are [key, value] by head."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a block; its weights are uninitialized."""
        super().__init__()
        self.head_dim = shape.attention.head_dim
        self.num_context_tokens = shape.generator.context
        self.options = AttentionOptions(factory.attention, causal=False)
        inner = shape.attention.inner_width
        self.linear_q = factory.column_linear(shape.hidden, inner, bias=True)
        self.linear_kv = factory.column_linear(shape.generator.context_width, 2 * inner, bias=True)
        self.linear_proj = factory.row_linear(inner, shape.hidden, bias=True)

    def forward(self, tokens: Tensor, image_context: Tensor, context: GeneratorContext) -> Tensor:
        """Map (T, width), with (images * context tokens, context_width), to (T, width)."""
        queries = self.linear_q(tokens)[0].unflatten(1, (-1, self.head_dim))
        keys, values = self.linear_kv(image_context)[0].unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        contexts = context.contexts(self.num_context_tokens)
        attended = attend_to_context(queries, keys, values, context.layout, contexts, self.options)
        out: Tensor = self.linear_proj(attended.flatten(1))[0]
        return out


class ImageMlp(nn.Module):
    """Two linears with GELU between them."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a block; its weights are uninitialized."""
        super().__init__()
        self.linear_fc1 = factory.column_linear(shape.hidden, shape.dense_mlp.ffn, bias=True)
        self.linear_fc2 = factory.row_linear(shape.dense_mlp.ffn, shape.hidden, bias=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (T, width) to (T, width)."""
        out: Tensor = self.linear_fc2(activate(self.linear_fc1(tokens)[0], "gelu_tanh"))[0]
        return out


def _normalize(tokens: Tensor) -> Tensor:
    """Normalize each token, without weights."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=DIT_NORM_EPS)
