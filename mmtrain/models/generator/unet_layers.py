"""The layers of a U-Net: Stable Diffusion 2.1 (Rombach et al., arXiv 2112.10752), equal to `diffusers`.

Images of equal size are convolved as one batch, so a microbatch with images of several sizes has a batch of each. On
the way down, a residual or downsampling layer keeps its input; on the way up, residual layers read these again, the
last one first. Tensor parallelism does not split a U-Net: every rank of a group computes all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from mmtrain.errors import DataError
from mmtrain.models.generator.timestep_features import timestep_features
from mmtrain.models.kernels.elementwise import activate_gated
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.generator_input import GeneratorContext, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

_GROUP_NORM_EPS = 1e-5  # of residual layers and of the last norm (Stable Diffusion)
_ATTENTION_GROUP_NORM_EPS = 1e-6  # of the norm before attention
_LAYER_NORM_EPS = 1e-5
_KERNEL_SIDE = 3


@dataclass(frozen=True)
class ImageBatch:
    """The images of one size: n of them."""

    images: tuple[int, ...]  # which images of the microbatch
    features: Tensor  # (n, channels, rows, columns)
    timestep: Tensor  # (n, time_width)
    context: Tensor  # (n, context tokens, context_width)
    kept: tuple[Tensor, ...] = ()  # inputs of layers on the way down that layers on the way up will read


@dataclass(frozen=True)
class UnetState:
    """What passes from layer to layer of a U-Net."""

    batches: tuple[ImageBatch, ...]
    num_to_keep: int  # inputs that layers still have to keep; 0 from the middle of the U-Net on

    def with_features(self, compute: Callable[[ImageBatch], Tensor]) -> "UnetState":
        """Return the state with other features of each batch."""
        return replace(self, batches=tuple(replace(batch, features=compute(batch)) for batch in self.batches))

    def keep_inputs(self) -> "UnetState":
        """Return the state after a layer has kept its input for the way up, if that is still to do."""
        if not self.num_to_keep:
            return self
        batches = tuple(replace(batch, kept=(*batch.kept, batch.features)) for batch in self.batches)
        return UnetState(batches, self.num_to_keep - 1)

    def join_kept(self, channels: int) -> "UnetState":
        """Return the state with the last kept input beside the features, if `channels` are more than these have."""
        return replace(self, batches=tuple(_join_kept(batch, channels) for batch in self.batches))


for _state in (ImageBatch, UnetState):  # see `GeneratorState`
    register_dataclass(_state)


def _join_kept(batch: ImageBatch, channels: int) -> ImageBatch:
    if batch.features.shape[1] == channels:
        return batch
    return replace(batch, features=torch.cat((batch.features, batch.kept[-1]), dim=1), kept=batch.kept[:-1])


class UnetEmbed(nn.Module):
    """A convolution of noisy images, and the embedding of timesteps."""

    def __init__(self, settings: GeneratorSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        num_levels = len(settings.widths)
        self.channels = shape.hidden
        self.context_tokens = settings.context_tokens
        self.divisor = 2 ** (num_levels - 1)
        self.num_to_keep = num_levels * settings.layers + num_levels
        self.conv = _convolution(shape.hidden, shape.out, factory)
        self.time_fc1 = nn.Linear(shape.out, shape.generator.time_width, dtype=factory.dtype)
        self.time_fc2 = nn.Linear(shape.generator.time_width, shape.generator.time_width, dtype=factory.dtype)

    def forward(self, state: GeneratorState, context: GeneratorContext) -> UnetState:
        """Embed noisy positions (N, channels) and timesteps (images,), and sort images by size.

        Raises:
            DataError: the levels do not divide the sides of an image.
        """
        inputs, dtype = context.inputs, self.conv.weight.dtype
        assert inputs.cells is not None, "a U-Net needs noisy images"
        assert inputs.timesteps is not None, "a U-Net needs timesteps"
        assert state.context is not None
        self._check_sides(context)
        features = timestep_features(inputs.timesteps, self.time_fc1.in_features).to(dtype)
        timestep = self.time_fc2(F.silu(self.time_fc1(features)))
        context_width = state.context.shape[-1]
        image_context = state.context.view(-1, self.context_tokens, context_width)
        cells_of_images = torch.split(inputs.cells.to(dtype), list(context.item_lengths))
        batches = []
        # Of a microbatch without images a batch of none, for weights' gradients.
        by_size = context.images_by_size or {(self.divisor, self.divisor): ()}
        for size, images in by_size.items():
            cells = [cells_of_images[image] for image in images]
            batch = torch.stack(cells) if cells else timestep.new_empty(0, size[0] * size[1], self.channels)
            pixels = batch.transpose(1, 2).unflatten(2, size)
            time_of_batch, context_of_batch = (context.of_size(rows, size) for rows in (timestep, image_context))
            batches.append(ImageBatch(images, self.conv(pixels), time_of_batch, context_of_batch))
        return UnetState(tuple(batches), self.num_to_keep)

    def _check_sides(self, context: GeneratorContext) -> None:
        for rows, cols in zip(context.inputs.rows, context.inputs.cols, strict=True):
            if rows % self.divisor or cols % self.divisor:
                raise DataError(
                    f"a target image has {rows} x {cols} latent positions, but the U-Net halves both sides "
                    f"{self.divisor.bit_length() - 1} times: both must be multiples of {self.divisor}"
                )


class ImageNorm(nn.GroupNorm):
    """A norm over groups of channels of each image."""

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns) to the same shape."""
        needs_weights_alone = self.weight.requires_grad and not features.requires_grad
        if needs_weights_alone and torch.is_grad_enabled():
            # On CPUs the backward of torch 2.13 crashes on channels-last features without a gradient of their own.
            features = features.contiguous()
        return super().forward(features)


