"""Prepare single samples as a step prepares them, to look at: their tokens, what is learned, and their media.

All of it comes from the `BatchBuilder` of training, for a step that holds one sample alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.assign import assign
from mmtrain.balance.batch_meta import BatchMeta, IntArray
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.formats.sample_split import ChosenSamples
from mmtrain.data.index.data_index import DataIndex, index_chosen
from mmtrain.data.loading.batch_builder import BatchBuilder
from mmtrain.data.loading.payload import EncoderPayload, PayloadNeed, TextPayload
from mmtrain.data.media.images import CellArray
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, SampleTokenizer
from mmtrain.data.text.spelled_tokens import SpelledToken
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES
from mmtrain.recipe.settings.schema import Recipe

LLM = "llm"


@dataclass(frozen=True)
class PreparedToken:
    """A token that the model reads."""

    id: int
    spelled: SpelledToken
    unit: str | None  # whose feature takes its place
    is_learned: bool  # whether the loss counts how well the token before it predicts it
    is_read: bool = True  # a token that ends an answer may be predicted, and not read


@dataclass(frozen=True)
class PreparedItem:
    """A part of a medium as its encoder gets it: a grid of cells."""

    rows: int
    cols: int
    cells: CellArray | None  # (rows * cols, features of a cell); None: it could not be decoded


@dataclass(frozen=True)
class PreparedMedium:
    """A medium as one unit reads it."""

    unit: str
    kind: str  # `image`, `video`, `audio` or `target image`
    name: str  # where it is
    llm_tokens: int  # whose places its features take
    items: tuple[PreparedItem, ...]


@dataclass(frozen=True)
class PreparedSample:
    """A sample as the model reads and learns it."""

    number: int  # among all samples of the sources, from 0
    sample: Sample
    tokens: tuple[PreparedToken, ...]
    media: tuple[PreparedMedium, ...]
    broken: str | None  # why a medium cannot be decoded; it becomes zeros
    is_held_out: bool  # by `data.validation_fraction`

    @property
    def num_tokens(self) -> int:
        """The tokens that the LLM reads."""
        return sum(token.is_read for token in self.tokens)

    @property
    def num_learned(self) -> int:
        """The tokens that count in the loss."""
        return sum(token.is_learned for token in self.tokens)


@dataclass(frozen=True)
class PreparedSamples:
    """The samples that were asked for, in order, and what the user should know of all of them."""

    samples: tuple[PreparedSample | Quarantined, ...]
    num_looked_at: int  # samples up to the last one that was asked for, or of all sources
    warnings: tuple[str, ...]


def prepare_samples(recipe: Recipe, sources: Sequence[SourceSettings], numbers: Sequence[int]) -> PreparedSamples:
    """Prepare the samples with these numbers, counted from 0 through all sources.

    Numbers behind the last sample are left out. Raises `DataError` if a source cannot be read.
    """
    chosen = ChosenSamples(numbers, recipe.data.validation_fraction)
    index, reasons = index_chosen(recipe, sources, chosen)
    preparer = _Preparer(recipe, index)
    samples: list[PreparedSample | Quarantined] = []
    position = 0  # in the index
    for number, reason in zip(chosen.numbers, reasons, strict=True):
        if reason is not None:
            samples.append(reason)
            continue
        samples.append(preparer.prepare(position, number, number in chosen.held_out))
        position += 1
    return PreparedSamples(tuple(samples), chosen.num_samples, index.warnings)


class _Preparer:
    """Prepares samples of an index."""

    def __init__(self, recipe: Recipe, index: DataIndex) -> None:
        self._index = index
        self._encoders = recipe.model.all_encoders
        self._tokenizer: SampleTokenizer = load_recipe_tokenizer(recipe)
        self._once = dict.fromkeys([*index.lengths.items, LLM], 1)  # replicas, and microbatches of each
        has_positions = recipe.model.llm.rope_sections is not None
        needs = [PayloadNeed(unit, 0, media=True) for unit in index.lengths.items]
        needs.append(PayloadNeed(LLM, 0, ids=True, labels=True, position_ids=has_positions))
        self._builder = BatchBuilder(index, recipe, tuple(needs), self._once, self._tokenizer)

    def prepare(self, position: int, number: int, is_held_out: bool) -> PreparedSample:
        """Prepare the sample at a position of the index."""
        group = np.array([position], dtype=np.int64)
        meta = assign(0, 0, [group], self._index.lengths, self._once, self._once)
        data = self._builder.build(meta)
        sample = self._index.samples[position]
        media: list[PreparedMedium] = []
        for unit, payloads in data.encoders.items():
            media += self._media(meta, position, sample, unit, payloads[0, 0])
        broken = data.quarantined[0].reason if data.quarantined else None
        return PreparedSample(number, sample, self._tokens(data.text[0, 0]), tuple(media), broken, is_held_out)

    def _tokens(self, text: TextPayload) -> tuple[PreparedToken, ...]:
        """Return the tokens that are read, and in between those that are learned only."""
        assert text.ids is not None
        assert text.labels is not None
        units: dict[int, str] = {}
        for unit, positions in text.feature_positions.items():
            units |= dict.fromkeys(positions.tolist(), unit)
        if text.query_positions is not None:
            units |= dict.fromkeys(text.query_positions.tolist(), GENERATOR)
        ids, labels = text.ids.tolist(), text.labels.tolist()
        spelled = self._spell_around_features(text.ids, units)
        tokens: list[PreparedToken] = []
        predicted = IGNORE_INDEX  # by the token before
        for place, token_id in enumerate(ids):
            if predicted not in (IGNORE_INDEX, token_id):
                tokens.append(self._predicted_only(predicted))
            is_learned = predicted == token_id
            tokens.append(PreparedToken(token_id, spelled[place], units.get(place), is_learned))
            predicted = labels[place]
        if predicted != IGNORE_INDEX:
            tokens.append(self._predicted_only(predicted))
        return tuple(tokens)

    def _predicted_only(self, token_id: int) -> PreparedToken:
        [spelled] = self._tokenizer.spell([token_id])
        return PreparedToken(token_id, spelled, None, is_learned=True, is_read=False)

    def _spell_around_features(self, ids: IntArray, units: dict[int, str]) -> list[SpelledToken]:
        """Spell tokens; places of features are not read as text, and thousands of them are not decoded."""
        spelled = [SpelledToken("", True)] * len(ids)
        text_places = [place for place in range(len(ids)) if place not in units]
        for place, token in zip(text_places, self._tokenizer.spell(ids[text_places]), strict=True):
            spelled[place] = token
        return spelled

    def _media(
        self, meta: BatchMeta, position: int, sample: Sample, unit: str, payload: EncoderPayload
    ) -> list[PreparedMedium]:
        """Divide the cells of a unit into the media of the sample."""
        assert payload.cells is not None, "media are needed"
        if unit == GENERATOR:
            names = [("target image", str(medium)) for medium in sample.target_images]
            of_items = list(range(len(payload.rows)))
            first, end = self._index.lengths.items[unit].first[position : position + 2]
            features = self._index.lengths.items[unit].features[first:end].tolist()
        else:
            kinds = MODALITIES[self._encoders[unit].modality].media
            names = [(kind, str(medium)) for kind, medium in sample.media_of(kinds)]
            positions = meta.items[unit].position[meta.items[unit].microbatch(0, 0)].tolist()
            of_items = [self._index.locate_item(position, unit, place)[0] for place in positions]
            features = self._index.unit_features(position, unit)
        items: dict[int, list[PreparedItem]] = {}
        start = 0
        for medium, rows, cols in zip(of_items, payload.rows, payload.cols, strict=True):
            stop = start + rows * cols
            cells = None if (start, stop) in payload.blank_cells else payload.cells[start:stop]
            items.setdefault(medium, []).append(PreparedItem(rows, cols, cells))
            start = stop
        return [
            PreparedMedium(unit, *names[medium], features[medium], tuple(of_medium))
            for medium, of_medium in sorted(items.items())
        ]
