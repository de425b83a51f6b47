"""Loads to measure layers on, like those a recipe's microbatches will be, and the inputs that have them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmtrain.balance import SampleLengths
from mmtrain.costs import TokenLoad
from mmtrain.models.model_shape import UnitShape
from mmtrain.models.stage_inputs import EncoderInput, TextInput, UnitInput
from mmtrain.recipe.schema import Recipe

NUM_FITTED_LOADS = 5  # numbers of tokens, each twice the one before
HELD_OUT_LOAD_SHARES = (0.37, 0.74)  # of the largest load
NUM_SYNTHETIC_ITEMS = 64  # items of a recipe without data

Size = tuple[int, int] | int  # of an image (rows, cols), of a clip frames, of a sequence tokens


@dataclass(frozen=True)
class Probe:
    """A microbatch to measure on."""

    unit: str
    sizes: tuple[Size, ...]
    extra_tokens: int = 0
    features: tuple[tuple[str, int], ...] = ()  # of a text: how many rows come from each encoder

    @property
    def load(self) -> TokenLoad:
        """What layers see of it."""
        return TokenLoad.of(np.array([num_tokens(self.unit, size, self.extra_tokens) for size in self.sizes]))

    def shuffled(self, rng: np.random.Generator) -> "Probe":
        """The same items in another order: no two microbatches of a run are laid out alike."""
        return replace(self, sizes=tuple(self.sizes[i] for i in rng.permutation(len(self.sizes))))

    def inputs(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> UnitInput:
        """Random payload of this size."""
        if self.unit == "vision":
            assert recipe.model.vision is not None
            rows, cols = (tuple(size[k] for size in self.sizes) for k in (0, 1))  # type: ignore[index]
            num_patches = sum(r * c for r, c in zip(rows, cols, strict=True))
            features = 3 * recipe.model.vision.patch**2
            return EncoderInput(rows, cols, torch.randn(num_patches, features, device=device, dtype=dtype))
        lengths = tuple(int(size) for size in self.sizes)  # type: ignore[arg-type]
        if self.unit == "audio":
            assert recipe.model.audio is not None
            mels = torch.randn(sum(lengths), recipe.model.audio.mel_bins, device=device, dtype=dtype)
            return EncoderInput(lengths, (1,) * len(lengths), mels)
        ids = torch.randint(0, recipe.model.llm.vocab, (sum(lengths),), device=device)
        places, start = {}, 0
        for encoder, num in self.features:
            places[encoder] = torch.arange(start, start + num, device=device)
            start += num
        return TextInput(lengths, ids, ids.roll(-1), places)


def num_tokens(unit: str, size: Size, extra_tokens: int) -> int:
    """Tokens of one item as the unit's blocks see them."""
    if isinstance(size, tuple):
        return size[0] * size[1] + extra_tokens
    return size // 2 if unit == "audio" else size


