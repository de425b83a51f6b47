"""The vision unit's layers: patch embedding, and the projector that closes any encoder. Blocks come from the adapter.

Images of one microbatch lie packed one after another, each with its patches row by row, after its class token if the
model has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.attention import PackedSequences
from mmtrain.models.audio_layers import AudioContext
from mmtrain.models.model_shape import LayerShape
from mmtrain.models.stage_inputs import VisionInput
from mmtrain.recipe.model_settings import AudioSettings, VisionSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VisionContext:
    """One microbatch of images as every layer of a vision stage sees it."""

    inputs: VisionInput
    extra_tokens: int  # tokens before each image's patches
    device: torch.device

    @cached_property
    def packing(self) -> PackedSequences:
        """Each image is a sequence of its own."""
        areas = (r * c for r, c in zip(self.inputs.rows, self.inputs.cols, strict=True))
        return PackedSequences(tuple(area + self.extra_tokens for area in areas))

    @cached_property
    def patches(self) -> "PatchGrid":
        """Where every patch lies in its image."""
        return PatchGrid.of(self.inputs.rows, self.inputs.cols)

    def to_device(self, index: IntArray) -> Tensor:
        """Return an index array on the device."""
        return torch.from_numpy(index).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class PatchGrid:
    """For each of N packed patches: its image, row and column."""

    image: IntArray  # (N,)
    row: IntArray  # (N,)
    col: IntArray  # (N,)

    @classmethod
    def of(cls, rows: tuple[int, ...], cols: tuple[int, ...]) -> "PatchGrid":
        """Lay out images of `rows[i] x cols[i]` patches, row by row."""
        widths = np.asarray(cols, dtype=np.int64)
        areas = np.asarray(rows, dtype=np.int64) * widths
        image = np.repeat(np.arange(len(areas)), areas)
        inside = np.arange(len(image)) - (np.cumsum(areas) - areas)[image]
        return cls(image, inside // widths[image], inside % widths[image])

    def token_positions(self, extra_tokens: int) -> IntArray:
        """Place of each patch among the packed tokens when every image starts with `extra_tokens` others."""
        return np.arange(len(self.image)) + (self.image + 1) * extra_tokens


class PatchEmbed(nn.Module):
    """Linear map of flattened patches, plus positions, a class token and a first norm where the model has them.

    Small and not divisible by heads, so every tensor-parallel rank holds it whole.
    """

    def __init__(self, settings: VisionSettings, shape: LayerShape, parts: "LayerFactory") -> None:
        super().__init__()
        width, side = shape.hidden, shape.max_side
        self.side = side
        self.proj = nn.Linear(shape.patch_features, width, bias=shape.linear_bias, dtype=parts.dtype)
        self.class_token = _table(parts, width) if shape.extra_tokens else None
        self.row_positions: nn.Parameter | None = None
        self.col_positions: nn.Parameter | None = None
        self.grid_positions: nn.Parameter | None = None
        if settings.positions == "factorized":
            self.row_positions = _table(parts, side, width)
            self.col_positions = _table(parts, side, width)
        else:
            self.grid_positions = _table(parts, shape.extra_tokens + side * side, width)
        self.pre_norm = parts.norm(width) if settings.pre_norm else None

    def forward(self, hidden: None, context: VisionContext) -> Tensor:
        """Embed patches (N, 3 * patch * patch) to tokens (N + class tokens, hidden)."""
        patches, grid = context.inputs.patches, context.patches
        assert patches is not None, "the first vision stage needs patches"
        self._check_sides(context.inputs)
        tokens: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        if self.grid_positions is None:
            assert self.row_positions is not None
            assert self.col_positions is not None
            tokens = tokens + self.row_positions[context.to_device(grid.row)]
            tokens = tokens + self.col_positions[context.to_device(grid.col)]
        else:
            cell = context.extra_tokens + grid.row * self.side + grid.col
            tokens = tokens + self.grid_positions[context.to_device(cell)]
        if self.class_token is not None:
            tokens = self._insert_class_tokens(tokens, context)
        return tokens if self.pre_norm is None else self.pre_norm(tokens)

    def _insert_class_tokens(self, tokens: Tensor, context: VisionContext) -> Tensor:
        """Put the class token (with its own grid position) before each image's patches."""
        assert self.class_token is not None
        token = self.class_token if self.grid_positions is None else self.class_token + self.grid_positions[0]
        num_images = len(context.inputs.rows)
        mixed = token.expand(len(tokens) + num_images, -1)
        return mixed.index_copy(0, context.to_device(context.patches.token_positions(1)), tokens)

    def _check_sides(self, inputs: VisionInput) -> None:
        longest = max((*inputs.rows, *inputs.cols), default=0)
        if longest > self.side:
            raise DataError(
                f"an image is {longest} patches long, but model.vision.max_side is {self.side}: "
                "raise max_side, or lower data.image.max_pixels (`native`) or data.image.size (`fixed`)"
            )


class Projector(nn.Module):
    """Closes an encoder: last norm, class tokens dropped, neighbours joined, two linears to the LLM's width.

    Neighbours are a square of patches, whose tokens are put in order first, or tokens that follow each other in time.
    """

    def __init__(
        self,
        settings: VisionSettings | AudioSettings,
        shape: LayerShape,
        parts: "LayerFactory",
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.merge = settings.merge if isinstance(settings, VisionSettings) else 1
        self.joins = shape.joins
        self.activation = activation
        joined = shape.hidden * shape.joins
        post_norm = settings.post_norm if isinstance(settings, VisionSettings) else True  # Whisper always has it
        self.post_norm = parts.norm(shape.hidden) if post_norm else None
        self.norm = parts.norm(joined) if settings.projector.norm else None
        self.linear_1 = parts.column_linear(joined, shape.ffn, bias=shape.linear_bias)
        self.linear_2 = parts.row_linear(shape.ffn, shape.out, bias=shape.linear_bias)

    def forward(self, hidden: Tensor, context: VisionContext | AudioContext) -> Tensor:
        """Map tokens (T, hidden) to features (F, llm_hidden), `joins` patches or tokens of a clip to each."""
        if self.post_norm is not None:
            hidden = self.post_norm(hidden)
        if isinstance(context, VisionContext):
            if context.extra_tokens or self.merge > 1:
                hidden = hidden.index_select(0, context.to_device(self.feature_order(context)))
        else:
            self._check_clips(context)
        features = hidden.reshape(-1, hidden.shape[1] * self.joins)
        if self.norm is not None:
            features = self.norm(features)
        inner: Tensor = self.activation(self.linear_1(features)[0])
        out: Tensor = self.linear_2(inner)[0]
        return out

    def feature_order(self, context: VisionContext) -> IntArray:
        """Tokens in the order of features: by image, square of neighbours, place inside the square; row by row."""
        inputs, grid, merge = context.inputs, context.patches, self.merge
        for rows, cols in zip(inputs.rows, inputs.cols, strict=True):
            if rows % merge or cols % merge:
                raise DataError(
                    f"an image has {rows} x {cols} patches, but model.vision.merge {merge} must divide both sides"
                )
        order = np.lexsort((grid.col % merge, grid.row % merge, grid.col // merge, grid.row // merge, grid.image))
        return grid.token_positions(context.extra_tokens)[order]

    def _check_clips(self, context: AudioContext) -> None:
        for frames in context.inputs.frames:
            if frames % (2 * self.joins):
                raise DataError(
                    f"a clip has {frames} log-mel frames, not a multiple of 2 x model.audio.downsample {self.joins}"
                )


def _table(parts: "LayerFactory", *size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=parts.dtype))
