"""The index of a dataset: every usable sample with its lengths, and every other sample with the reason.

Building it reads the data files and the headers of media, never pixels or sound. The index of large files is cached on
disk, where the next run, and the other ranks of this one, find it. Ranks compare fingerprints to check that they agree.
"""

import gc
import hashlib
import io
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmtrain.balance.batch_meta import ItemLengths, SampleLengths
from mmtrain.balance.columns import (
    BLOCK_ROWS,
    CellRule,
    GridColumn,
    LengthColumn,
    Lengths,
    SampleValues,
    SourceValues,
    StoredColumn,
    sha256_of,
)
from mmtrain.balance.grouping.mixture import Mixture
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.sample import Quarantined, Sample, one_per_reason
from mmtrain.data.formats.sample_split import SampleFilter, SampleSplit
from mmtrain.data.index.frozen_samples import warn_of_idle_training
from mmtrain.data.index.index_cache import (
    IndexCache,
    IndexContent,
    IndexInMemory,
    NewIndex,
    StoredIndex,
    index_in_memory,
)
from mmtrain.data.index.media_versions import MediaVersions
from mmtrain.data.index.reading_bounds import reading_bounds
from mmtrain.data.index.sample_lengths import MeasuredSample, measure_samples, notify_progress
from mmtrain.data.index.sample_sources import SampleSources, find_mixture, sample_uses
from mmtrain.data.index.sample_table import SampleTable, content_json, sample_record
from mmtrain.data.index.spelled_texts import SpelledTexts
from mmtrain.data.index.stated_lengths import read_stated_lengths
from mmtrain.data.media.image_grids import MediumGrid, MediumItems
from mmtrain.data.media.item_readers import tile_join
from mmtrain.data.media.joined_tiles import FeatureMix, TileJoin, join_media
from mmtrain.data.remote.locations import known_versions, pin_versions, trust_hosts
from mmtrain.data.remote.remote_files import FileVersion
from mmtrain.data.text.cut_samples import features_of_cut
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.data.text.sample_tokenizer import ItemTenths, MediaFeatures, add_queries, split_images, split_videos
from mmtrain.errors import DataError, TooManyBadSamples
from mmtrain.limited_reads import done_reading, read_within
from mmtrain.recipe.settings.data_settings import DataPart, SourceSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR, VISION
from mmtrain.recipe.settings.schema import Recipe

MAX_SAMPLES_IN_MESSAGE = 5
# Of samples in an epoch, by weights above 1, or as many as there are samples: the order of an epoch takes 4 bytes each.
MAX_REPEATED_USES = 20_000_000


