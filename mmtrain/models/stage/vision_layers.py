"""The vision encoder's embedding layer and context. Its blocks come from the Megatron adapter.

The images of one microbatch are packed one after another: the patches of an image row by row, after its class token if
the model has one. With window attention the patches of an image are ordered window by window, so that the windows are
packed sequences too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.index_tables import HostTables, brought_or_computed
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.rotary_positions import RotaryTables, Rotation, look_up_rotations, rotate_by_axes
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.host_offload import OffloadedBlocks
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe.settings.vision_settings import VisionSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
_COLORS = 3
_CUBIC = np.float32(-0.75)  # the free coefficient of cubic convolution that torch's `grid_sample` has


@dataclass(frozen=True)
class VisionContext:
    """What the layers of a vision stage need to know about one microbatch of images."""

    inputs: EncoderInput
    extra_tokens: int  # tokens before each image's patches
    device: torch.device
    rotary_width: int = 0  # of a head, if queries and keys are rotated by row and column; else 0
    rotary_base: float = 10_000.0  # of the frequencies of this rotation
    window_side: int = 0  # in patches, if some blocks attend inside windows; else 0
    alternates_frequencies: bool = False  # rows and columns take turns among those of a head
    dtype: torch.dtype = torch.float32  # of the rotation
    offloaded: OffloadedBlocks = field(default_factory=OffloadedBlocks, compare=False)

    @property
    def item_lengths(self) -> tuple[int, ...]:
        """See `EncoderContext`."""
        areas = (rows * cols for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True))
        return tuple(area + self.extra_tokens for area in areas)

    @property
    def num_tokens(self) -> int:
        """See `EncoderContext`."""
        return self._item_layout.num_tokens

    def block_packing(self, layer: LayerShape) -> PackedSequences:
        """Each image is a sequence, or each window of an image is one."""
        keys = self.tables(self.index_tables).get("token_keys")
        return PackedSequences(self.block_layout(layer), self._rotation, token_keys=keys)

    def block_layout(self, layer: LayerShape) -> SequenceLayout:
        """See `EncoderContext`."""
        return self._window_layout if layer.attention.window_side else self._item_layout

    @cached_property
    def _item_layout(self) -> SequenceLayout:
        return SequenceLayout(self.item_lengths, (), "items", self.inputs.tables)

    @cached_property
    def patches(self) -> "PatchGrid":
        """Image, row and column of every patch, row by row."""
        return PatchGrid.of(self.inputs.rows, self.inputs.cols)

    @cached_property
    def window_order(self) -> IntArray | None:
        """The packed patches ordered by image, then by window, row by row in each; None without windows."""
        return self.patches.order_by_squares(self.window_side) if self.window_side else None

    @cached_property
    def _window_layout(self) -> SequenceLayout:
        lengths: list[int] = []
        for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True):
            heights, widths = (_cut_side(side, self.window_side) for side in (rows, cols))
            lengths += np.outer(heights, widths).ravel().tolist()
        return SequenceLayout(tuple(lengths), (), "windows", self.inputs.tables)

    @cached_property
    def _rotation(self) -> RotaryTables | None:
        """Rotations of the packed patches: the first half of the angles by the row, the second by the column."""
        if not self.rotary_width:
            return None
        positions = self.tables(self.index_tables)["rotary_positions"]
        if self.alternates_frequencies:
            return self._alternating_rotation(positions)
        rotation = Rotation(self.rotary_width // 2, self.rotary_base)
        num_positions = max((*self.inputs.rows, *self.inputs.cols), default=0)
        by_row, by_col = (look_up_rotations(of_axis, num_positions, rotation, self.dtype) for of_axis in positions)
        cos, sin = (torch.cat(halves, dim=-1) for halves in zip(by_row, by_col, strict=True))
        return cos, sin

    def _alternating_rotation(self, positions: Tensor) -> RotaryTables:
        """Return rotations by the frequencies of a whole head in turns: the 1st by the row, the 2nd by the column.

        Pairs that turn by the row come first all the same.
        """
        axes = (0, 1) * (self.rotary_width // 4)
        in_turns = rotate_by_axes(positions, axes, Rotation(self.rotary_width, self.rotary_base), self.dtype)
        cos, sin = (torch.cat((table[..., 0::2], table[..., 1::2]), dim=-1) for table in in_turns)
        return cos, sin

    def tables(self, compute: Callable[[], HostTables]) -> Mapping[str, Tensor]:
        """See `EncoderContext.tables`."""
        return brought_or_computed(self.inputs.tables, compute, self.device)

    def index_tables(self) -> HostTables:
        """Compute the tables of blocks: row and column of every token, (2, N), if they are rotated, and their keys."""
        keys = self.inputs.token_keys(self.item_lengths)
        if not self.rotary_width:
            return keys
        positions = np.stack((self.patches.row, self.patches.col)).astype(np.int32)
        order = self.window_order
        return keys | {"rotary_positions": positions if order is None else np.ascontiguousarray(positions[:, order])}

    def token_order(self, tokens_per_feature: int) -> IntArray | None:
        """Return the places of the patches, those of each square together; see `EncoderContext.token_order`."""
        merge = isqrt(tokens_per_feature)
        if not self.extra_tokens and not self.window_side and merge == 1:
            return None
        return self.merge_order(merge)

    def merge_order(self, merge: int) -> IntArray:
        """Return the places of the packed tokens, ordered by image, then by `merge` x `merge` square.

        Squares of an image and patches of a square are ordered row by row. Class tokens are left out.
        """
        for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True):
            if rows % merge or cols % merge:
                raise DataError(
                    f"an image has {rows} x {cols} patches, but the encoder's `merge` {merge} must divide both sides"
                )
        order = self.patches.order_by_squares(merge)
        if self.window_order is not None:
            return np.argsort(self.window_order)[order]
        return self.patches.token_positions(self.extra_tokens)[order]


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

    def order_by_squares(self, side: int) -> IntArray:
        """Return the patches ordered by image, then by `side` x `side` square, then inside the square, row by row.

        Squares at the right and lower border may be smaller.
        """
        # np.lexsort sorts by its last key first.
        return np.lexsort((self.col, self.row, self.col // side, self.row // side, self.image)).astype(np.int64)

    def bilinear_corners(
        self, rows: tuple[int, ...], cols: tuple[int, ...], side: int
    ) -> tuple[IntArray, Float32Array]:
        """Return for each patch the four places in a `side` x `side` table around it, and their weights: (4, N) each.

        The table is stretched over each image of `rows[i] x cols[i]` patches, corner on corner.
        """
        return self._neighbors(_linear_neighbors, rows, cols, side)

    def bicubic_neighbors(
        self, rows: tuple[int, ...], cols: tuple[int, ...], side: int
    ) -> tuple[IntArray, Float32Array]:
        """Return for each patch sixteen places in a `side` x `side` table around it, and their weights: (16, N) each.

        The table is stretched over each image of `rows[i] x cols[i]` patches, edge on edge. Beyond its edges are copies
        of its border.
        """
        return self._neighbors(_cubic_neighbors, rows, cols, side)

    def _neighbors(
        self, along_side: "_AlongSide", rows: tuple[int, ...], cols: tuple[int, ...], side: int
    ) -> tuple[IntArray, Float32Array]:
        """Combine the neighbors of each patch along rows with those along columns."""
        row_places, row_weights = along_side(self.row, np.asarray(rows, dtype=np.int64)[self.image], side)
        col_places, col_weights = along_side(self.col, np.asarray(cols, dtype=np.int64)[self.image], side)
        pairs = [(i, j) for i in range(len(row_places)) for j in range(len(col_places))]
        places = np.stack([row_places[i] * side + col_places[j] for i, j in pairs])
        return places, np.stack([row_weights[i] * col_weights[j] for i, j in pairs])

    def token_positions(self, extra_tokens: int) -> IntArray:
        """Return the position of each patch among the packed tokens if each image starts with `extra_tokens` others."""
        return np.arange(len(self.image)) + (self.image + 1) * extra_tokens


def _cut_side(length: int, window_side: int) -> list[int]:
    """Return the sides of the windows along a side of an image; the last may be smaller."""
    return [min(window_side, length - start) for start in range(0, length, window_side)]


# (index, length, side) -> neighbors among `side` places of point `index` of `length`, and their weights: (K, N) each.
_AlongSide = Callable[[IntArray, IntArray, int], tuple[IntArray, Float32Array]]


def _linear_neighbors(index: IntArray, length: IntArray, side: int) -> tuple[IntArray, Float32Array]:
    """Return the two neighbors among `side` places of point `index` of `length` between both ends, and their weights.

    In fp32, as `transformers` computes them. Both results are (2, N).
    """
    place = index.astype(np.float32) * np.float32(side - 1) / np.maximum(length - 1, 1).astype(np.float32)
    lower = np.floor(place)
    upper_weight = (place - lower).astype(np.float32)
    first = lower.astype(np.int64)
    return np.stack((first, np.minimum(first + 1, side - 1))), np.stack((1 - upper_weight, upper_weight))


def _cubic_neighbors(index: IntArray, length: IntArray, side: int) -> tuple[IntArray, Float32Array]:
    """Return the four neighbors among `side` places of the middle of part `index` of `length`, and their weights.

    In fp32, step by step as `transformers` calls `grid_sample` without aligned corners. Both results are (4, N).
    """
    half, one = np.float32(0.5), np.float32(1)
    from_middle = (index.astype(np.float32) + half) / length.astype(np.float32) * 2 - one  # in [-1, 1]
    place = ((from_middle + one) * np.float32(side) - one) / 2
    lower = np.floor(place)
    beyond = (place - lower).astype(np.float32)
    weights = (_far_weight(beyond + one), _near_weight(beyond), _near_weight(one - beyond), _far_weight(2 - beyond))
    places = lower.astype(np.int64) + np.arange(-1, 3)[:, None]
    return np.clip(places, 0, side - 1), np.stack(weights)


def _near_weight(distance: Float32Array) -> Float32Array:
    """Return the weight of cubic convolution at a distance up to 1."""
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far_weight(distance: Float32Array) -> Float32Array:
    """Return the weight of cubic convolution at a distance from 1 to 2."""
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


class PatchEmbed(nn.Module):
    """Linear map of flattened patches, plus positions, and a class token and first norms where the model has them.

    It is small and its widths need not divide by the TP degree, so every tensor-parallel rank holds all of it.
    """

    def __init__(self, settings: VisionSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        width, side = shape.hidden, shape.media.max_side
        self.max_side = side
        self.position_grid = settings.position_grid
        self.is_bicubic = settings.position_interpolation == "bicubic"
        self.reads_pixels = settings.patch_order == "pixels"  # one after the other, instead of colors
        self.proj = nn.Linear(shape.media.patch_features, width, bias=shape.linear_bias, dtype=factory.dtype)
        self.class_token = _table(factory, width) if shape.extra_tokens else None
        self.row_positions: nn.Parameter | None = None
        self.col_positions: nn.Parameter | None = None
        self.grid_positions: nn.Parameter | None = None
        if settings.has_position_tables:
            self.row_positions = _table(factory, side, width)
            self.col_positions = _table(factory, side, width)
        elif shape.media.position_rows:
            self.grid_positions = _table(factory, shape.media.position_rows, width)
        self.patch_norm = factory.norm(width) if settings.patch_norm else None
        self.pre_norm = factory.norm(width) if settings.pre_norm else None

    def forward(self, hidden: None, context: VisionContext) -> Tensor:
        """Embed patches (N, features of a patch) to tokens (N + class tokens, hidden)."""
        patches = context.inputs.numbers(self.proj.weight.dtype)
        assert patches is not None, "the first vision stage needs patches"
        self._check_sides(context.inputs)
        tables = context.tables(partial(self.index_tables, context))
        if self.reads_pixels:
            patches = patches.view(len(patches), _COLORS, patches.shape[1] // _COLORS).transpose(1, 2).flatten(1)
        tokens: Tensor = self.proj(patches)
        if self.patch_norm is not None:
            tokens = self.patch_norm(tokens)
        tokens = self._add_positions(tokens, tables)
        if self.class_token is not None:
            tokens = self._insert_class_tokens(tokens, len(context.inputs.rows), tables)
        if context.window_side:
            tokens = tokens.index_select(0, tables["window_order"])
        return tokens if self.pre_norm is None else self.pre_norm(tokens)

    def index_tables(self, context: VisionContext) -> HostTables:
        """See `TableUser`: where patches find their positions, and where they stand among class tokens and windows."""
        self._check_sides(context.inputs)
        grid, inputs = context.patches, context.inputs
        tables: HostTables = {}
        if self.row_positions is not None:
            tables |= {"patch_rows": grid.row, "patch_cols": grid.col}
        elif self.position_grid:
            neighbors = grid.bicubic_neighbors if self.is_bicubic else grid.bilinear_corners
            places, weights = neighbors(inputs.rows, inputs.cols, self.position_grid)
            tables |= {"neighbor_places": places, "neighbor_weights": weights[:, :, None]}
        elif self.grid_positions is not None:
            tables["grid_places"] = context.extra_tokens + grid.row * self.max_side + grid.col
        if self.class_token is not None:
            tables["token_sources"] = _among_class_tokens(grid, len(inputs.rows))
        if context.window_order is not None:
            tables["window_order"] = context.window_order
        return tables

    def _add_positions(self, tokens: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """Add the learned positions, if there are any, to the tokens of patches."""
        # `F.embedding` sums the gradients of a position's patches by sorting; an index's backward takes their turns.
        if self.row_positions is not None:
            assert self.col_positions is not None
            tokens = tokens + F.embedding(tables["patch_rows"], self.row_positions)
            return tokens + F.embedding(tables["patch_cols"], self.col_positions)
        if self.position_grid:
            assert self.grid_positions is not None
            return tokens + _interpolate(self.grid_positions, tables).to(tokens.dtype)
        if self.grid_positions is not None:
            return tokens + F.embedding(tables["grid_places"], self.grid_positions)
        return tokens

    def _insert_class_tokens(self, tokens: Tensor, num_images: int, tables: Mapping[str, Tensor]) -> Tensor:
        """Put the class token (plus its own grid position) before the patches of each image."""
        assert self.class_token is not None
        token = self.class_token if self.grid_positions is None else self.class_token + self.grid_positions[0]
        # A copy by `index_copy` would keep the tokens until backward.
        return torch.cat((tokens, token.expand(num_images, -1))).index_select(0, tables["token_sources"])

    def _check_sides(self, inputs: EncoderInput) -> None:
        longest = max((*inputs.rows, *inputs.cols), default=0)
        if longest > self.max_side:
            raise DataError(
                f"an image is {longest} patches long, but the encoder's `max_side` is {self.max_side}: "
                "raise max_side, or lower data.image.max_pixels (`native`) or data.image.size (`fixed`)"
            )


def _among_class_tokens(grid: PatchGrid, num_images: int) -> IntArray:
    """Return where each token stands among all patches, followed by a class token of each image."""
    is_patch = np.zeros(len(grid.image) + num_images, dtype=np.bool_)
    is_patch[grid.token_positions(1)] = True
    # A stable sort: patches keep their order, and so do class tokens.
    return np.argsort(np.argsort(~is_patch, kind="stable"))


def _interpolate(grid_positions: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
    """Interpolate learned positions at every patch, in fp32: (N, hidden)."""
    places, weights = tables["neighbor_places"], tables["neighbor_weights"]
    interpolated = F.embedding(places[0], grid_positions) * weights[0]
    for place, weight in zip(places[1:], weights[1:], strict=True):
        interpolated = interpolated + F.embedding(place, grid_positions) * weight
    return interpolated


def _table(factory: "LayerFactory", *size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=factory.dtype))