class UnetResidual(nn.Module):
    """Two convolutions behind norms, with the timestep added between them, beside a residual connection."""

    def __init__(self, settings: GeneratorSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.channels = shape.hidden
        self.norm1 = ImageNorm(settings.norm_groups, shape.hidden, eps=_GROUP_NORM_EPS, dtype=factory.dtype)
        self.conv1 = _convolution(shape.hidden, shape.out, factory)
        self.time = nn.Linear(shape.generator.time_width, shape.out, dtype=factory.dtype)
        self.norm2 = ImageNorm(settings.norm_groups, shape.out, eps=_GROUP_NORM_EPS, dtype=factory.dtype)
        self.conv2 = _convolution(shape.out, shape.out, factory)
        self.shortcut: nn.Module | None = None
        if shape.hidden != shape.out:
            self.shortcut = nn.Conv2d(shape.hidden, shape.out, 1, dtype=factory.dtype)

    def forward(self, state: UnetState, context: GeneratorContext) -> UnetState:
        """Map features (n, channels, rows, columns) of each batch, which may gain kept ones first."""
        return state.keep_inputs().join_kept(self.channels).with_features(self._run)

    def _run(self, batch: ImageBatch) -> Tensor:
        features = batch.features
        inner = self.conv1(F.silu(self.norm1(features))) + self.time(F.silu(batch.timestep))[:, :, None, None]
        added: Tensor = self.conv2(F.silu(self.norm2(inner)))
        return added + (features if self.shortcut is None else self.shortcut(features))


class UnetAttention(nn.Module):
    """Self-attention, cross-attention to the context and a gated MLP over all positions, beside a residual connection.

    Rows of `linear_qkv` are [query, key, value] by head, those of `linear_kv` [key, value]. The first half of the
    outputs of `mlp.linear_fc1` are the gates.
    """

    def __init__(self, settings: GeneratorSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        width = shape.hidden
        self.norm = ImageNorm(settings.norm_groups, width, eps=_ATTENTION_GROUP_NORM_EPS, dtype=factory.dtype)
        self.linear_in = nn.Linear(width, width, dtype=factory.dtype)
        self.self_attention_norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS, dtype=factory.dtype)
        self.self_attention = PixelSelfAttention(shape, factory)
        self.cross_attention_norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS, dtype=factory.dtype)
        self.cross_attention = PixelContextAttention(shape, factory)
        self.mlp_norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS, dtype=factory.dtype)
        self.mlp = PixelMlp(shape, factory)
        self.linear_out = nn.Linear(width, width, dtype=factory.dtype)

    def forward(self, state: UnetState, context: GeneratorContext) -> UnetState:
        """Map features (n, channels, rows, columns) of each batch."""
        return state.with_features(self._run)

    def _run(self, batch: ImageBatch) -> Tensor:
        features = batch.features
        tokens = self.linear_in(self.norm(features).flatten(2).transpose(1, 2))
        tokens = tokens + self.self_attention(self.self_attention_norm(tokens))
        tokens = tokens + self.cross_attention(self.cross_attention_norm(tokens), batch.context)
        tokens = tokens + self.mlp(self.mlp_norm(tokens))
        added: Tensor = self.linear_out(tokens).transpose(1, 2).reshape(features.shape)
        return features + added


