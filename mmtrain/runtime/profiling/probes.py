"""Make the microbatches on which layers are measured, similar to those that a recipe will train on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.balance import SampleLengths
from mmtrain.balance.batch_meta import SampleTokens
from mmtrain.balance.columns import Lengths
from mmtrain.balance.step_targets import LLM
from mmtrain.costs import TokenLoad
from mmtrain.data.media.target_images import drawing_sizes
from mmtrain.models.attention import Spans
from mmtrain.models.generator.noise_schedules import DiffusionSchedule
from mmtrain.models.shapes.model_shape import UnitShape
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput, UnitInput
from mmtrain.recipe.settings.audio_settings import LOG_MEL_FRAMES_PER_SECOND, AudioSettings
from mmtrain.recipe.settings.base import Section
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.vision_settings import VisionSettings

MAX_SIZES = 1 << 20  # of samples or items that probes are drawn from
NUM_FITTED_LOADS = 5  # numbers of tokens, each twice the one before
MAX_GENERATOR_LOAD_FACTOR = 4.0  # largest load / mean: groups of random samples hardly hold more images
HELD_OUT_LOAD_SHARES = (0.37, 0.74)  # of the largest load; between the fitted ones

ItemSize = tuple[int, int]  # rows and columns of cells; a clip has frames rows and one column
Size = ItemSize | int  # of an encoder's item (rows, cols), of a sequence of the LLM its tokens
NUM_SYNTHETIC_ITEMS = 64  # items of a recipe without data
SMALLEST_SYNTHETIC_SHARE = 0.25  # of the largest item that the recipe allows


@dataclass(frozen=True)
class Probe:
    """A microbatch to measure on."""

    unit: str
    sizes: tuple[Size, ...]
    cells_per_token: int = 1
    extra_tokens: int = 0
    # Of a text: how many of its tokens come from each encoder, and how many are queries of images to draw.
    features: tuple[tuple[str, int], ...] = ()

    @property
    def load(self) -> TokenLoad:
        """Return the load that the unit's blocks see."""
        tokens = [_num_tokens(size, self.cells_per_token, self.extra_tokens) for size in self.sizes]
        return TokenLoad.of(np.array(tokens))

    def shuffled(self, rng: np.random.Generator) -> "Probe":
        """Return the same items in another order: no two microbatches of a run have the same layout."""
        return replace(self, sizes=tuple(self.sizes[i] for i in rng.permutation(len(self.sizes))))

    def inputs(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> UnitInput:
        """Return random payload of this size."""
        encoder = recipe.model.all_encoders.get(self.unit)
        if encoder is not None:
            rows, cols = self._sides
            return EncoderInput(rows, cols, self._random_cells(encoder.cell_features, device, dtype))
        if self.unit == GENERATOR:
            return self._drawing_inputs(recipe, device, dtype)
        return self._text_inputs(recipe, device)

    def _drawing_inputs(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> GeneratorInput:
        """Return noisy images and what is to be predicted of them."""
        generator = recipe.model.generator
        assert generator is not None
        rows, cols = self._sides
        return GeneratorInput(
            rows,
            cols,
            cells=self._random_cells(generator.cell_features, device, dtype),
            timesteps=torch.randint(0, DiffusionSchedule.num_steps, (len(rows),), device=device),
            targets=self._random_cells(generator.cell_features, device, torch.float32),
            kept_contexts=torch.ones(len(rows), device=device) if generator.context_dropout else None,
        )

    @property
    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return rows and columns of each item."""
        rows, cols = (tuple(size[k] for size in self.sizes) for k in (0, 1))  # type: ignore[index]
        return rows, cols

    def _random_cells(self, num_features: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        num_cells = sum(rows * cols for rows, cols in zip(*self._sides, strict=True))
        return torch.randn(num_cells, num_features, device=device, dtype=dtype)

    def _text_inputs(self, recipe: Recipe, device: torch.device) -> TextInput:
        lengths = tuple(int(size) for size in self.sizes)  # type: ignore[arg-type]
        ids = torch.randint(0, recipe.model.llm.vocab, (sum(lengths),), device=device)
        positions = {}
        generator = recipe.model.generator
        queries = None if generator is None else torch.arange(0, device=device)
        start = 0
        for unit, num in self.features:
            if generator is not None and unit == GENERATOR:  # queries come by whole images
                num -= num % generator.context_tokens
                queries = torch.arange(start, start + num, device=device)
            else:
                positions[unit] = torch.arange(start, start + num, device=device)
            start += num
        spans: Spans = ()
        if recipe.model.llm.image_attention != "causal":  # the most that can be, as `AnalyticCosts` assumes
            ends = [*accumulate(lengths)]
            spans = tuple((end - length, end) for end, length in zip(ends, lengths, strict=True) if length)
        targets = torch.arange(sum(lengths), device=device)  # given, so that the host need not ask the device for them
        return TextInput(
            lengths,
            ids,
            ids.roll(-1),
            positions,
            image_spans=spans,
            target_positions=targets,
            query_positions=queries,
        )


def _num_tokens(size: Size, cells_per_token: int, extra_tokens: int) -> int:
    """Return the tokens of one item in the unit's blocks."""
    if isinstance(size, int):
        return size
    return size[0] * size[1] // cells_per_token + extra_tokens


def make_probes(
    recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None = None
) -> tuple[list[Probe], list[Probe]]:
    """Return loads to fit a unit's costs to, and held-out loads to test the fit on.

    The largest load fills `data.seq_len`, for a generator see `_largest_load`. Sizes are sampled from the data's
    `lengths`: some kernels start once for each distinct length, so equal items would measure too fast. Without data,
    sizes are synthetic and within what the recipe allows. Each number of tokens comes with items of all sizes, with
    long ones and with short ones: this separates the cost of attention from the cost of each item.
    """
    largest = _largest_load(recipe, unit, lengths)
    sampler = _ProbeSampler(recipe, unit, lengths)
    pool = sorted(_sizes_in_data(recipe, unit, lengths) or _synthetic_sizes(recipe, unit), key=sampler.num_tokens)
    half = len(pool) // 2
    short_items = pool[:half] or pool
    long_items: Sequence[Size] = pool[half:]
    if unit.kind == "llm":
        long_items = [largest]  # one text may fill a sequence
    counts = [max(1, largest >> k) for k in range(NUM_FITTED_LOADS)][::-1]
    fitted = [sampler.sample(sizes, n) for n in counts for sizes in (pool, long_items, short_items)]
    held_out = [
        sampler.sample(pool, max(1, round(share * largest))) for share in HELD_OUT_LOAD_SHARES for _ in range(2)
    ]
    return list(dict.fromkeys(fitted)), [probe for probe in dict.fromkeys(held_out) if probe not in fitted]


def _largest_load(recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> int:
    """Return the most tokens to measure the unit on.

    Of a generator they are those of the images in a group of the samples that draw most, but of no more than
    `MAX_GENERATOR_LOAD_FACTOR` mean groups. Without data each second token of a group is a query.
    """
    seq_len = recipe.data.group_tokens
    generator = recipe.model.generator
    if unit.kind == "encoder" and recipe.model.all_encoders[unit.name].features_per_item:
        return _largest_resampled_load(recipe, unit, lengths)
    if unit.kind != "generator" or generator is None:
        return seq_len * unit.layers[-1].projector.joins  # for an encoder: all LLM tokens are its features
    if lengths is None or unit.name not in lengths.items or not len(lengths.items[unit.name].tokens):
        num_cells = max(rows * cols for rows, cols in ITEM_SIZES[GENERATOR].synthetic(generator, recipe.data))
        return max(1, seq_len // (2 * generator.context_tokens)) * num_cells
    items = lengths.items[unit.name]
    samples = np.arange(len(lengths))[_evenly_spaced(lengths.tokens)]
    column = [LLM, *sorted(lengths.items)].index(unit.name)
    tokens, drawn_tokens = SampleTokens(lengths)[samples][:, [0, column]].T
    densest_first = np.argsort(-drawn_tokens / np.maximum(tokens, 1), kind="stable")
    fits = np.cumsum(tokens[densest_first]) <= seq_len
    of_densest_group = int(drawn_tokens[densest_first][fits].sum())
    of_mean_group = int(items.tokens.sum()) * seq_len / max(1, int(lengths.tokens.sum()))
    return max(int(items.tokens.max()), min(of_densest_group, round(MAX_GENERATOR_LOAD_FACTOR * of_mean_group)))


def _largest_resampled_load(recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> int:
    """Return the tokens of as many mean items as a group has queries for, if all of its tokens are their features."""
    sampler = _ProbeSampler(recipe, unit, lengths)
    sizes = _sizes_in_data(recipe, unit, lengths) or _synthetic_sizes(recipe, unit)
    num_items = max(1, recipe.data.group_tokens // unit.layers[-1].projector.features_per_item)
    return num_items * sum(map(sampler.num_tokens, sizes)) // len(sizes)


class _ProbeSampler:
    """Samples items until they have a given number of tokens."""

    def __init__(self, recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> None:
        encoder = recipe.model.all_encoders.get(unit.name)
        self._unit = unit
        self._cells_per_token = 1 if encoder is None else encoder.cells_per_token
        self._extra_tokens = unit.layers[0].extra_tokens
        self._feature_shares = _feature_shares(unit, lengths)
        self._rng = np.random.default_rng(recipe.train.seed)

    def num_tokens(self, size: Size) -> int:
        """Return the tokens of one item in the unit's blocks."""
        return _num_tokens(size, self._cells_per_token, self._extra_tokens)

    def sample(self, pool: Sequence[Size], tokens: int) -> Probe:
        """Return a probe of about `tokens` tokens, with at least one item; the last text is cut to fit."""
        sizes: list[Size] = []
        missing = tokens
        for pick in _cycle_in_random_order(self._rng, len(pool)):
            size = pool[pick]
            item_tokens = self.num_tokens(size)
            if self._unit.kind == "llm":
                size = item_tokens = min(item_tokens, missing)
            elif sizes and item_tokens > 2 * missing:  # with this item the total would be further off than without it
                break
            sizes.append(size)
            missing -= item_tokens
            if missing <= 0:
                break
        features = tuple((name, int(share * (tokens - missing))) for name, share in self._feature_shares.items())
        return Probe(self._unit.name, tuple(sizes), self._cells_per_token, self._extra_tokens, features)


def _feature_shares(unit: UnitShape, lengths: SampleLengths | None) -> Mapping[str, float]:
    """Return the share of the LLM's tokens that are features of each encoder or queries; nothing for other units."""
    if unit.kind != "llm" or lengths is None:
        return {}
    total = max(1, int(lengths.tokens.sum()))
    # Of joined tiles more rows are sent than the LLM has tokens.
    return {name: min(1.0, float(items.features.sum()) / total) for name, items in lengths.items.items()}


def _cycle_in_random_order(rng: np.random.Generator, size: int) -> Iterator[int]:
    """Yield the numbers below `size` without end, each time all of them in a new random order."""
    while True:
        yield from rng.permutation(size).tolist()


def _sizes_in_data(recipe: Recipe, unit: UnitShape, lengths: SampleLengths | None) -> list[Size]:
    """Return the sizes of the unit's items in the data; nothing without data."""
    if lengths is None:
        return []
    if unit.kind == "llm":
        return [n for n in lengths.tokens[_evenly_spaced(lengths.tokens)].tolist() if n]
    items = lengths.items.get(unit.name)
    if items is None:
        return []
    settings, modality = _item_settings(recipe, unit)
    nearest = ITEM_SIZES[modality].nearest
    spaced = _evenly_spaced(items.rows)
    sizes = zip(items.rows[spaced].tolist(), items.cols[spaced].tolist(), strict=True)
    return [nearest(settings, size) for size in sizes]


def _evenly_spaced(lengths: Lengths) -> slice:
    """Return the rows to draw sizes from: all, or of many at least half of `MAX_SIZES`."""
    return slice(None, None, max(1, -(-len(lengths) // MAX_SIZES)))


def _synthetic_sizes(recipe: Recipe, unit: UnitShape) -> list[Size]:
    """Return sizes that a recipe without data allows: items of a quarter of the largest size up to the largest.

    Texts fill up to a quarter of `seq_len`.
    """
    if unit.kind == "llm":
        return [max(1, int(recipe.data.group_tokens * share / 4)) for share in synthetic_shares()]
    settings, modality = _item_settings(recipe, unit)
    return [*ITEM_SIZES[modality].synthetic(settings, recipe.data)]


def _item_settings(recipe: Recipe, unit: UnitShape) -> tuple[Section, str]:
    """Return the settings of a unit with items, and the key of these in `ITEM_SIZES`."""
    if unit.kind == "generator":
        assert recipe.model.generator is not None
        return recipe.model.generator, GENERATOR
    encoder = recipe.model.all_encoders[unit.name]
    return encoder, encoder.modality


@dataclass(frozen=True)
class ItemSizes:
    """Functions of a modality's settings that return sizes of items."""

    nearest: Callable[[Any, ItemSize], ItemSize]  # (settings, size in the data) -> a size that the encoder accepts
    synthetic: Callable[[Any, DataSettings], list[ItemSize]]  # (settings, data) -> sizes that the recipe allows


def synthetic_shares() -> np.ndarray:
    """Return `NUM_SYNTHETIC_ITEMS` shares of the largest size, evenly spaced."""
    return np.linspace(SMALLEST_SYNTHETIC_SHARE, 1.0, NUM_SYNTHETIC_ITEMS)


def _nearest_image(settings: VisionSettings, size: ItemSize) -> ItemSize:
    """Return the size if the encoder accepts it, else the most square image of about as many patches.

    Stated lengths give the number of patches only.
    """
    merge, max_side = settings.merge, settings.max_side
    if all(side % merge == 0 and side <= max_side for side in size):
        return size
    patches = size[0] * size[1]
    max_merged = max_side // merge
    side = min(max_merged, max(1, round(math.sqrt(patches) / merge))) * merge
    return side, min(max_merged, max(1, round(patches / (side * merge)))) * merge


def _synthetic_images(settings: VisionSettings, data: DataSettings) -> list[ItemSize]:
    if settings.positions == "grid":
        return [(settings.max_side, settings.max_side)]
    image = data.image
    pixels = image.max_pixels if image.scheme == "native" else image.size**2
    side = min(settings.max_side, math.isqrt(pixels) // settings.patch)
    if image.scheme != "native":
        return [(side, side)]
    merge = settings.merge
    sides = [max(merge, int(side * share**0.5) // merge * merge) for share in synthetic_shares()]
    return [*zip(sides, sides[::-1], strict=True)]


def _nearest_clip(settings: AudioSettings, size: ItemSize) -> ItemSize:
    """Return the size without a frame that alone is half a token, or none."""
    return size[0] // settings.cells_per_token * settings.cells_per_token, size[1]


def _synthetic_clips(settings: AudioSettings, data: DataSettings) -> list[ItemSize]:
    max_frames = int(LOG_MEL_FRAMES_PER_SECOND * data.audio.max_seconds)
    if settings.longest_clip_frames is not None:
        max_frames = min(settings.longest_clip_frames, max_frames)
    max_cells = settings.count_cells(max_frames)
    if data.audio.item_seconds is not None:
        max_cells = min(settings.cells_per_item(data.audio.item_seconds), max_cells)
    num_features = [int(max_cells * share) // settings.cells_per_feature for share in synthetic_shares()]
    return [(max(1, n) * settings.cells_per_feature, 1) for n in num_features]


def _nearest_drawing(settings: GeneratorSettings, size: ItemSize) -> ItemSize:
    """Return the size if the generator divides it, else the most square image of about as many positions."""
    divisor = 2 ** (len(settings.widths) - 1)
    if all(side % divisor == 0 for side in size):
        return size
    side = max(1, round(math.sqrt(size[0] * size[1]) / divisor)) * divisor
    return side, max(1, round(size[0] * size[1] / (side * divisor))) * divisor


def _synthetic_drawings(settings: GeneratorSettings, data: DataSettings) -> list[ItemSize]:
    pixels_per_patch = settings.latent_scale * settings.patch
    if settings.image_size is None:
        side = settings.sample_size // settings.patch
        return [_nearest_drawing(settings, (side, side))]
    sizes = drawing_sizes(settings)
    return [(height // pixels_per_patch, width // pixels_per_patch) for width, height in sizes]


# By the name of the modality, or of the generator.
ITEM_SIZES: Mapping[str, ItemSizes] = {
    "vision": ItemSizes(_nearest_image, _synthetic_images),
    "audio": ItemSizes(_nearest_clip, _synthetic_clips),
    GENERATOR: ItemSizes(_nearest_drawing, _synthetic_drawings),
}