def make_probes(
    recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None = None
) -> tuple[list[Probe], list[Probe]]:
    """Loads to fit a unit's costs to, and others to hold the fit against.

    The largest is what fills `data.seq_len`. Items are drawn from the data's `lengths`: kernels are started for every
    distinct length, so items that are all alike would pass too fast. Without data they are made up from what the
    recipe allows. Each number of tokens comes as any items, as long ones and as short ones, which tells apart what
    attention costs and what each item does.
    """
    largest = recipe.data.seq_len * unit.layers[-1].joins  # of an encoder: all of it features
    pool = sorted(_items(recipe, unit, lengths) or _made_up(recipe, unit), key=lambda size: _tokens(unit, size))
    longer, shorter = pool[len(pool) // 2 :], pool[: len(pool) // 2] or pool
    if unit.kind == "llm":
        longer = [largest]  # a text may fill a sequence by itself
    shares = _feature_shares(unit, lengths)
    rng = np.random.default_rng(recipe.train.seed)
    counts = [max(1, largest >> k) for k in range(NUM_FITTED_LOADS)][::-1]
    fitted = [_filled(unit, some, n, shares, rng) for n in counts for some in (pool, longer, shorter)]
    between = [
        _filled(unit, pool, max(1, round(share * largest)), shares, rng)
        for share in HELD_OUT_LOAD_SHARES
        for _ in range(2)
    ]
    return list(dict.fromkeys(fitted)), [p for p in dict.fromkeys(between) if p not in fitted]


def _feature_shares(unit: UnitShape, lengths: SampleLengths | None) -> dict[str, float]:
    """Of the LLM's tokens, the share that each encoder's features are."""
    if unit.kind != "llm" or lengths is None:
        return {}
    total = max(1, int(lengths.tokens.sum()))
    return {name: float(items.features.sum()) / total for name, items in lengths.items.items()}


def _filled(
    unit: UnitShape, pool: Sequence[Size], tokens: int, shares: Mapping[str, float], rng: np.random.Generator
) -> Probe:
    """Items drawn from the pool, at least one, of about so many tokens; a text's last sequence is cut to fit."""
    sizes: list[Size] = []
    missing = tokens
    for pick in _forever(rng, len(pool)):
        size = pool[pick]
        of_it = _tokens(unit, size)
        if unit.kind == "llm":
            assert isinstance(size, int)
            size = of_it = min(size, missing)
        elif sizes and of_it > 2 * missing:  # further from the number with it than without
            break
        sizes.append(size)
        missing -= of_it
        if missing <= 0:
            break
    features = tuple((name, int(share * (tokens - missing))) for name, share in shares.items())
    return Probe(unit.name, tuple(sizes), unit.layers[0].extra_tokens, features)


def _forever(rng: np.random.Generator, size: int) -> Iterator[int]:
    """Numbers below `size` in random order, all before one comes again."""
    while True:
        yield from rng.permutation(size).tolist()


def _tokens(unit: UnitShape, size: Size) -> int:
    return num_tokens(unit.name, size, unit.layers[0].extra_tokens)


def _items(recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> list[Size]:
    """Sizes of what the data holds for the unit."""
    if lengths is None:
        return []
    if unit.kind == "llm":
        return [n for n in lengths.tokens.tolist() if n]
    items = lengths.items.get(unit.name)
    if items is None:
        return []
    if unit.name == "audio":
        return list(items.rows.tolist())
    assert recipe.model.vision is not None
    merge, most = recipe.model.vision.merge, recipe.model.vision.max_side
    grids = zip(items.rows.tolist(), items.cols.tolist(), strict=True)
    return [g if _fits(g, merge, most) else _square(g[0] * g[1], merge, most) for g in grids]


def _fits(grid: tuple[int, int], merge: int, most: int) -> bool:
    """Whether the encoder takes an image of so many patch rows and columns."""
    return all(side % merge == 0 and side <= most for side in grid)


def _square(patches: int, merge: int, most: int) -> tuple[int, int]:
    """The squarest image of about so many patches, of which stated lengths say no more."""
    side = min(most // merge, max(1, round(math.sqrt(patches) / merge))) * merge
    return side, min(most // merge, max(1, round(patches / (side * merge)))) * merge


def _made_up(recipe: Recipe, unit: UnitShape) -> list[Size]:
    """Sizes that a recipe without data allows: texts up to `seq_len`, images of a quarter of the area up to all of it,
    clips of a quarter of the length up to all of it."""
    shares = np.linspace(0.25, 1.0, NUM_SYNTHETIC_ITEMS)
    if unit.name == "vision":
        vision, image = recipe.model.vision, recipe.data.image
        assert vision is not None
        if vision.positions == "grid":
            return [(vision.max_side, vision.max_side)]
        pixels = image.max_pixels if image.scheme == "native" else image.size**2
        side = min(vision.max_side, math.isqrt(pixels) // vision.patch)
        sides = [max(vision.merge, int(side * s**0.5) // vision.merge * vision.merge) for s in shares]
        return [(side, side)] if image.scheme != "native" else [*zip(sides, sides[::-1], strict=True)]
    if unit.name == "audio":
        audio = recipe.model.audio
        assert audio is not None
        step = 2 * audio.downsample
        frames = min(audio.max_frames, int(100 * recipe.data.audio.max_seconds))
        return [max(step, int(frames * s) // step * step) for s in shares]
    return [max(1, int(recipe.data.seq_len * s / 4)) for s in shares]
