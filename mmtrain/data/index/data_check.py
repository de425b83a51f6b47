"""Check sources for `mmtrain data check`: read and decode everything once, so that nothing can fail while training."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mmtrain.data.callbacks import NotifyCallback, ProgressCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample, find_unusable
from mmtrain.data.index.reading_bounds import reading_bounds
from mmtrain.data.index.sample_lengths import MeasuredSample, measure_samples, notify_progress
from mmtrain.data.index.spelled_texts import SpelledTexts
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ
from mmtrain.data.media.image_grids import Grid
from mmtrain.data.media.item_readers import ITEM_READERS
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.sound_files import decode_sound
from mmtrain.data.media.target_images import TargetImageReader
from mmtrain.data.remote.locations import trust_hosts
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.errors import DataError, HostileFileError
from mmtrain.limited_reads import Bounds, now_reading_item, read_within, reads_in_one_thread
from mmtrain.machine_limits import num_available_cores
from mmtrain.recipe.settings.data_settings import AudioDataSettings, DataSettings, LimitSettings, SourceSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES, VISION, MediaKind
from mmtrain.recipe.settings.schema import Recipe

_MEDIA_IN_FLIGHT_PER_CORE = 8  # results are returned in order; this bounds how many wait in memory
DECODING_PROCESSOR_S = 60.0  # for one medium; so long may a worker hang while training
_DEFAULT_BAD_RATE = 0.01  # as the default of data.max_bad_rate
# Settings for checks without a recipe: the defaults, and clips of up to a day.
_ANY_DATA = DataSettings(
    sources=(SourceSettings(path=Path("any")),), seq_len=1, audio=AudioDataSettings(max_seconds=86_400)
)
_ANY_ENCODER = {"layers": 1, "hidden": 2, "heads": 1, "ffn": 1}


@dataclass(frozen=True)
class CheckReport:
    """What a check of some sources found."""

    samples: int
    media: dict[str, int]  # kind -> number decoded without error; a medium of several samples counts once
    seconds_of_sound: float
    bad: tuple[Quarantined, ...]  # in the order of the sources, those found while reading first
    allowed_rate: float

    @property
    def kinds(self) -> dict[str, int]:
        """The number of bad samples of each kind, the most frequent kind first."""
        return dict(Counter(q.kind for q in self.bad).most_common())

    @property
    def passed(self) -> bool:
        """Whether at most the allowed share of the samples is bad."""
        return len(self.bad) <= self.allowed_rate * self.samples


CheckedKind: TypeAlias = MediaKind | Literal["target image"]


@dataclass(frozen=True)
class _ItemizedMedia:
    """A medium and the grids of its items, from its header."""

    kind: CheckedKind
    media: Media
    grids: tuple[Grid, ...]


_SampleMedia = tuple[Sample, list[_ItemizedMedia]]
_Decode = Callable[[_ItemizedMedia], BadMediaError | None]


def check_sources_for_recipe(
    recipe: Recipe,
    sources: Sequence[SourceSettings],
    progress: ProgressCallback | None = None,
    notify: NotifyCallback = lambda _: None,
) -> CheckReport:
    """Check sources as a recipe would use them: with its limits, its preprocessing and its tokenizer.

    `notify` is called while headers are read, and after that `progress` while media are decoded. Raises `DataError` if
    a source cannot be read at all, or if there are no samples.
    """
    trust_hosts(recipe.data)
    check = partial(_check_for_recipe, recipe, sources)
    return _check_within(reading_bounds(recipe.data.limits, sources), check, progress, notify)


def _check_for_recipe(
    recipe: Recipe, sources: Sequence[SourceSettings], progress: ProgressCallback, notify: NotifyCallback
) -> CheckReport:
    tokenizer = load_recipe_tokenizer(recipe)
    for warning in tokenizer.warnings:
        notify(warning)
    samples: list[_SampleMedia] = []
    bad: list[Quarantined] = []
    spelled = SpelledTexts(tokenizer)
    for entry in notify_progress(measure_samples(recipe, sources, tokenizer), notify):
        if isinstance(entry, MeasuredSample):
            samples.append((entry.sample, _itemized(entry, recipe)))
            spelled.add(entry.sample)
        else:
            bad.append(entry)
    for remark in spelled.remarks():
        notify(remark)
    _check_not_empty(sources, len(samples) + len(bad))
    encoders = [recipe.model.all_encoders[unit] for unit in _first_encoders(recipe).values()]
    decoder = _Decoder(recipe.data, _encoders_by_kind(encoders), recipe.model.generator)
    return _decode_and_report(samples, bad, decoder, recipe.data.max_bad_rate, progress)


def check_sources(
    sources: Sequence[SourceSettings],
    progress: ProgressCallback | None = None,
    notify: NotifyCallback = lambda _: None,
) -> CheckReport:
    """Check sources for no model in particular: with default limits, and samples of any length.

    `notify` is called while headers are read, and after that `progress` while media are decoded. Raises `DataError` if
    a source cannot be read at all, or if there are no samples.
    """
    return _check_within(reading_bounds(LimitSettings(), sources), partial(_check_any, sources), progress, notify)


def _check_within(
    bounds: Bounds,
    check: Callable[[ProgressCallback, NotifyCallback], CheckReport],
    progress: ProgressCallback | None,
    notify: NotifyCallback,
) -> CheckReport:
    """Check in a child process, since nothing is known of the files yet."""

    def read(send: Callable[[Any], None]) -> dict[str, Any]:
        return asdict(check(lambda done, total: send([done, total]), send))

    def receive(note: Any) -> None:
        if isinstance(note, str):
            notify(note)
        elif progress is not None:
            progress(*note)

    values = read_within(replace(bounds, processor_s=DECODING_PROCESSOR_S), read, receive)
    return CheckReport(**(values | {"bad": tuple(Quarantined(**entry) for entry in values["bad"])}))


def _check_any(sources: Sequence[SourceSettings], progress: ProgressCallback, notify: NotifyCallback) -> CheckReport:
    samples: list[_SampleMedia] = []
    bad: list[Quarantined] = []
    encoders = _encoders_by_kind(modality.settings.model_validate(_ANY_ENCODER) for modality in MODALITIES.values())
    entries = (entry for source in sources for entry in read_samples(source, LimitSettings()))
    spelled = SpelledTexts()
    for entry in notify_progress(entries, notify):
        if isinstance(entry, Quarantined):
            bad.append(entry)
            continue
        media = _read_headers(entry, encoders)
        if isinstance(media, Quarantined):
            bad.append(media)
        else:
            samples.append((entry, media))
            spelled.add(entry)
    for remark in spelled.remarks():
        notify(remark)
    _check_not_empty(sources, len(samples) + len(bad))
    # Clips of any length are decoded, but their frames are not computed: those of a day would fill the memory.
    decoder = _Decoder(_ANY_DATA, {kind: encoders[kind] for kind in VISION.media})
    return _decode_and_report(samples, bad, decoder, _DEFAULT_BAD_RATE, progress)


def _check_not_empty(sources: Sequence[SourceSettings], num_samples: int) -> None:
    if num_samples == 0:
        paths = ", ".join(str(source.path) for source in sources)
        raise DataError(f"{paths}: no samples; expected at least one, good or bad")


def _itemized(measured: MeasuredSample, recipe: Recipe) -> list[_ItemizedMedia]:
    """Return the media of a sample as the first encoder of each modality reads them: all of them decode the same."""
    media: list[_ItemizedMedia] = []
    for modality, unit in _first_encoders(recipe).items():
        media_of_unit = measured.sample.media_of(MODALITIES[modality].media)
        # Of a sample that is cut, only media before the cut are read.
        for (kind, medium), items in zip(media_of_unit, measured.items[unit], strict=measured.sample.cut is None):
            media.append(_ItemizedMedia(kind, medium, items.grids))
    targets = zip(measured.sample.target_images, measured.items.get(GENERATOR, ()), strict=False)
    return [*media, *(_ItemizedMedia("target image", medium, items.grids) for medium, items in targets)]


def _first_encoders(recipe: Recipe) -> dict[str, str]:
    """Return for each modality that the model reads the unit of its first encoder."""
    units: dict[str, str] = {}
    for unit, settings in recipe.model.all_encoders.items():
        units.setdefault(settings.modality, unit)
    return units


def _encoders_by_kind(encoders: Iterable[EncoderSettings]) -> dict[MediaKind, EncoderSettings]:
    """Return for each kind of media the settings of the encoder that reads it."""
    return {kind: settings for settings in encoders for kind in MODALITIES[settings.modality].media}


def _read_headers(sample: Sample, encoders: Mapping[MediaKind, EncoderSettings]) -> list[_ItemizedMedia] | Quarantined:
    """Read the headers of a sample's media; without a model, images are alike, shown or to draw."""
    unusable = find_unusable(sample, VISION.media)
    if unusable is not None:
        return unusable
    media: list[_ItemizedMedia] = []
    try:
        for modality in MODALITIES.values():
            for kind, medium in sample.media_of(modality.media):
                now_reading_item(str(medium))
                reader = ITEM_READERS[modality.name](encoders[kind], _ANY_DATA)
                media.append(_ItemizedMedia(kind, medium, reader.read_items(kind, medium).grids))
        reader = ITEM_READERS[VISION.name](encoders["image"], _ANY_DATA)
        for medium in sample.target_images:
            media.append(_ItemizedMedia("image", medium, reader.read_items("image", medium).grids))
    except BadMediaError as bad:
        return Quarantined.of(sample, bad.kind, str(bad))
    except HostileFileError as error:
        return Quarantined.of(sample, "deadly", str(error))
    return media