@dataclass(frozen=True)
class DataIndex:
    """The usable samples of a dataset, their lengths, and the quarantined samples."""

    samples: Sequence[Sample]
    lengths: SampleLengths
    weights: SampleValues  # (S,) how often an epoch uses each sample
    quarantined: tuple[Quarantined, ...]
    # Encoder unit -> (I,) the part of its medium that an item is: the number of its tile or frame, from 0.
    item_parts: dict[str, Lengths] = field(default_factory=dict)
    item_times: dict[str, Lengths] = field(default_factory=dict)  # likewise, its rotary position in time, from 0
    content_sha256: str = ""  # of all that is in the samples but the location of their files
    cache_folder: Path | None = None  # where it was read from; None if it was built from the data
    modalities: dict[str, str] = field(default_factory=dict)  # encoder unit -> the modality that it reads
    warnings: tuple[str, ...] = ()  # of the tokenizer, and of what texts spell
    joins: dict[str, TileJoin] = field(default_factory=dict)  # for encoders whose tiles are joined
    # Theirs: (I,) width and (I,) height of an item's image; 0: a frame.
    image_sizes: dict[str, tuple[Lengths, Lengths]] = field(default_factory=dict)
    # Of encoders whose videos are sampled from end to end: (I,) when an item is shown, in tenths of seconds.
    item_tenths: dict[str, Lengths] = field(default_factory=dict)
    sources: SampleSources | None = None  # which source each sample is of; None for samples that no recipe names
    generator: GeneratorSettings | None = None  # of the model that draws the images in answers
    mixture: Mixture | None = None  # where sources have shares; `weights` are then 1
    folder: Path | None = None  # of this index alone, for arrays that are derived from it; None where it is not cached

    def media_features(self, sample: int, rows_apart: bool = False) -> MediaFeatures:
        """Return for each modality the LLM tokens of a sample's media, summed over its encoders, for a tokenizer.

        Of a sample that is cut these are all media, also those behind the cut, which have no items here.

        rows_apart: as the tokenizer's `writes_rows_apart` says.
        """
        cut = self.samples[sample].cut
        if cut is not None:
            return features_of_cut(cut)
        features: dict[str, list[int]] = {}
        for unit, modality in self.modalities.items():
            of_unit = self.unit_features(sample, unit)
            of_others = features.get(modality, [0] * len(of_unit))
            features[modality] = [
                num_features + others for num_features, others in zip(of_unit, of_others, strict=True)
            ]
        media_features: MediaFeatures = features
        if self.samples[sample].videos:
            readers = {modality: unit for unit, modality in self.modalities.items()}
            media_features = split_videos(
                features,
                self.samples[sample],
                lambda modality, number: self._items_of(sample, readers[modality], number),
            )
        if rows_apart:
            media_features = split_images(media_features, self.samples[sample], partial(self._rows_of, sample))
        return add_queries(media_features, self.samples[sample], self.generator)

    def _rows_of(self, sample: int, modality: str, number: int) -> int:
        """Return how many rows of features one image of a sample has; its modality has one encoder."""
        unit = next(unit for unit, of_unit in self.modalities.items() if of_unit == modality)
        items = self.lengths.items[unit]
        first, end = items.first[sample : sample + 2]
        place = first + np.flatnonzero(self.item_parts[unit][first:end] == 0)[number]
        cells_per_feature = int(items.rows[place]) * int(items.cols[place]) // int(items.features[place])
        return int(items.rows[place]) // isqrt(cells_per_feature)

    def _items_of(self, sample: int, unit: str, number: int) -> tuple[int, ItemTenths]:
        """Return how many items one medium of a sample is for an encoder, and when they are shown if that is known."""
        first, end = self.lengths.items[unit].first[sample : sample + 2]
        parts = self.item_parts[unit][first:end]
        edges = [*np.flatnonzero(parts == 0).tolist(), len(parts)]
        of_medium = slice(edges[number], edges[number + 1])
        tenths = self.item_tenths[unit][first:end][of_medium].tolist() if unit in self.item_tenths else None
        return of_medium.stop - of_medium.start, tenths

    def unit_features(self, sample: int, unit: str) -> list[int]:
        """Return the LLM tokens of each medium of a sample that one encoder reads, summed over its items."""
        items = self.lengths.items[unit]
        if items.first[sample] == items.first[sample + 1]:
            return []
        of_sample = slice(items.first[sample], items.first[sample + 1])
        media_starts = np.flatnonzero(self.item_parts[unit][of_sample] == 0)
        if unit in self.joins:
            media = zip(*self._joined_media(sample, unit), strict=True)
            return [self.joins[unit].num_features(image, num_items) for image, num_items in media]
        features: list[int] = np.add.reduceat(items.features[of_sample], media_starts).tolist()
        return features

    def joined_features(self, unit: str, sample: int, num_items: int) -> FeatureMix:
        """Return the features of the LLM, made of the rows that the sample's first `num_items` items send.

        For an encoder in `joins`; the items must be those of whole media.
        """
        images, counts = self._joined_media(sample, unit)
        num_media = int(np.searchsorted(np.cumsum(counts), num_items, side="right"))
        return join_media(self.joins[unit], images[:num_media], counts[:num_media])

    def _joined_media(self, sample: int, unit: str) -> tuple[list[tuple[int, int] | None], list[int]]:
        """Return the size of each image of a sample, None for videos, and the number of items of each medium."""
        first = self.lengths.items[unit].first
        of_sample = slice(first[sample], first[sample + 1])
        starts = np.flatnonzero(self.item_parts[unit][of_sample] == 0)
        widths, heights = (column[of_sample][starts].tolist() for column in self.image_sizes[unit])
        counts = np.diff(np.append(starts, first[sample + 1] - first[sample])).tolist()
        return [(width, height) if width else None for width, height in zip(widths, heights, strict=True)], counts

    def media_grids(self, sample: int, unit: str, merge: int, items_apart: bool = False) -> list[MediumGrid]:
        """Return the features of each medium of a sample that one encoder reads, which merges squares of patches.

        items_apart: text stands between the items of a medium, so that each is a medium of its own.
        """
        items = self.lengths.items[unit]
        of_sample = slice(items.first[sample], items.first[sample + 1])
        rows, cols = items.rows[of_sample] // merge, items.cols[of_sample] // merge
        starts = np.flatnonzero(self.item_parts[unit][of_sample] == 0).tolist()
        ends = [*starts[1:], len(rows)][: len(starts)]
        times = self.item_times[unit][of_sample].tolist()
        if items_apart:
            sides = zip(rows.tolist(), cols.tolist(), strict=True)
            return [MediumGrid((0,), down, across) for down, across in sides]
        return [
            MediumGrid(times[start:end], int(rows[start]), int(cols[start]))
            for start, end in zip(starts, ends, strict=True)
        ]

    def locate_item(self, sample: int, unit: str, position: int) -> tuple[int, int, int]:
        """Locate an item of a sample: return the number of its medium, its part, and the number of parts.

        `position` counts the sample's items of this encoder; a medium's number counts the media that the encoder reads.
        """
        first = self.lengths.items[unit].first
        parts = self.item_parts[unit][first[sample] : first[sample + 1]]
        media_starts = np.flatnonzero(parts == 0)
        medium = int(np.searchsorted(media_starts, position, side="right")) - 1
        media_end = media_starts[medium + 1] if medium + 1 < len(media_starts) else len(parts)
        return medium, int(parts[position]), int(media_end - media_starts[medium])

    def remarks(self) -> tuple[str, ...]:
        """Return what the user should know: that it comes from the cache, what was quarantined, and warnings."""
        remarks = []
        if self.cache_folder:
            remarks.append(
                f"{len(self.lengths):,} samples are known from the index cached in {self.cache_folder}, and no media "
                "file that was looked at has changed since; to read all lengths anew, remove that folder"
            )
        if self.quarantined:
            total = len(self.lengths) + len(self.quarantined)
            counts = f"{len(self.quarantined):,} of {total:,} samples are set aside ({_count_kinds(self.quarantined)})"
            remarks.append(f"{counts}; the first: {self.quarantined[0]}")
        return (*remarks, *self.warnings)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of samples, weights and lengths: equal on two ranks if and only if they have the same data."""
        digest = hashlib.sha256(self.content_sha256.encode())
        columns = [self.lengths.tokens, self.lengths.targets]
        if isinstance(self.weights, SourceValues):
            columns.append(self.weights.sources)
            digest.update(self.weights.values.tobytes())
        else:
            digest.update(self.weights.tobytes())
        for unit, items in sorted(self.lengths.items.items()):
            digest.update(unit.encode())
            columns += [items.first, items.rows, items.cols, items.tokens, items.features]
            columns += [self.item_parts[unit], self.item_times[unit]]
            columns += self.image_sizes[unit] if unit in self.joins else ()
            columns += [self.item_tenths[unit]] if unit in self.item_tenths else []
        if self.mixture is not None:
            columns.append(self.mixture.sources)
            digest.update(repr((self.mixture.unit, self.mixture.phases)).encode())
        for column in columns:
            digest.update(sha256_of(column).encode())
        return digest.hexdigest()


def build_index(recipe: Recipe, which: DataPart = "train", notify: NotifyCallback = lambda _: None) -> DataIndex:
    """Index the recipe's samples, or read the cached index if nothing that it depends on has changed.

    Samples that cannot be used are quarantined. `notify` is called while a large source is read, and if a cached index
    is broken.

    Raises:
        DataError: a source cannot be read, no sample is usable or teaches anything, or no image fits the settings.
        RecipeError: every parameter of the model is frozen.
        TooManyBadSamples: the share of quarantined samples is above `data.max_bad_rate`.
    """
    trust_hosts(recipe.data)
    sources = recipe.data.sources_of(which)
    if sources and sources[0].states_lengths:
        return _index_stated_lengths(recipe, sources)
    cache = IndexCache.for_recipe(recipe, sources, which)
    with nullcontext() if cache is None else cache.locked():  # other processes of this machine wait for the builder
        stored = cache.load(notify) if cache is not None else None
        cache_folder = cache.folder if cache is not None and stored is not None else None
        if stored is None and cache is not None:
            try:
                stored = _read_sources(recipe, which, cache, notify)
            except OSError as error:  # of the cache, such as a full disk: what is wrong with sources is a DataError
                problem = f"the index cannot be cached in {cache.folder} (data.index_cache sets another folder)"
                notify(f"{problem}: {error}")
        if stored is None:
            stored = _read_sources(recipe, which, None, notify)
    check_bad_rate(stored.quarantined, len(stored.samples) + len(stored.quarantined), recipe.data.max_bad_rate)
    if not len(stored.samples):
        files = ", ".join(str(source.path) for source in sources) or "an empty list"
        setting = "data.sources" if which == "train" else recipe.data.held_out_setting
        if which == "validation" and recipe.data.validation_fraction is not None:
            setting += f": {recipe.data.validation_fraction:g} holds out too little, raise it"
        raise DataError(f"{setting}: no usable samples in {files}")
    index = replace(from_stored(stored, recipe, sources), cache_folder=cache_folder)
    if which == "train":
        idle = warn_of_idle_training(recipe, index.lengths, index.samples)
        index = replace(index, warnings=(*index.warnings, *idle))
    return index


def _index_stated_lengths(recipe: Recipe, sources: Sequence[SourceSettings]) -> DataIndex:
    """Build an index of lengths without samples."""
    stated = read_stated_lengths(recipe, sources)
    num_usable = len(stated.lengths)
    check_bad_rate(stated.quarantined, num_usable + len(stated.quarantined), recipe.data.max_bad_rate)
    if not num_usable:
        raise DataError(f"data.sources: no usable rows in {', '.join(str(s.path) for s in sources)}")
    parts: dict[str, Lengths] = {
        unit: StoredColumn(np.zeros(len(items.tokens), dtype=np.uint8)) for unit, items in stated.lengths.items.items()
    }
    weights = SourceValues(stated.source, np.ones(len(sources)))
    index = DataIndex((), stated.lengths, weights, stated.quarantined, parts, parts, stated.sha256)
    return _with_sources(index, recipe, sources, stated.source)


def _with_sources(
    index: DataIndex, recipe: Recipe, sources: Sequence[SourceSettings], source_numbers: Lengths
) -> DataIndex:
    """Add which source each sample is of, and how often training uses it."""
    named = SampleSources.of(sources, source_numbers)
    weights = _sample_weights(sources, named)
    mixture = find_mixture(sources, named, recipe.data.share_unit)
    uses = sample_uses(weights, named, mixture, index.lengths.tokens, recipe.train.steps or 1)
    lengths = replace(index.lengths, uses=uses)
    return replace(index, lengths=lengths, weights=weights, sources=named, mixture=mixture)


def _sample_weights(sources: Sequence[SourceSettings], named: SampleSources) -> SourceValues:
    """Return (S,) how often an epoch uses each sample. Raises `DataError` for an epoch of too many repeated uses."""
    weights = np.array([source.weight for source in sources], dtype=np.float64)
    repeated_uses = np.array(named.num_samples) * np.maximum(weights - 1, 0)
    allowed = max(MAX_REPEATED_USES, len(named.numbers))
    if repeated_uses.sum() > allowed:
        largest = int(repeated_uses.argmax())
        raise DataError(
            f"data.sources: {sources[largest].path} has weight {weights[largest]:g}; with all weights above 1 an epoch "
            f"would repeat samples {int(repeated_uses.sum()):,} times, allowed: {allowed:,}; lower all "
            "weights in proportion"
        )
    return SourceValues(named.numbers, weights)


def check_bad_rate(quarantined: Sequence[Quarantined], total: int, allowed: float) -> None:
    """Raise `TooManyBadSamples`, with counts by kind and the first few samples, above the rate `allowed`.

    Raises DataError instead where all samples are too long: then data.seq_len is wrong, and no sample is.
    """
    if len(quarantined) <= allowed * total:
        return
    if len(quarantined) == total and all(q.kind == "too_long" for q in quarantined):
        raise DataError(
            f"data.seq_len: all {total} samples are longer than this; raise it, or shorten the samples. "
            f"The first one:\n  {quarantined[0]}"
        )
    first = "".join(f"\n  {sample}" for sample in one_per_reason(quarantined)[:MAX_SAMPLES_IN_MESSAGE])
    if len(quarantined) == total and all(q.kind == "preference" for q in quarantined):
        raise DataError(f"data.sources: none of {total} samples can be learned; of the first: {quarantined[0].reason}")
    raise TooManyBadSamples(
        f"{len(quarantined)} of {total} samples are unusable ({_count_kinds(quarantined)}); "
        f"data.max_bad_rate = {allowed:g} allows {int(allowed * total)}. Repair them or raise the rate. "
        f"The first ones:{first}"
    )


def _count_kinds(quarantined: Sequence[Quarantined]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(q.kind for q in quarantined).most_common())


def _read_sources(recipe: Recipe, which: DataPart, cache: IndexCache | None, notify: NotifyCallback) -> StoredIndex:
    """Read all sources of a part in a child process; store the result if there is a cache."""
    sources = recipe.data.sources_of(which)
    split = SampleSplit.of(recipe.data, which)
    with index_in_memory() if cache is None else cache.new_index() as index:

        def read(notify_parent: NotifyCallback) -> dict[str, Any]:
            rest = _read_into(index, recipe, sources, split, notify_parent)
            return {"rest": rest, "versions": {url: astuple(version) for url, version in known_versions().items()}}

        answer = read_within(reading_bounds(recipe.data.limits, sources), read, notify)
        pin_versions({url: FileVersion(*version) for url, version in answer["versions"].items()})
        return index.finish(answer["rest"])


def _read_into(
    index: NewIndex | IndexInMemory,
    recipe: Recipe,
    sources: Sequence[SourceSettings],
    split: SampleSplit | None,
    notify: NotifyCallback,
) -> dict[str, Any]:
    """Read sources into a new index; return what `finish` of it needs."""
    index.records.seek(0)  # a process before this one may have died
    index.records.truncate()
    tokenizer = load_recipe_tokenizer(recipe)
    versions = MediaVersions() if isinstance(index, NewIndex) else None
    spelled = SpelledTexts(tokenizer)
    with _garbage_collection_paused():
        entries = notify_progress(measure_samples(recipe, sources, tokenizer, versions, split), notify)
        columns, quarantined = _collect(recipe, entries, index.records, spelled)
        done_reading()
        warnings = (*tokenizer.warnings, *spelled.remarks(), *((split.remark,) if split is not None else ()))
        if columns.num_cut:
            cut_to = f"{columns.num_cut:,} samples are cut to {recipe.data.sample_tokens} tokens"
            warnings += (f"data.too_long = cut: {cut_to}",)
        content_sha256 = columns.content.hexdigest()
        return index.write(IndexContent(versions, columns.columns(), quarantined, content_sha256, warnings))


def index_chosen(
    recipe: Recipe, sources: Sequence[SourceSettings], chosen: SampleFilter
) -> tuple[DataIndex, list[Quarantined | None]]:
    """Index the samples that `chosen` selects as training would; nothing is cached, and there may be none.

    Returns also for each of them in order why it cannot be used; None: it is the next one of the index. Raises
    `DataError` if a source cannot be read.
    """
    trust_hosts(recipe.data)
    alike = [source.model_copy(update={"weight": 1.0, "share": None}) for source in sources]
    tokenizer = load_recipe_tokenizer(recipe)
    spelled = SpelledTexts(tokenizer)
    entries = list(measure_samples(recipe, alike, tokenizer, split=chosen))
    with io.BytesIO() as records:
        columns, quarantined = _collect(recipe, entries, records, spelled)
        arrays = columns.columns()
        table = SampleTable(records.getvalue(), arrays["ends"])
    warnings = (*tokenizer.warnings, *spelled.remarks())
    stored = StoredIndex(table, arrays, tuple(quarantined), columns.content.hexdigest(), warnings)
    reasons = [entry if isinstance(entry, Quarantined) else None for entry in entries]
    return from_stored(stored, recipe, alike), reasons


def _collect(
    recipe: Recipe, entries: Iterable[MeasuredSample | Quarantined], records: BinaryIO, spelled: SpelledTexts
) -> tuple["_IndexColumns", list[Quarantined]]:
    """Collect the lengths of the samples that can be used, and the others."""
    joined = {unit for unit, encoder in recipe.model.all_encoders.items() if tile_join(encoder, recipe.data)}
    columns = _IndexColumns(records, _units_with_items(recipe), joined, _timed_units(recipe))
    quarantined: list[Quarantined] = []
    for entry in entries:
        if isinstance(entry, MeasuredSample):
            columns.add(entry)
            spelled.add(entry.sample)
        else:
            quarantined.append(entry)
    return columns, quarantined


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the collector of reference cycles: reading makes none, and looking for them takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _IndexColumns:
    """Collects measured samples: lengths as columns of numbers instead of objects, and the samples as records."""

    def __init__(
        self, records: BinaryIO, units: Sequence[str], joined_units: Container[str], timed_units: Container[str]
    ) -> None:
        self._records = records
        self._units = units
        self._joined_units = joined_units
        self._timed_units = timed_units
        self._end = 0  # of the last record
        self._num_pending = 0  # samples whose lengths are not in narrow types yet
        self.num_cut = 0
        self._sample_columns = {name: array("q") for name in ("tokens", "targets", "source", "ends")}
        item_columns = [f"{unit}.{name}" for unit in units for name in ("count", "rows", "cols", "part", "time")]
        item_columns += [
            f"{unit}.image_{side}" for unit in units if unit in joined_units for side in ("width", "height")
        ]
        item_columns += [f"{unit}.tenth" for unit in units if unit in timed_units]
        self._item_columns = {name: array("q") for name in item_columns}
        self._narrow: dict[str, list[StoredColumn]] = {name: [] for name in (*self._sample_columns, *item_columns)}
        self.content = hashlib.sha256()

    def add(self, measured: MeasuredSample) -> None:
        content = content_json(measured.sample)
        record = sample_record(measured.sample, content)
        self._records.write(record)
        self._end += len(record)
        self.content.update(content.encode("ascii"))
        columns = self._sample_columns
        columns["tokens"].append(measured.tokens)
        columns["targets"].append(measured.targets)
        columns["source"].append(measured.source)
        columns["ends"].append(self._end)
        self.num_cut += measured.sample.cut is not None
        for unit in self._units:
            self._add_items(unit, measured.items[unit])
        self._num_pending += 1
        if self._num_pending == BLOCK_ROWS:
            self._narrow_down()

    def _add_items(self, unit: str, media: Sequence[MediumItems]) -> None:
        columns = self._item_columns
        columns[f"{unit}.count"].append(sum(len(items.grids) for items in media))
        for items in media:
            times = items.times or range(len(items.grids))
            for part, (rows, cols) in enumerate(items.grids):
                columns[f"{unit}.rows"].append(rows)
                columns[f"{unit}.cols"].append(cols)
                columns[f"{unit}.part"].append(part)
                columns[f"{unit}.time"].append(times[part])
                if unit in self._timed_units:
                    columns[f"{unit}.tenth"].append(items.tenths[part] if items.tenths else 0)
                if unit in self._joined_units:
                    width, height = items.image_size or (0, 0)
                    columns[f"{unit}.image_width"].append(width)
                    columns[f"{unit}.image_height"].append(height)

    def columns(self) -> dict[str, StoredColumn]:
        """Return all columns in the narrowest types, and forget them."""
        self._narrow_down()
        columns = {}
        for name in sorted(self._narrow):
            blocks = self._narrow.pop(name)
            if name.endswith(".count"):
                name = f"{name.removesuffix('count')}first"
                blocks = _cumulative(blocks)
            columns[name] = StoredColumn(np.concatenate([block.stored for block in blocks]))
        return columns

    def _narrow_down(self) -> None:
        """Move the lengths so far into narrow types: a billion samples take 21 GB while they are read, and not 72."""
        for name, column in (self._sample_columns | self._item_columns).items():
            if column or not self._narrow[name]:
                self._narrow[name].append(StoredColumn.narrowed(name, np.array(column, dtype=np.int64)))
            del column[:]
        self._num_pending = 0


def _cumulative(counts: Sequence[StoredColumn]) -> list[StoredColumn]:
    """Return the sums before each of the counts, and of all."""
    sums = [StoredColumn.narrowed("items", np.zeros(1, dtype=np.int64))]
    total = 0
    for block in counts:
        of_block = total + np.cumsum(block[:])
        total = int(of_block[-1]) if len(of_block) else total
        sums.append(StoredColumn.narrowed("items", of_block))
    return sums


def _units_with_items(recipe: Recipe) -> list[str]:
    """Return the units of the model that compute on media: all but the LLM."""
    generators = [] if recipe.model.generator is None else [GENERATOR]
    return [*recipe.model.all_encoders, *generators]


def _timed_units(recipe: Recipe) -> tuple[str, ...]:
    """Return the encoders of whose video items is known when they are shown."""
    if not recipe.data.video.states_times:
        return ()
    return tuple(unit for unit, encoder in recipe.model.all_encoders.items() if encoder.modality == VISION.name)


def from_stored(stored: StoredIndex, recipe: Recipe, sources: Sequence[SourceSettings]) -> DataIndex:
    """Return the index of what was read or cached, with what encoders and weights of the recipe make of it."""
    arrays = stored.arrays
    items: dict[str, ItemLengths] = {}
    joins: dict[str, TileJoin] = {}
    image_sizes: dict[str, tuple[Lengths, Lengths]] = {}
    for unit, encoder in recipe.model.all_encoders.items():
        tokens = CellRule(encoder.partial_cells, encoder.cells_per_token, encoder.extra_tokens)
        features = CellRule(
            encoder.partial_cells, encoder.cells_per_feature, encoder.extra_features, encoder.features_per_item
        )
        items[unit] = _item_lengths(arrays, unit, tokens, features)
        join = tile_join(encoder, recipe.data)
        if join is not None:
            joins[unit] = join
            image_sizes[unit] = arrays[f"{unit}.image_width"], arrays[f"{unit}.image_height"]
    if recipe.model.generator is not None:  # patches of the images that the assistant draws, and queries in the LLM
        queries = CellRule(always=recipe.model.generator.context_tokens)
        items[GENERATOR] = _item_lengths(arrays, GENERATOR, CellRule(), queries)
    index = DataIndex(
        samples=stored.samples,
        lengths=SampleLengths(arrays["tokens"], arrays["targets"], items),
        weights=SourceValues(arrays["source"], np.ones(len(sources))),
        quarantined=stored.quarantined,
        item_parts={unit: arrays[f"{unit}.part"] for unit in items},
        item_times={unit: arrays[f"{unit}.time"] for unit in items},
        joins=joins,
        image_sizes=image_sizes,
        item_tenths={unit: arrays[f"{unit}.tenth"] for unit in _timed_units(recipe)},
        modalities={unit: encoder.modality for unit, encoder in recipe.model.all_encoders.items()},
        content_sha256=stored.content_sha256,
        warnings=stored.warnings,
        folder=stored.folder,
        generator=recipe.model.generator,
    )
    return _with_sources(index, recipe, sources, arrays["source"])


def _item_lengths(arrays: Mapping[str, LengthColumn], unit: str, tokens: CellRule, features: CellRule) -> ItemLengths:
    """Return the lengths of a unit's items, by what their grids become in its blocks and in the LLM."""
    rows, cols = arrays[f"{unit}.rows"], arrays[f"{unit}.cols"]
    return ItemLengths(
        arrays[f"{unit}.first"], rows, cols, GridColumn(rows, cols, tokens), GridColumn(rows, cols, features)
    )
