"""The vision encoder's embedding layer and context. Its blocks come from the Megatron adapter.

The images of one microbatch are packed one after another: the patches of an image row by row, after its class token if
the model has one.
"""

from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.layer_shape import LayerShape
from mmtrain.models.packed_sequences import PackedSequences
from mmtrain.models.stage_inputs import EncoderInput
from mmtrain.recipe.model_settings import VisionSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VisionContext:
    """What the layers of a vision stage need to know about one microbatch of images."""

    inputs: EncoderInput
    extra_tokens: int  # tokens before each image's patches
    device: torch.device

    @cached_property
    def packing(self) -> PackedSequences:
        """Each image is a sequence of its own."""
        areas = (rows * cols for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True))
        return PackedSequences(tuple(area + self.extra_tokens for area in areas))

    @cached_property
    def patches(self) -> "PatchGrid":
        """Image, row and column of every patch."""
        return PatchGrid.of(self.inputs.rows, self.inputs.cols)

    def to_device(self, index: IntArray) -> Tensor:
        """Copy an index array to the device."""
        return torch.from_numpy(index).to(self.device, non_blocking=True)

    def order_tokens(self, hidden: Tensor, tokens_per_feature: int) -> Tensor:
        """Drop class tokens and bring the patches of each square together; see `EncoderContext.order_tokens`."""
        merge = isqrt(tokens_per_feature)
        if not self.extra_tokens and merge == 1:
            return hidden
        return hidden.index_select(0, self.to_device(self.merge_order(merge)))

    def merge_order(self, merge: int) -> IntArray:
        """Return the packed tokens ordered by image, then by `merge` x `merge` square, then inside the square.

        Squares of an image and patches of a square are ordered row by row. Class tokens are left out.
        """
        for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True):
            if rows % merge or cols % merge:
                raise DataError(
                    f"an image has {rows} x {cols} patches, but the encoder's `merge` {merge} must divide both sides"
                )
        grid = self.patches
        # np.lexsort sorts by its last key first.
        keys = (grid.col % merge, grid.row % merge, grid.col // merge, grid.row // merge, grid.image)
        return grid.token_positions(self.extra_tokens)[np.lexsort(keys)]


@dataclass(frozen=True)
class PatchGrid:
    """Image, row and column of each of N packed patches."""

    image: IntArray  # (N,)
    row: IntArray  # (N,)
    col: IntArray  # (N,)

    @classmethod
    def of(cls, rows: tuple[int, ...], cols: tuple[int, ...]) -> "PatchGrid":
        """Lay out images of `rows[i] x cols[i]` patches, row by row."""
        widths = np.asarray(cols, dtype=np.int64)
        areas = np.asarray(rows, dtype=np.int64) * widths
        image = np.repeat(np.arange(len(areas)), areas)
        position_in_image = np.arange(len(image)) - (np.cumsum(areas) - areas)[image]
        return cls(image, position_in_image // widths[image], position_in_image % widths[image])

    def token_positions(self, extra_tokens: int) -> IntArray:
        """Return the position of each patch among the packed tokens if each image starts with `extra_tokens` others."""
        return np.arange(len(self.image)) + (self.image + 1) * extra_tokens


class PatchEmbed(nn.Module):
    """Linear map of flattened patches, plus positions, and a class token and a first norm where the model has them.

    It is small and its widths need not divide by the TP degree, so every tensor-parallel rank holds all of it.
    """

    def __init__(self, settings: VisionSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        width, side = shape.hidden, shape.max_side
        self.max_side = side
        self.proj = nn.Linear(shape.patch_features, width, bias=shape.linear_bias, dtype=factory.dtype)
        self.class_token = _table(factory, width) if shape.extra_tokens else None
        self.row_positions: nn.Parameter | None = None
        self.col_positions: nn.Parameter | None = None
        self.grid_positions: nn.Parameter | None = None
        if settings.positions == "factorized":
            self.row_positions = _table(factory, side, width)
            self.col_positions = _table(factory, side, width)
        else:
            self.grid_positions = _table(factory, shape.extra_tokens + side * side, width)
        self.pre_norm = factory.norm(width) if settings.pre_norm else None

    def forward(self, hidden: None, context: VisionContext) -> Tensor:
        """Embed patches (N, 3 * patch * patch) to tokens (N + class tokens, hidden)."""
        patches = context.inputs.cells
        grid = context.patches
        assert patches is not None, "the first vision stage needs patches"
        self._check_sides(context.inputs)
        tokens: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        if self.grid_positions is None:
            assert self.row_positions is not None
            assert self.col_positions is not None
            tokens = tokens + self.row_positions[context.to_device(grid.row)]
            tokens = tokens + self.col_positions[context.to_device(grid.col)]
        else:
            position = context.extra_tokens + grid.row * self.max_side + grid.col
            tokens = tokens + self.grid_positions[context.to_device(position)]
        if self.class_token is not None:
            tokens = self._insert_class_tokens(tokens, context)
        return tokens if self.pre_norm is None else self.pre_norm(tokens)

    def _insert_class_tokens(self, tokens: Tensor, context: VisionContext) -> Tensor:
        """Put the class token (plus its own grid position) before the patches of each image."""
        assert self.class_token is not None
        token = self.class_token if self.grid_positions is None else self.class_token + self.grid_positions[0]
        num_images = len(context.inputs.rows)
        class_tokens = token.expand(len(tokens) + num_images, -1)
        return class_tokens.index_copy(0, context.to_device(context.patches.token_positions(1)), tokens)

    def _check_sides(self, inputs: EncoderInput) -> None:
        longest = max((*inputs.rows, *inputs.cols), default=0)
        if longest > self.max_side:
            raise DataError(
                f"an image is {longest} patches long, but the encoder's `max_side` is {self.max_side}: "
                "raise max_side, or lower data.image.max_pixels (`native`) or data.image.size (`fixed`)"
            )


def _table(factory: "LayerFactory", *size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=factory.dtype))
