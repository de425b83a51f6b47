"""Read samples with their lengths: text is counted in tokens, and of media only the headers are read."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample, find_unusable
from mmtrain.data.media.audio import read_num_frames, require_soundfile
from mmtrain.data.media.image_grids import Grid
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media, MediaKind, ParquetCell
from mmtrain.data.media.vision_items import read_item_grids
from mmtrain.data.text.chat_tokenizer import AUDIO_TOKEN, ChatTokenizer, LengthCounter
from mmtrain.errors import DataError
from mmtrain.recipe.model_settings import AudioSettings, VisionSettings
from mmtrain.recipe.schema import DataSettings, Recipe, SourceSettings

HEADER_THREADS = 4  # reading headers waits for the disk; more threads would only wait for the interpreter's lock
_CHUNK_SAMPLES = 2048  # whose media headers are read together
_TASK_FILES = 64  # that a thread reads one after the other
_MAX_CACHED_HEADERS = 1 << 16  # of each kind; samples about the same medium are mostly near each other
_NOTIFY_EVERY_SAMPLES = 100_000

_T = TypeVar("_T")
_Header = tuple[Grid, ...] | BadMediaError  # the grids of the items of a medium, or why it cannot be used
_HeaderKey = str | Media  # the path of a medium in a file of its own, which compares faster than a `FileMedia`
_Headers = dict[MediaKind, dict[_HeaderKey, _Header]]


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """A usable sample and its lengths."""

    sample: Sample
    source: int  # the number of the source that it is from
    tokens: int  # LLM tokens
    targets: int  # tokens to predict
    # Encoder unit -> for each medium the grids of its items; the grid of a clip is (frames, 1).
    grids: dict[str, list[tuple[Grid, ...]]]


def measure_samples(recipe: Recipe, sources: Sequence[SourceSettings]) -> Iterator[MeasuredSample | Quarantined]:
    """Read the sources and the headers of their media; yield every sample in order, measured or quarantined.

    Raises `DataError` if a source cannot be read, or the settings contradict each other.
    """
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer_file)
    check_data_settings(recipe, tokenizer)
    count_tokens = tokenizer.length_counter(_max_sample_tokens(recipe.data))
    reader = _HeaderReader(recipe)
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        for number, source in enumerate(sources):
            entries = read_samples(source, recipe.data.limits)
            while chunk := list(islice(entries, _CHUNK_SAMPLES)):
                reader.read(pool, [entry for entry in chunk if isinstance(entry, Sample)])
                for entry in chunk:
                    if isinstance(entry, Sample):
                        yield _measure(entry, number, recipe, count_tokens, reader.headers)
                    else:
                        yield entry


def notify_progress(entries: Iterable[_T], notify: NotifyCallback) -> Iterator[_T]:
    """Yield the entries, and notify now and then how many there were."""
    for done, entry in enumerate(entries, 1):
        yield entry
        if done % _NOTIFY_EVERY_SAMPLES == 0:
            notify(f"reading headers: {done:,} samples so far")


def encoder_settings(recipe: Recipe) -> dict[str, VisionSettings | AudioSettings]:
    """Return the settings of the encoders that the recipe's model has, by unit."""
    settings = {"vision": recipe.model.vision, "audio": recipe.model.audio}
    return {unit: encoder for unit, encoder in settings.items() if encoder is not None}


def check_data_settings(recipe: Recipe, tokenizer: ChatTokenizer) -> None:
    """Raise `DataError` where settings of data and model contradict each other for any samples."""
    vocab = recipe.model.llm.vocab
    if tokenizer.vocab_size > vocab:
        raise DataError(
            f"model.llm.vocab is {vocab}, but {recipe.data.tokenizer} (data.tokenizer) has {tokenizer.vocab_size}: "
            f"set model.llm.vocab to at least {tokenizer.vocab_size}"
        )
    if recipe.model.audio is not None:
        require_soundfile()
        if "audio" not in tokenizer.item_ids:
            raise DataError(
                f"data.tokenizer: {recipe.data.tokenizer} lacks the special token {AUDIO_TOKEN} that model.audio "
                "needs; add it with `Tokenizer.add_special_tokens` of the `tokenizers` library and save it"
            )
    if recipe.model.vision is not None:
        _check_image_settings(recipe.model.vision, recipe.data)


def _check_image_settings(vision: VisionSettings, data: DataSettings) -> None:
    image = data.image
    merged_patch = vision.patch * vision.merge
    max_side = vision.patch * vision.max_side
    if image.scheme == "native" and not merged_patch**2 <= image.max_pixels >= image.min_pixels:
        raise DataError(
            f"data.image.max_pixels is {image.max_pixels}; it must be at least data.image.min_pixels = "
            f"{image.min_pixels} and one merged patch of {merged_patch} x {merged_patch} = {merged_patch**2} pixels"
        )
    if image.scheme == "tiles" and (image.tile % merged_patch or image.tile > max_side):
        raise DataError(
            f"data.image.tile is {image.tile}; it must be a multiple of patch * merge = {merged_patch} and at most "
            f"patch * max_side = {max_side} pixels"
        )
    if image.scheme == "fixed" and (image.size % merged_patch or image.size > max_side):
        raise DataError(
            f"data.image.size is {image.size}; it must be a multiple of patch * merge = {merged_patch} and at most "
            f"patch * max_side = {max_side} pixels"
        )


