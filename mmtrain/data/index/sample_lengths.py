"""Read samples with their lengths: text is counted in tokens, and of media only the headers are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from math import isqrt
from typing import TypeVar

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import PLURALS, Quarantined, Sample, find_unusable, is_document_sample
from mmtrain.data.formats.sample_split import SampleFilter
from mmtrain.data.index.media_versions import MediaVersions, run_tasks
from mmtrain.data.media.image_grids import MediumItems, Patches, item_grids
from mmtrain.data.media.item_readers import ITEM_READERS, ItemReader
from mmtrain.data.media.joined_tiles import TileJoin
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media, ParquetCell
from mmtrain.data.media.target_images import TargetImageReader
from mmtrain.data.text.chat_tokenizer import DRAW_TOKENS
from mmtrain.data.text.cut_samples import MAX_CUT_CHARACTERS, cut_encoded, find_cut, make_cut, tokens_of_items
from mmtrain.data.text.sample_tokenizer import (
    IGNORE_INDEX,
    BadConversationError,
    ItemTenths,
    LengthCounter,
    MediaFeatures,
    SampleTokenizer,
    add_queries,
    split_images,
    split_videos,
)
from mmtrain.errors import DataError, HostileFileError
from mmtrain.families import read_model_folder
from mmtrain.limited_reads import go_on_reading, now_reading_item, reads_in_one_thread, renew_processor_time
from mmtrain.recipe.settings.data_settings import ImageSettings, SourceSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES, MediaKind, dotted_unit
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.vision_settings import VisionSettings

HEADER_THREADS = 4  # reading headers waits for the disk; more threads would only wait for the interpreter's lock
_CHUNK_SAMPLES = 2048  # whose media headers are read together
_TASK_FILES = 64  # that a thread reads one after the other
_RENEW_EVERY_SAMPLES = 16
_MAX_CACHED_HEADERS = 1 << 16  # of each kind; samples about the same medium are mostly near each other
_NOTIFY_EVERY_SAMPLES = 100_000

_T = TypeVar("_T")
_Header = MediumItems | BadMediaError  # the items of a medium, or why it cannot be used
_HeaderKey = str | Media  # the path of a medium in a file of its own, which compares faster than a `FileMedia`
_Headers = dict[tuple[str, MediaKind], dict[_HeaderKey, _Header]]  # by encoder unit and kind of media


@dataclass(frozen=True)
class FeatureCounter:
    """Counts the features of a medium from its items."""

    cells_per_feature: int
    partial_cells: int  # that may be missing in the last token of an item
    extra_features: int  # of each item
    features_per_item: int | None  # of every item, if they do not depend on its size
    join: TileJoin | None  # of several items of an image

    @classmethod
    def of(cls, settings: EncoderSettings, image: ImageSettings) -> "FeatureCounter":
        """Return the counter of an encoder."""
        join = TileJoin.of(settings, image) if isinstance(settings, VisionSettings) else None
        of_item = settings.extra_features, settings.features_per_item
        return cls(settings.cells_per_feature, settings.partial_cells, *of_item, join)

    def count(self, items: MediumItems) -> int:
        """Return the LLM tokens of a medium, without marks that a chat template writes around them."""
        if self.join is not None:
            return self.join.num_features(items.image_size, len(items.grids))
        if self.features_per_item is not None:
            return self.features_per_item * len(items.grids)
        num_cells = [rows * cols + self.partial_cells for rows, cols in items.grids]
        return sum([cells // self.cells_per_feature + self.extra_features for cells in num_cells])


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """A usable sample and its lengths."""

    sample: Sample
    source: int  # the number of the source that it is from
    tokens: int  # LLM tokens
    targets: int  # tokens to predict
    # Unit -> those of each medium; the grid of a clip is (frames, 1). The generator: those of each target image.
    items: dict[str, list[MediumItems]]


def measure_samples(
    recipe: Recipe,
    sources: Sequence[SourceSettings],
    tokenizer: SampleTokenizer,
    versions: MediaVersions | None = None,
    split: SampleFilter | None = None,
) -> Iterator[MeasuredSample | Quarantined]:
    """Read the sources and the headers of their media; yield every sample in order, measured or quarantined.

    versions: where the files of media are recorded whose headers are read. split: which samples are used.
    Raises `DataError` if a source cannot be read, or the settings contradict each other.
    """
    check_data_settings(recipe, tokenizer)
    reader = _HeaderReader(recipe, versions)
    count_tokens = tokenizer.length_counter(recipe.data.sample_tokens)
    measurer = _SampleMeasurer(recipe, tokenizer, count_tokens, reader.headers)
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        for number, source in enumerate(sources):
            entries = read_samples(source, recipe.data.limits, split)
            while chunk := _read_chunk(entries):
                reader.read(pool, [entry for entry in chunk if isinstance(entry, Sample)])
                for entry in chunk:
                    if isinstance(entry, Sample):
                        yield measurer.measure(entry, number)
                    else:
                        yield entry


def _read_chunk(entries: Iterator[Sample | Quarantined]) -> list[Sample | Quarantined]:
    go_on_reading()
    chunk = []
    for entry in islice(entries, _CHUNK_SAMPLES):
        chunk.append(entry)
        if not len(chunk) % _RENEW_EVERY_SAMPLES:
            renew_processor_time()
    return chunk


def notify_progress(entries: Iterable[_T], notify: NotifyCallback) -> Iterator[_T]:
    """Yield the entries, and notify now and then how many there were."""
    for done, entry in enumerate(entries, 1):
        yield entry
        if done % _NOTIFY_EVERY_SAMPLES == 0:
            notify(f"reading headers: {done:,} samples so far")


def check_data_settings(recipe: Recipe, tokenizer: SampleTokenizer) -> None:
    """Raise `DataError` where settings of data and model contradict each other for any samples."""
    vocab = recipe.model.llm.vocab
    if tokenizer.vocab_size > vocab:
        growth = ""
        if recipe.model.hf is not None or recipe.model.llm.hf is not None:
            growth = " if this is the model's tokenizer with more tokens; their weights start as the mean of the others"
        raise DataError(
            f"model.llm.vocab is {vocab}, but {recipe.data.tokenizer} (data.tokenizer) has {tokenizer.vocab_size} "
            f"tokens: set model.llm.vocab to at least {tokenizer.vocab_size}{growth}"
        )
    if tokenizer.writes_times and not recipe.data.video.states_times:
        raise DataError(
            f"data.video.sampling is {recipe.data.video.sampling}, but {recipe.data.tokenizer} (data.tokenizer) writes "
            "when each part of a video is shown, which is known of `ends`, `seconds` and `by_length`: leave it "
            "out, or set it to that of the model's processor"
        )
    if tokenizer.writes_rows_apart:
        _check_rows_apart(recipe)
    for unit, settings in recipe.model.all_encoders.items():
        ITEM_READERS[settings.modality](settings, recipe.data).check_settings()
        if settings.modality not in tokenizer.item_ids:
            reason = tokenizer.describe_missing_item_token(settings.modality)
            raise DataError(
                f"data.tokenizer: {recipe.data.tokenizer} has no token for the features of "
                f"model.{dotted_unit(unit)}: {reason}"
            )
    if recipe.model.generator is not None and tokenizer.query_id is None:
        raise DataError(
            f"data.tokenizer: {recipe.data.tokenizer} has no place for images that the model draws (model.generator); "
            f"allowed: a `tokenizers` JSON file with the special tokens {' '.join(DRAW_TOKENS)}"
        )


def _check_rows_apart(recipe: Recipe) -> None:
    """Raise `DataError` unless all features of an image are a grid, between whose rows text can stand."""
    what = f"but {recipe.data.tokenizer} (data.tokenizer) writes each row of an image's features apart"
    encoders = {
        unit: settings for unit, settings in recipe.model.all_encoders.items() if isinstance(settings, VisionSettings)
    }
    if len(encoders) > 1:
        raise DataError(f"model: {' and '.join(encoders)} read images, {what}; allowed: one vision encoder")
    if recipe.data.image.scheme not in ("native", "fixed"):
        raise DataError(f"data.image.scheme is {recipe.data.image.scheme}, {what}; allowed: native, fixed")
    if recipe.model.llm.rope_sections is not None:
        raise DataError(f"model.llm.rope_sections is set, {what}; leave it out: an image has one place in the text")
    for unit, settings in encoders.items():
        if settings.features_per_item or settings.extra_features:
            raise DataError(
                f"model.{dotted_unit(unit)} makes features of an image that are no rows of its patches, {what}; "
                "allowed: no resampler, class_feature or join_tiles"
            )


class _HeaderReader:
    """Reads the headers of media, and caches them: a medium of several samples is mostly read once."""

    def __init__(self, recipe: Recipe, versions: MediaVersions | None) -> None:
        self._versions = versions
        self._max_images = recipe.data.max_images
        self.headers: _Headers = {}
        self._readers: dict[tuple[str, MediaKind], ItemReader] = {}
        for unit, settings in recipe.model.all_encoders.items():
            reader = ITEM_READERS[settings.modality](settings, recipe.data)
            for kind in MODALITIES[settings.modality].media:
                self.headers[unit, kind] = {}
                self._readers[unit, kind] = reader
        generator = recipe.model.generator
        self._target_reader = None if generator is None else TargetImageReader(generator, recipe.data)
        if generator is not None:
            self.headers[GENERATOR, "image"] = {}

    def read(self, pool: ThreadPoolExecutor, samples: Sequence[Sample]) -> None:
        """Read the headers of all media of the samples into `headers`; earlier ones may be dropped."""
        for (unit, kind), reader in self._readers.items():
            media = [
                medium
                for sample in samples
                if kind != "image" or len(sample.images) <= self._max_images  # a sample with more is quarantined
                for medium in sample.media[kind]
            ]
            read_items = partial(reader.read_items, kind)
            self._read_kind(pool, self.headers[unit, kind], read_items, media)
        if self._target_reader is not None:
            target_images = [medium for sample in samples for medium in sample.target_images[: self._max_images]]
            self._read_kind(pool, self.headers[GENERATOR, "image"], self._target_reader.read_items, target_images)

    def _read_kind(
        self,
        pool: ThreadPoolExecutor,
        headers: dict[_HeaderKey, _Header],
        read_items: Callable[[Media], MediumItems],
        media: Sequence[Media],
    ) -> None:
        """Read what is not cached, in several threads once one has waited for a disk."""
        if len(headers) > _MAX_CACHED_HEADERS:
            headers.clear()
        new: dict[_HeaderKey, Media] = {}
        for medium in media:
            key = _header_key(medium)
            if key not in headers:
                new[key] = medium
        files = list(new.values())
        tasks = [files[i : i + _TASK_FILES] for i in range(0, len(files), _TASK_FILES)]
        has_parquet = any(isinstance(file, ParquetCell) for file in files)  # threads would decode more columns each
        read_headers = partial(self._read_headers, read_items)
        one_thread = has_parquet or reads_in_one_thread()
        results = run_tasks(pool, read_headers, tasks, may_wait=not one_thread)
        headers.update(zip(new, chain.from_iterable(results), strict=True))

    def _read_headers(self, read_items: Callable[[Media], MediumItems], files: Sequence[Media]) -> list[_Header]:
        headers: list[_Header] = []
        for file in files:
            if self._versions is not None:
                self._versions.record(file)  # before: a file that changes meanwhile is read anew by the next run
            try:
                now_reading_item(file.path if isinstance(file, FileMedia) else str(file))
                headers.append(read_items(file))
            except BadMediaError as bad:
                headers.append(bad)
            except HostileFileError as error:
                headers.append(BadMediaError("deadly", str(error)))
        return headers


def _header_key(media: Media) -> _HeaderKey:
    return media.path if isinstance(media, FileMedia) else media


def _one_tile(items: MediumItems) -> MediumItems:
    """Return an image's items if it is not cut; those of a video or a clip are as they were."""
    return items if items.image_size is None else replace(items, grids=items.grids[:1])