@dataclass(frozen=True)
class _Decoder:
    """Decodes a medium as training would, and drops the result."""

    data: DataSettings
    encoders: Mapping[MediaKind, EncoderSettings]  # clips of a kind without encoder are decoded for their length only
    generator: GeneratorSettings | None = None

    def __call__(self, item: _ItemizedMedia) -> BadMediaError | None:
        try:
            now_reading_item(str(item.media))
            if item.kind == "target image":
                assert self.generator is not None, "samples with target images are bad without a generator"
                TargetImageReader(self.generator, self.data).load_pixels(item.media)
                return None
            settings = self.encoders.get(item.kind)
            if settings is None:
                for _ in decode_sound(item.media):
                    pass
            else:
                reader = ITEM_READERS[settings.modality](settings, self.data)  # threads must not share its cache
                reader.load_cells(item.kind, item.media, 0, len(item.grids), item.grids[0])
        except BadMediaError as bad:
            return bad
        except HostileFileError as error:
            return BadMediaError("deadly", str(error))
        return None


def _decode_and_report(
    samples: Sequence[_SampleMedia],
    bad: Sequence[Quarantined],
    decode: _Decode,
    allowed_rate: float,
    progress: ProgressCallback,
) -> CheckReport:
    distinct = list(dict.fromkeys(medium for _, media in samples for medium in media))
    errors: dict[_ItemizedMedia, BadMediaError] = {}
    for done, (medium, error) in enumerate(_decode_in_threads(distinct, decode), 1):
        if error is not None:
            errors[medium] = error
        progress(done, len(distinct))
    undecodable = []
    for sample, media in samples:
        error = next((errors[medium] for medium in media if medium in errors), None)
        if error is not None:
            undecodable.append(Quarantined.of(sample, error.kind, str(error)))
    decoded = [medium for medium in distinct if medium not in errors]
    num_frames = sum(rows for medium in decoded if medium.kind == "audio" for rows, _ in medium.grids)
    seconds_of_sound = num_frames * HOP_SAMPLES / SAMPLE_RATE_HZ
    counts: dict[str, int] = dict(Counter[str](medium.kind for medium in decoded))
    return CheckReport(len(samples) + len(bad), counts, seconds_of_sound, (*bad, *undecodable), allowed_rate)


def _decode_in_threads(
    distinct: Sequence[_ItemizedMedia], decode: _Decode
) -> Iterator[tuple[_ItemizedMedia, BadMediaError | None]]:
    """Decode on all cores and yield in order; decoders release the interpreter's lock."""
    num_cores = 1 if reads_in_one_thread() else num_available_cores()
    chunk_size = num_cores * _MEDIA_IN_FLIGHT_PER_CORE
    with ThreadPoolExecutor(num_cores) as pool:
        for first in range(0, len(distinct), chunk_size):
            chunk = distinct[first : first + chunk_size]
            yield from zip(chunk, pool.map(decode, chunk), strict=True)
