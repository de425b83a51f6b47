"""Make the microbatches on which layers are measured, similar to those that a recipe will train on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from mmtrain.balance import SampleLengths
from mmtrain.costs import TokenLoad
from mmtrain.models.attention import Spans
from mmtrain.models.model_shape import UnitShape
from mmtrain.models.stage_inputs import EncoderInput, TextInput, UnitInput
from mmtrain.recipe.modalities import GENERATOR
from mmtrain.recipe.schema import Recipe
from mmtrain.runtime.profiling.item_sizes import ITEM_SIZES, ItemSize, synthetic_shares

NUM_FITTED_LOADS = 5  # numbers of tokens, each twice the one before
HELD_OUT_LOAD_SHARES = (0.37, 0.74)  # of the largest load; between the fitted ones

Size = ItemSize | int  # of an encoder's item (rows, cols), of a sequence of the LLM its tokens


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
            rows, cols = (tuple(size[k] for size in self.sizes) for k in (0, 1))  # type: ignore[index]
            num_cells = sum(r * c for r, c in zip(rows, cols, strict=True))
            cells = torch.randn(num_cells, encoder.cell_features, device=device, dtype=dtype)
            return EncoderInput(rows, cols, cells)
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
        if recipe.model.llm.image_attention == "bidirectional":  # the most that can be, as `AnalyticCosts` assumes
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

    The largest load fills `data.seq_len`. Sizes are sampled from the data's `lengths`: some kernels start once for each
    distinct length, so equal items would measure too fast. Without data, sizes are synthetic and within what the recipe
    allows. Each number of tokens comes with items of all sizes, with long ones and with short ones: this separates the
    cost of attention from the cost of each item.
    """
    largest = recipe.data.seq_len * unit.layers[-1].joins  # for an encoder: all LLM tokens are its features
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
        return [n for n in lengths.tokens.tolist() if n]
    items = lengths.items.get(unit.name)
    if items is None:
        return []
    settings = recipe.model.all_encoders[unit.name]
    nearest = ITEM_SIZES[settings.modality].nearest
    return [nearest(settings, size) for size in zip(items.rows.tolist(), items.cols.tolist(), strict=True)]


def _synthetic_sizes(recipe: Recipe, unit: UnitShape) -> list[Size]:
    """Return sizes that a recipe without data allows: items of a quarter of the largest size up to the largest.

    Texts fill up to a quarter of `seq_len`.
    """
    if unit.kind == "llm":
        return [max(1, int(recipe.data.seq_len * share / 4)) for share in synthetic_shares()]
    settings = recipe.model.all_encoders[unit.name]
    return [*ITEM_SIZES[settings.modality].synthetic(settings, recipe.data)]