@dataclass(frozen=True)
class _EncoderRule:
    """Which media an encoder reads, and how many features they become."""

    unit: str
    modality: str
    kinds: tuple[MediaKind, ...]
    features: FeatureCounter
    merge: int  # side of the squares of cells that become a feature


class _SampleMeasurer:
    """Measures samples whose headers have been read."""

    def __init__(
        self, recipe: Recipe, tokenizer: SampleTokenizer, count_tokens: LengthCounter, headers: _Headers
    ) -> None:
        self._data = recipe.data
        self._tokenizer = tokenizer
        self._count_tokens = count_tokens
        self._headers = headers
        self._generator = recipe.model.generator
        self._folder = recipe.model.hf
        self._read_kinds = {kind for unit, kind in headers if unit != GENERATOR}
        self._missing = [m for m in MODALITIES.values() if not self._read_kinds.issuperset(m.media)]
        self._encoders = [
            _EncoderRule(
                unit,
                settings.modality,
                MODALITIES[settings.modality].media,
                FeatureCounter.of(settings, recipe.data.image),
                isqrt(settings.tokens_per_feature),
            )
            for unit, settings in recipe.model.all_encoders.items()
        ]

    @cached_property
    def _not_built(self) -> Mapping[str, str]:
        """By modality, why an encoder of the recipe's folder is not built."""
        return {} if self._folder is None else read_model_folder(self._folder).settings.not_built

    def measure(self, sample: Sample, source: int) -> MeasuredSample | Quarantined:
        """Return the sample with its lengths, or the reason why it cannot be used."""
        data = self._data
        unusable = find_unusable(sample, self._read_kinds)
        if unusable is not None:
            return unusable
        num_images = len(sample.images) + len(sample.target_images)
        if num_images > data.max_images:
            reason = f"{num_images} images, data.max_images = {data.max_images}"
            return Quarantined.of(sample, "too_many_images", reason)
        for modality in self._missing:
            if any(sample.media[kind] for kind in modality.media):
                media_names = " or ".join(PLURALS[kind] for kind in modality.media)
                reason = f"it has {media_names}, but the recipe's model has no {modality.name} encoder"
                if (problem := self._not_built.get(modality.name)) is not None:
                    reason += f" ({problem})"
                return Quarantined.of(sample, f"no_{modality.name}", reason)
        if sample.target_images and self._generator is None:
            reason = "an assistant turn holds an image, but the recipe's model has no generator"
            if is_document_sample(sample):
                reason += "; documents: show of its source lets the user show the images of documents"
            return Quarantined.of(sample, "no_generator", reason)
        items = self._find_items(sample)
        if isinstance(items, Quarantined):
            return items
        num_images_and_frames = num_images + self._count_frames(sample, items)
        if num_images_and_frames > data.max_images:
            reason = f"{num_images_and_frames} images, frames of videos included, data.max_images = {data.max_images}"
            return Quarantined.of(sample, "too_many_images", reason)
        features = self._media_features(sample, items)
        try:
            now_reading_item(sample.source, sample.index)
            tokens, targets = self._count_tokens(sample, features)
            if tokens <= data.sample_tokens:
                return MeasuredSample(sample, source, tokens, targets, items)
            at_least = "" if targets else "at least "  # the counter stopped early
            key = "data.max_sample_tokens" if data.sample_tokens == data.max_sample_tokens else "data.seq_len"
            reason = f"{at_least}{tokens} LLM tokens, {key} = {data.sample_tokens}"
            if data.too_long == "reject":
                return Quarantined.of(sample, "too_long", reason)
            return self._cut(MeasuredSample(sample, source, tokens, targets, items), features, reason)
        except BadConversationError as bad:
            return Quarantined.of(sample, bad.kind, str(bad))
        except HostileFileError as error:
            return Quarantined.of(sample, "deadly", str(error))

    def _cut(self, whole: MeasuredSample, features: MediaFeatures, reason: str) -> MeasuredSample | Quarantined:
        """Return the first tokens of a sample that is too long. reason: why it is."""
        sample = whole.sample
        if sum(len(turn.text) + len(turn.fields) for turn in sample.turns) > MAX_CUT_CHARACTERS:
            what = f"{reason}; texts above {MAX_CUT_CHARACTERS:,} characters are not cut: divide them"
            return Quarantined.of(sample, "too_long", what)
        encoded = self._tokenizer.encode(sample, features)
        end, num_whole = find_cut(encoded.ids, tokens_of_items(self._tokenizer), features, self._data.sample_tokens)
        targets = int((cut_encoded(encoded, end).labels != IGNORE_INDEX).sum())
        if not targets:
            return Quarantined.of(sample, "too_long", f"{reason}; the first {end} hold nothing to learn")
        modalities = {encoder.unit: encoder.modality for encoder in self._encoders} | {GENERATOR: GENERATOR}
        items = {unit: media[: num_whole.get(modalities[unit], 0)] for unit, media in whole.items.items()}
        return MeasuredSample(replace(sample, cut=make_cut(end, features)), whole.source, end, targets, items)

    def _find_items(self, sample: Sample) -> dict[str, list[MediumItems]] | Quarantined:
        """Return for each encoder the items of each medium that it reads."""
        items: dict[str, list[MediumItems]] = {}
        for encoder in self._encoders:
            unit_items = items[encoder.unit] = []
            for kind, medium in sample.media_of(encoder.kinds):
                header = self._headers[encoder.unit, kind][_header_key(medium)]
                if isinstance(header, BadMediaError):
                    return Quarantined.of(sample, header.kind, str(header))
                unit_items.append(header)
            if not self._data.image.tile_several and len(sample.images) > 1:
                items[encoder.unit] = [_one_tile(of_medium) for of_medium in unit_items]
        if self._generator is not None:
            target_items = items[GENERATOR] = []
            for medium in sample.target_images:
                header = self._headers[GENERATOR, "image"][_header_key(medium)]
                if isinstance(header, BadMediaError):
                    return Quarantined.of(sample, header.kind, str(header))
                target_items.append(header)
        return items

    def _count_frames(self, sample: Sample, items: Mapping[str, Sequence[MediumItems]]) -> int:
        """Return how many images a sample's videos become; the first encoder that reads videos says it."""
        encoder = next((encoder for encoder in self._encoders if "video" in encoder.kinds), None)
        if encoder is None or not sample.videos:
            return 0
        media = zip(sample.media_of(encoder.kinds), items[encoder.unit], strict=True)
        return sum(len(of_medium.grids) for (kind, _), of_medium in media if kind == "video")

    def _media_features(self, sample: Sample, items: Mapping[str, Sequence[MediumItems]]) -> MediaFeatures:
        """Return for each modality the LLM tokens of each medium, summed over the encoders, as tokenizers take them."""
        features: dict[str, list[int]] = {}
        for encoder in self._encoders:
            of_unit = [encoder.features.count(of_medium) for of_medium in items[encoder.unit]]
            of_others = features.get(encoder.modality)
            if of_others is not None:
                of_unit = [num_features + others for num_features, others in zip(of_unit, of_others, strict=True)]
            features[encoder.modality] = of_unit
        return add_queries(self._split_media(features, sample, items), sample, self._generator)

    def _split_media(
        self, features: dict[str, list[int]], sample: Sample, items: Mapping[str, Sequence[MediumItems]]
    ) -> MediaFeatures:
        """Divide the LLM tokens of videos over their items, and those of images over their rows, as texts need it."""
        readers = {encoder.modality: encoder for encoder in self._encoders}

        def items_of(modality: str, number: int) -> tuple[int, ItemTenths]:
            medium = items[readers[modality].unit][number]
            return len(medium.grids), medium.tenths

        def rows_of(modality: str, number: int) -> int:
            [(rows, _)] = items[readers[modality].unit][number].grids
            return rows // readers[modality].merge

        divided: MediaFeatures = split_videos(features, sample, items_of) if sample.videos else features
        return split_images(divided, sample, rows_of) if self._tokenizer.writes_rows_apart else divided


def count_image_features(width: int, height: int, settings: VisionSettings, image: ImageSettings) -> int:
    """Return the LLM tokens of an image of `width` x `height` pixels that is alone in its sample."""
    grids = item_grids(width, height, image, Patches.of(settings))
    return FeatureCounter.of(settings, image).count(MediumItems(grids, image_size=(width, height)))
