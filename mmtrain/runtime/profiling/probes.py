"""Make the microbatches on which layers are measured, similar to those that a recipe will train on."""

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
HELD_OUT_LOAD_SHARES = (0.37, 0.74)  # of the largest load; between the fitted ones
NUM_SYNTHETIC_ITEMS = 64  # for a recipe without data

Size = tuple[int, int] | int  # of an image (rows, cols), of a clip frames, of a sequence tokens


@dataclass(frozen=True)
class Probe:
    """A microbatch on which layers are measured."""

    unit: str
    sizes: tuple[Size, ...]
    extra_tokens: int = 0
    features: tuple[tuple[str, int], ...] = ()  # of a text: how many rows come from each encoder

    @property
    def load(self) -> TokenLoad:
        """The token load of a layer."""
        return TokenLoad.of(np.array([num_tokens(self.unit, size, self.extra_tokens) for size in self.sizes]))

    def shuffled(self, rng: np.random.Generator) -> "Probe":
        """Return the same items in another order: no two microbatches of a run are laid out alike."""
        return replace(self, sizes=tuple(self.sizes[i] for i in rng.permutation(len(self.sizes))))

    def inputs(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> UnitInput:
        """Return a random payload of this size."""
        if self.unit == "vision":
            assert recipe.model.vision is not None
            grids = [size for size in self.sizes if isinstance(size, tuple)]
            rows = tuple(num_rows for num_rows, _ in grids)
            cols = tuple(num_cols for _, num_cols in grids)
            num_patches = sum(num_rows * num_cols for num_rows, num_cols in grids)
            features = 3 * recipe.model.vision.patch**2
            return EncoderInput(rows, cols, torch.randn(num_patches, features, device=device, dtype=dtype))
        lengths = tuple(int(size) for size in self.sizes)  # type: ignore[arg-type]
        if self.unit == "audio":
            assert recipe.model.audio is not None
            mels = torch.randn(sum(lengths), recipe.model.audio.mel_bins, device=device, dtype=dtype)
            return EncoderInput(lengths, (1,) * len(lengths), mels)
        ids = torch.randint(0, recipe.model.llm.vocab, (sum(lengths),), device=device)
        positions: dict[str, torch.Tensor] = {}
        start = 0
        for encoder, num_features in self.features:
            positions[encoder] = torch.arange(start, start + num_features, device=device)
            start += num_features
        return TextInput(lengths, ids, ids.roll(-1), positions)


def num_tokens(unit: str, size: Size, extra_tokens: int) -> int:
    """Return the tokens of one item as the unit's layers see them."""
    if isinstance(size, tuple):
        return size[0] * size[1] + extra_tokens
    return size // 2 if unit == "audio" else size


def make_probes(
    recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None = None
) -> tuple[list[Probe], list[Probe]]:
    """Return probes to which a unit's costs are fitted, and held-out probes on which the fit is tested.

    The largest fills `data.seq_len`. Items are sampled from the data's `lengths`: kernels start for every distinct
    length, so equal items would be measured too fast. Without data, items are made up from what the recipe allows.
    Each number of tokens comes as mixed, long and short items, which separates the cost of attention from the cost per
    item.
    """
    largest = recipe.data.seq_len * unit.layers[-1].joins  # for an encoder: a sequence of features alone
    items = _data_items(recipe, unit, lengths) or _synthetic_items(recipe, unit)
    pool = sorted(items, key=lambda size: _tokens(unit, size))
    longer = pool[len(pool) // 2 :]
    shorter = pool[: len(pool) // 2] or pool
    if unit.kind == "llm":
        longer = [largest]  # a text may fill a sequence by itself
    shares = _feature_shares(unit, lengths)
    rng = np.random.default_rng(recipe.train.seed)
    counts = [max(1, largest >> k) for k in range(NUM_FITTED_LOADS)][::-1]
    fitted = [_sample_probe(unit, sizes, count, shares, rng) for count in counts for sizes in (pool, longer, shorter)]
    held_out = [
        _sample_probe(unit, pool, max(1, round(share * largest)), shares, rng)
        for share in HELD_OUT_LOAD_SHARES
        for _ in range(2)
    ]
    return list(dict.fromkeys(fitted)), [probe for probe in dict.fromkeys(held_out) if probe not in fitted]


def _feature_shares(unit: UnitShape, lengths: SampleLengths | None) -> dict[str, float]:
    """Return the share of the LLM's tokens that are each encoder's features."""
    if unit.kind != "llm" or lengths is None:
        return {}
    total = max(1, int(lengths.tokens.sum()))
    return {name: float(items.features.sum()) / total for name, items in lengths.items.items()}


def _sample_probe(
    unit: UnitShape, pool: Sequence[Size], tokens: int, shares: Mapping[str, float], rng: np.random.Generator
) -> Probe:
    """Sample items of about `tokens` tokens from the pool, at least one; cut a text's last sequence to fit."""
    sizes: list[Size] = []
    num_missing = tokens
    for index in _endless_permutations(rng, len(pool)):
        size = pool[index]
        item_tokens = _tokens(unit, size)
        if unit.kind == "llm":
            assert isinstance(size, int)
            size = item_tokens = min(size, num_missing)
        elif sizes and item_tokens > 2 * num_missing:  # with it the sum would be further from `tokens` than without
            break
        sizes.append(size)
        num_missing -= item_tokens
        if num_missing <= 0:
            break
    features = tuple((name, int(share * (tokens - num_missing))) for name, share in shares.items())
    return Probe(unit.name, tuple(sizes), unit.layers[0].extra_tokens, features)


def _endless_permutations(rng: np.random.Generator, size: int) -> Iterator[int]:
    """Yield numbers below `size` in random order, all of them before one repeats."""
    while True:
        yield from rng.permutation(size).tolist()


def _tokens(unit: UnitShape, size: Size) -> int:
    return num_tokens(unit.name, size, unit.layers[0].extra_tokens)


def _data_items(recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> list[Size]:
    """Return the sizes of the items that the data holds for the unit."""
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
    merge, max_side = recipe.model.vision.merge, recipe.model.vision.max_side
    grids = zip(items.rows.tolist(), items.cols.tolist(), strict=True)
    return [
        grid if _is_allowed(grid, merge, max_side) else _square_grid(grid[0] * grid[1], merge, max_side)
        for grid in grids
    ]


def _is_allowed(grid: tuple[int, int], merge: int, max_side: int) -> bool:
    """Return whether the encoder accepts an image of these rows and columns of patches."""
    return all(side % merge == 0 and side <= max_side for side in grid)


def _square_grid(num_patches: int, merge: int, max_side: int) -> tuple[int, int]:
    """Return the squarest image of about `num_patches`: stated lengths give no rows and columns."""
    max_merged = max_side // merge
    rows = min(max_merged, max(1, round(math.sqrt(num_patches) / merge))) * merge
    cols = min(max_merged, max(1, round(num_patches / (rows * merge)))) * merge
    return rows, cols


def _synthetic_items(recipe: Recipe, unit: UnitShape) -> list[Size]:
    """Return item sizes that a recipe without data allows.

    Images have from a quarter of the largest area to all of it, clips from a quarter of the largest length to all of
    it, and texts from a sixteenth of `seq_len` to a quarter.
    """
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