class PixelSelfAttention(nn.Module):
    """Attention of the positions of each image to each other."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a layer; its weights are uninitialized."""
        super().__init__()
        self.head_dim = shape.attention.head_dim
        self.linear_qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False, dtype=factory.dtype)
        self.linear_proj = nn.Linear(shape.hidden, shape.hidden, dtype=factory.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, positions, channels) to the same shape."""
        queries, keys, values = self.linear_qkv(tokens).unflatten(2, (-1, 3, self.head_dim)).unbind(3)
        out: Tensor = self.linear_proj(_attend(queries, keys, values))
        return out


class PixelContextAttention(nn.Module):
    """Attention of the positions of each image to its context."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a layer; its weights are uninitialized."""
        super().__init__()
        self.head_dim = shape.attention.head_dim
        self.linear_q = nn.Linear(shape.hidden, shape.hidden, bias=False, dtype=factory.dtype)
        self.linear_kv = nn.Linear(shape.generator.context_width, 2 * shape.hidden, bias=False, dtype=factory.dtype)
        self.linear_proj = nn.Linear(shape.hidden, shape.hidden, dtype=factory.dtype)

    def forward(self, tokens: Tensor, image_context: Tensor) -> Tensor:
        """Map (n, positions, channels), with (n, context tokens, context_width), to (n, positions, channels)."""
        queries = self.linear_q(tokens).unflatten(2, (-1, self.head_dim))
        keys, values = self.linear_kv(image_context).unflatten(2, (-1, 2, self.head_dim)).unbind(3)
        out: Tensor = self.linear_proj(_attend(queries, keys, values))
        return out


class PixelMlp(nn.Module):
    """A gated MLP with GELU (GEGLU)."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of a layer; its weights are uninitialized."""
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden, 2 * shape.dense_mlp.ffn, dtype=factory.dtype)
        self.linear_fc2 = nn.Linear(shape.dense_mlp.ffn, shape.hidden, dtype=factory.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, positions, channels) to the same shape."""
        out: Tensor = self.linear_fc2(activate_gated(self.linear_fc1(tokens), "gelu", fused=False))
        return out


class UnetDown(nn.Module):
    """A convolution that halves both sides."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.conv = _convolution(shape.hidden, shape.out, factory, stride=2)

    def forward(self, state: UnetState, context: GeneratorContext) -> UnetState:
        """Map features (n, channels, rows, columns) of each batch to half the rows and columns."""
        return state.keep_inputs().with_features(lambda batch: self.conv(batch.features))


class UnetUp(nn.Module):
    """Every position becomes four equal ones, before a convolution."""

    def __init__(self, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.conv = _convolution(shape.hidden, shape.out, factory)

    def forward(self, state: UnetState, context: GeneratorContext) -> UnetState:
        """Map features (n, channels, rows, columns) of each batch to twice the rows and columns."""
        return state.with_features(lambda batch: self.conv(F.interpolate(batch.features, scale_factor=2.0)))


class UnetOut(nn.Module):
    """The last norm and a convolution to the prediction."""

    def __init__(self, settings: GeneratorSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.norm = ImageNorm(settings.norm_groups, shape.hidden, eps=_GROUP_NORM_EPS, dtype=factory.dtype)
        self.conv = _convolution(shape.hidden, shape.out, factory)

    def forward(self, state: UnetState, context: GeneratorContext) -> GeneratorState:
        """Map features of all batches to packed positions (N, channels of the latent image), in the images' order."""
        parts: dict[int, Tensor] = {}
        rows: list[Tensor] = []
        for batch in state.batches:
            prediction = self.conv(F.silu(self.norm(batch.features))).flatten(2).transpose(1, 2)
            parts |= dict(zip(batch.images, prediction, strict=True))
            rows.append(prediction.flatten(0, 1))
        if len(rows) > 1:
            rows = [parts[image] for image in range(context.num_images)]
        return GeneratorState(None, rows[0] if len(rows) == 1 else torch.cat(rows))


def _convolution(channels: int, out: int, factory: "LayerFactory", stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, _KERNEL_SIDE, stride=stride, padding=1, dtype=factory.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend to keys and values (n, keys, heads, d) from queries (n, positions, heads, d): (n, positions, width)."""
    if not len(queries):  # not every kernel of torch takes a batch of none
        return queries.flatten(2) + (keys.sum() + values.sum()) * 0
    out = F.scaled_dot_product_attention(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)
