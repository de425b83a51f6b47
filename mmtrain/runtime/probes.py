"""Loads to measure layers on, like those a recipe's microbatches will be, and the inputs that have them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mmtrain.costs import TokenLoad
from mmtrain.models.inputs import AudioInput, TextInput, UnitInput, VisionInput
from mmtrain.models.shape import UnitShape
from mmtrain.recipe.schema import Recipe

NODES = 5  # numbers of tokens, each twice the one before
HELD_OUT = (0.37, 0.74)  # of the largest load


@dataclass(frozen=True)
class Probe:
    """A microbatch to measure on: of images `sizes` are (rows, cols), of clips frames, of sequences tokens."""

    unit: str
    sizes: tuple[tuple[int, int], ...] | tuple[int, ...]
    extra_tokens: int = 0

    @property
    def load(self) -> TokenLoad:
        """What layers see of it."""
        return TokenLoad.of(np.array([self._tokens(size) for size in self.sizes]))

    def inputs(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> UnitInput:
        """Random payload of this size."""
        if self.unit == "vision":
            assert recipe.model.vision is not None
            rows, cols = (tuple(size[k] for size in self.sizes) for k in (0, 1))  # type: ignore[index]
            num_patches = sum(r * c for r, c in zip(rows, cols, strict=True))
            features = 3 * recipe.model.vision.patch**2
            return VisionInput(rows, cols, torch.randn(num_patches, features, device=device, dtype=dtype))
        lengths = tuple(int(size) for size in self.sizes)  # type: ignore[arg-type]
        if self.unit == "audio":
            assert recipe.model.audio is not None
            mels = torch.randn(sum(lengths), recipe.model.audio.mel_bins, device=device, dtype=dtype)
            return AudioInput(lengths, mels)
        ids = torch.randint(0, recipe.model.llm.vocab, (sum(lengths),), device=device)
        return TextInput(lengths, ids, ids.roll(-1))

    def _tokens(self, size: tuple[int, int] | int) -> int:
        if isinstance(size, tuple):
            return size[0] * size[1] + self.extra_tokens
        return size // 2 if self.unit == "audio" else size


def probes(recipe: Recipe, unit: UnitShape) -> tuple[list[Probe], list[Probe]]:
    """Loads to fit a unit's costs to, and others to hold the fit against.

    The largest is what fills `data.seq_len`. Each number of tokens comes as few long items and as many short ones,
    which tells apart what attention costs and what each item does.
    """
    largest = recipe.data.seq_len * unit.layers[-1].joins  # of an encoder: all of it features
    counts = [max(1, largest >> k) for k in range(NODES)][::-1]
    fitted = [p for n in counts for p in _both(recipe, unit, n)]
    between = [p for share in HELD_OUT for p in _both(recipe, unit, max(1, round(share * largest)))]
    return list(dict.fromkeys(fitted)), [p for p in dict.fromkeys(between) if p not in fitted]


def _both(recipe: Recipe, unit: UnitShape, tokens: int) -> Iterator[Probe]:
    """About so many tokens in long items, and in short ones."""
    extra = unit.layers[0].extra_tokens
    for short in (False, True):
        if unit.name == "vision":
            size = _image(recipe, short)
            count = max(1, round(tokens / (size[0] * size[1] + extra)))
            yield Probe(unit.name, (size,) * count, extra)
        elif unit.name == "audio":
            frames = _clip(recipe, short)
            yield Probe(unit.name, (frames,) * max(1, round(2 * tokens / frames)))
        else:
            pieces = 8 if short and tokens >= 8 else 1
            yield Probe(unit.name, tuple(len(part) for part in _split(range(tokens), pieces)))


def _image(recipe: Recipe, short: bool) -> tuple[int, int]:
    """Patch rows and columns of a large image of this recipe, or of one of a quarter of its area."""
    vision, image = recipe.model.vision, recipe.data.image
    assert vision is not None
    if vision.positions == "grid":
        return vision.max_side, vision.max_side
    pixels = image.max_pixels if image.scheme == "native" else image.size**2
    side = min(vision.max_side, math.isqrt(pixels) // vision.patch) // (1 + short)
    side = max(vision.merge, side // vision.merge * vision.merge)
    return side, side


def _clip(recipe: Recipe, short: bool) -> int:
    """Frames of the longest clip of this recipe, or of one a quarter as long."""
    audio = recipe.model.audio
    assert audio is not None
    step = 2 * audio.downsample
    frames = min(audio.max_frames, int(100 * recipe.data.audio.max_seconds)) // (4 if short else 1)
    return max(step, frames // step * step)


def _split(items: range, parts: int) -> Iterator[range]:
    """Cut into nearly equal parts."""
    cuts = [len(items) * k // parts for k in range(parts + 1)]
    return (items[lo:hi] for lo, hi in itertools.pairwise(cuts))
