"""Describe which elements of a tensor a stored piece holds, and where two pieces overlap.

A piece is cut in two steps, as training shards tensors: tensor parallelism takes rows [start, stop) along one
dimension, then ZeRO-1 takes elements [lo, hi) of the flattened rest. The result is a list of *regions*: boxes of the
full tensor that are contiguous in the flattened piece. Two pieces of a tensor, cut for any two meshes, overlap exactly
in the intersections of their regions; resharding needs nothing else.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]  # [lo, hi) along each dimension of the full tensor
_SPEC_TEXT = re.compile(r"(?:whole|(\d+)\[(\d+):(\d+)\])(?:\{(\d+):(\d+)\})?")


@dataclass(frozen=True)
class Region:
    """A box of the full tensor whose elements lie at [offset, offset + size) of the flattened piece."""

    box: Box
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each dimension."""
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, box: Box) -> tuple[slice, ...]:
        """Return the index of `box`, which lies inside this region, in an array of this region's shape."""
        return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(box, self.box, strict=True))


@dataclass(frozen=True)
class ShardSpec:
    """Rows [start, stop) along `dim` of a tensor of `full_shape` (`dim` None: all rows); with `flat`, only elements
    [lo, hi) of these rows, flattened.

    A weight whose tensor-parallel shard is not one range of rows is described as a view. Megatron's gated MLP stacks
    gate and up projections, (2 * ffn, hidden), and shards each; as (2, ffn, hidden) it is sharded along dim 1.

    Raises ValueError for a range outside the tensor.

    >>> ShardSpec((4, 6), 0, 2, 4).shape
    (2, 6)
    >>> ShardSpec((4, 6), 0, 2, 4, flat=(3, 12)).to_text()
    '0[2:4]{3:12}'
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.dim is None:
            if (self.start, self.stop) != (0, 0):
                raise ValueError(f"rows [{self.start}, {self.stop}) without a dim")
        elif not 0 <= self.dim < len(self.full_shape):
            raise ValueError(f"dim {self.dim} of a tensor of shape {self.full_shape}")
        elif not 0 <= self.start <= self.stop <= self.full_shape[self.dim]:
            raise ValueError(f"rows [{self.start}, {self.stop}) along dim {self.dim} of shape {self.full_shape}")
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= math.prod(self._box_shape):
            raise ValueError(f"elements {self.flat} of a piece of shape {self._box_shape}")

    @property
    def _box_shape(self) -> tuple[int, ...]:
        """The shape after the first cut."""
        if self.dim is None:
            return self.full_shape
        return (*self.full_shape[: self.dim], self.stop - self.start, *self.full_shape[self.dim + 1 :])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor; one-dimensional for a flat piece."""
        return self._box_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def regions(self) -> list[Region]:
        """Return the piece as boxes of the full tensor, in storage order; at most 2 * ndim - 1 boxes."""
        lo, hi = self.flat or (0, math.prod(self._box_shape))
        regions = []
        offset = 0
        for box in _boxes_of_range(self._box_shape, lo, hi):
            placed = tuple(
                (a + self.start, b + self.start) if axis == self.dim else (a, b) for axis, (a, b) in enumerate(box)
            )
            regions.append(Region(placed, offset))
            offset += regions[-1].size
        return regions

    def to_text(self) -> str:
        """Write the piece without the full shape: `whole`, `0[2:4]`, `0[2:4]{3:12}`."""
        rows = "whole" if self.dim is None else f"{self.dim}[{self.start}:{self.stop}]"
        return rows if self.flat is None else f"{rows}{{{self.flat[0]}:{self.flat[1]}}}"

    @classmethod
    def from_text(cls, text: str, full_shape: tuple[int, ...]) -> "ShardSpec":
        """Parse what `to_text` wrote. Raises ValueError."""
        match = _SPEC_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a piece of a tensor: {text!r}")
        dim, start, stop, lo, hi = (None if group is None else int(group) for group in match.groups())
        return cls(full_shape, dim, start or 0, stop or 0, None if lo is None or hi is None else (lo, hi))


@dataclass(frozen=True)
class Shard:
    """A named piece with its values. A tensor on a GPU is copied to the host when it is written.

    Raises ValueError if the tensor's shape is not the spec's.
    """

    name: str
    spec: ShardSpec
    tensor: "torch.Tensor"

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.spec.shape:
            raise ValueError(
                f"{self.name}: tensor of shape {tuple(self.tensor.shape)} for a piece of {self.spec.shape}"
            )


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor, or None."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(lo < hi for lo, hi in common) else None


def _boxes_of_range(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[Box]:
    """Cut elements [lo, hi) of a row-major array into boxes: the end of a row, whole rows, the start of a row."""
    if lo >= hi:
        return
    if lo == 0 and hi == math.prod(shape):
        yield tuple((0, n) for n in shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # whole rows are [first, last)
    if first > last:  # inside one row
        yield from (((last, last + 1), *rest) for rest in _boxes_of_range(shape[1:], lo - last * row, hi - last * row))
        return
    if lo < first * row:
        yield from (((first - 1, first), *rest) for rest in _boxes_of_range(shape[1:], lo - (first - 1) * row, row))
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    yield from (((last, last + 1), *rest) for rest in _boxes_of_range(shape[1:], 0, hi - last * row))