class _HeaderReader:
    """Reads the headers of media, and caches them: a medium of several samples is mostly read once."""

    def __init__(self, recipe: Recipe) -> None:
        self._data = recipe.data
        self._vision = recipe.model.vision
        self._audio = recipe.model.audio
        self.headers: _Headers = {"image": {}, "video": {}, "audio": {}}

    def read(self, pool: ThreadPoolExecutor, samples: Sequence[Sample]) -> None:
        """Read the headers of all media of the samples into `headers`; earlier ones may be dropped."""
        if self._vision is not None:
            max_images = self._data.max_images
            images = [image for sample in samples if len(sample.images) <= max_images for image in sample.images]
            self._read_kind(pool, "image", images)
            self._read_kind(pool, "video", [video for sample in samples for video in sample.videos])
        if self._audio is not None:
            self._read_kind(pool, "audio", [clip for sample in samples for clip in sample.clips])

    def _read_kind(self, pool: ThreadPoolExecutor, kind: MediaKind, media: Sequence[Media]) -> None:
        """Read what is not cached: in this thread while that is computing, in several once it is waiting for a disk."""
        headers = self.headers[kind]
        if len(headers) > _MAX_CACHED_HEADERS:
            headers.clear()
        new: dict[_HeaderKey, Media] = {}
        for medium in media:
            key = _header_key(medium)
            if key not in headers:
                new[key] = medium
        files = list(new.values())
        tasks = [files[i : i + _TASK_FILES] for i in range(0, len(files), _TASK_FILES)]
        results: list[list[_Header]] = []
        has_parquet = any(isinstance(file, ParquetCell) for file in files)  # threads would decode more columns each
        waits_for_disk = False
        while len(results) < len(tasks) and not waits_for_disk:  # threads without waiting compete for the lock
            started_s = time.perf_counter()
            started_cpu_s = time.thread_time()
            results.append(self._read_files(kind, tasks[len(results)]))
            elapsed_s = time.perf_counter() - started_s
            cpu_s = time.thread_time() - started_cpu_s
            waits_for_disk = not has_parquet and elapsed_s > 2 * cpu_s
        results += pool.map(partial(self._read_files, kind), tasks[len(results) :])
        headers.update(zip(new, chain.from_iterable(results), strict=True))

    def _read_files(self, kind: MediaKind, files: Sequence[Media]) -> list[_Header]:
        return [self._read_file(kind, file) for file in files]

    def _read_file(self, kind: MediaKind, media: Media) -> _Header:
        data, vision, audio = self._data, self._vision, self._audio
        try:
            if kind == "audio":
                assert audio is not None
                return ((read_num_frames(media, data.audio, 2 * audio.downsample), 1),)
            assert vision is not None
            return read_item_grids(kind, media, data.image, data.video, vision)
        except BadMediaError as bad:
            return bad


def _max_sample_tokens(data: DataSettings) -> int:
    return min(data.max_sample_tokens or data.seq_len, data.seq_len)


def _header_key(media: Media) -> _HeaderKey:
    return media.path if isinstance(media, FileMedia) else media


def _measure(
    sample: Sample, source: int, recipe: Recipe, count_tokens: LengthCounter, headers: _Headers
) -> MeasuredSample | Quarantined:
    data, vision, audio = recipe.data, recipe.model.vision, recipe.model.audio
    unusable = find_unusable(sample, has_vision=vision is not None, has_audio=audio is not None)
    if unusable is not None:
        return unusable
    num_images = len(sample.images)
    if num_images > data.max_images:
        reason = f"{num_images} images, data.max_images = {data.max_images}"
        return Quarantined.of(sample, "too_many_images", reason)
    if vision is None and (sample.images or sample.videos):
        return Quarantined.of(sample, "no_vision", "it has images or videos, but the recipe's model has no vision unit")
    if audio is None and sample.clips:
        return Quarantined.of(sample, "no_audio", "it has clips, but the recipe's model has no audio unit")
    grids: dict[str, list[tuple[Grid, ...]]] = {"vision": [], "audio": []}
    num_images_and_frames = num_images
    media_with_kinds: list[tuple[MediaKind, Media]] = [
        *sample.visual_media,
        *[("audio", clip) for clip in sample.clips],
    ]
    for kind, media in media_with_kinds:
        header = headers[kind][_header_key(media)]
        if isinstance(header, BadMediaError):
            return Quarantined.of(sample, header.kind, str(header))
        if kind == "video":
            num_images_and_frames += len(header)
        grids["audio" if kind == "audio" else "vision"].append(header)
    if num_images_and_frames > data.max_images:
        reason = f"{num_images_and_frames} images, frames of videos included, data.max_images = {data.max_images}"
        return Quarantined.of(sample, "too_many_images", reason)
    patches_per_token = vision.merge**2 if vision else 1
    frames_per_token = 2 * audio.downsample if audio else 1
    features = [sum([rows * cols // patches_per_token for rows, cols in items]) for items in grids["vision"]]
    clip_features = [frames // frames_per_token for ((frames, _),) in grids["audio"]]
    tokens, targets = count_tokens(sample, features, clip_features)
    max_tokens = _max_sample_tokens(data)
    if tokens > max_tokens:
        key = "data.max_sample_tokens" if max_tokens == data.max_sample_tokens else "data.seq_len"
        at_least = "" if targets else "at least "  # the counter stopped early
        return Quarantined.of(sample, "too_long", f"{at_least}{tokens} LLM tokens, {key} = {max_tokens}")
    return MeasuredSample(sample, source, tokens, targets, grids)
