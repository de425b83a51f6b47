"""From data files to samples with their lengths: text is counted in tokens, of media only the headers are read."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Literal, TypeVar

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample, find_unusable
from mmtrain.data.media.audio import read_num_frames, require_soundfile
from mmtrain.data.media.image_grids import Grid
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media, ParquetCell
from mmtrain.data.media.vision_items import read_item_grids
from mmtrain.data.text.chat_tokenizer import AUDIO_TOKEN, ChatTokenizer
from mmtrain.errors import DataError
from mmtrain.recipe.model_settings import AudioSettings, VisionSettings
from mmtrain.recipe.schema import DataSettings, Recipe, SourceSettings

HEADER_THREADS = 4  # reading headers waits for the disk; more threads would only wait for each other
_AT_ONCE = 2048  # samples whose media are looked at together
_PER_TASK = 64  # files that a thread looks at in a row
_REMEMBERED = 1 << 16  # media, since samples about the same picture mostly follow each other

_TOLD_EVERY = 100_000  # samples


_T = TypeVar("_T")
_Kind = Literal["image", "video", "audio"]
_Found = tuple[Grid, ...] | BadMediaError  # the items that a medium becomes, or what is wrong with it
_FoundOf = dict[_Kind, dict[str | Media, _Found]]  # by path where a medium is a file of its own: they compare faster
_Count = Callable[[Sample, Sequence[int], Sequence[int]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """A usable sample and its lengths."""

    sample: Sample
    source: int  # which of the sources it is from
    tokens: int
    targets: int
    grids: dict[str, list[tuple[Grid, ...]]]  # encoder unit -> by medium, of each item; a clip's are its frames and 1


def measure_samples(recipe: Recipe, sources: Sequence[SourceSettings]) -> Iterator[MeasuredSample | Quarantined]:
    """Read sources and headers of their media: every sample in order, with its lengths or with what is wrong with it.

    Raises `DataError` if a source cannot be read, or the settings fit no image.
    """
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer_file)
    check_data_settings(recipe, tokenizer)
    count, headers = tokenizer.length_counter(_most_tokens(recipe.data)), _Headers(recipe)
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        for number, source in enumerate(sources):
            entries = read_samples(source, recipe.data.limits)
            while some := list(islice(entries, _AT_ONCE)):
                headers.look(pool, [entry for entry in some if isinstance(entry, Sample)])
                for entry in some:
                    if isinstance(entry, Sample):
                        yield _measure(entry, number, recipe, count, headers.found)
                    else:
                        yield entry


def notify_progress(entries: Iterable[_T], notify: NotifyCallback) -> Iterator[_T]:
    """The entries; `notify` hears now and then how many there were."""
    for done, entry in enumerate(entries, 1):
        yield entry
        if done % _TOLD_EVERY == 0:
            notify(f"reading headers: {done:,} samples so far")


def encoder_settings(recipe: Recipe) -> dict[str, VisionSettings | AudioSettings]:
    """The encoders that the recipe's model has."""
    settings = {"vision": recipe.model.vision, "audio": recipe.model.audio}
    return {unit: encoder for unit, encoder in settings.items() if encoder is not None}


def check_data_settings(recipe: Recipe, tokenizer: ChatTokenizer) -> None:
    """Settings of data and model that contradict each other, whatever the samples are."""
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
    vision, image = recipe.model.vision, recipe.data.image
    if vision is None:
        return
    unit = vision.patch * vision.merge
    if image.scheme == "native" and not unit**2 <= image.max_pixels >= image.min_pixels:
        raise DataError(
            f"data.image.max_pixels is {image.max_pixels}; it must be at least data.image.min_pixels = "
            f"{image.min_pixels} and one merged patch of {unit} x {unit} = {unit**2} pixels"
        )
    if image.scheme == "tiles" and (image.tile % unit or image.tile // vision.patch > vision.max_side):
        raise DataError(
            f"data.image.tile is {image.tile}; it must be a multiple of patch * merge = {unit} and at most "
            f"patch * max_side = {vision.patch * vision.max_side} pixels"
        )
    if image.scheme == "fixed" and (image.size % unit or image.size // vision.patch > vision.max_side):
        raise DataError(
            f"data.image.size is {image.size}; it must be a multiple of patch * merge = {unit} and at most "
            f"patch * max_side = {vision.patch * vision.max_side} pixels"
        )


class _Headers:
    """What media become, from their headers; one that several samples show is mostly looked at once."""

    def __init__(self, recipe: Recipe) -> None:
        self._data, self._vision, self._audio = recipe.data, recipe.model.vision, recipe.model.audio
        self.found: _FoundOf = {"image": {}, "video": {}, "audio": {}}

    def look(self, pool: ThreadPoolExecutor, samples: Sequence[Sample]) -> None:
        """Look at all media of the samples; what was found before may be forgotten."""
        if self._vision is not None:
            most = self._data.max_images
            self._look(pool, "image", [image for s in samples if len(s.images) <= most for image in s.images])
            self._look(pool, "video", [video for s in samples for video in s.videos])
        if self._audio is not None:
            self._look(pool, "audio", [clip for s in samples for clip in s.clips])

    def _look(self, pool: ThreadPoolExecutor, kind: _Kind, media: Sequence[Media]) -> None:
        """Look at what is new: in this thread while that is work, in several where it is waiting for a disk."""
        found = self.found[kind]
        if len(found) > _REMEMBERED:
            found.clear()
        new = {key: one for one in media if (key := _key(one)) not in found}
        keys, files = list(new), list(new.values())
        tasks = [files[i : i + _PER_TASK] for i in range(0, len(files), _PER_TASK)]
        seen: list[list[_Found]] = []
        in_columns = any(isinstance(file, ParquetCell) for file in files)  # of which threads would each decode more
        waits = False
        while len(seen) < len(tasks) and not waits:  # threads that have nothing to wait for wait for each other
            clock, worked = time.perf_counter(), time.thread_time()
            seen.append(self._look_at(kind, tasks[len(seen)]))
            waits = not in_columns and time.perf_counter() - clock > 2 * (time.thread_time() - worked)
        seen += pool.map(partial(self._look_at, kind), tasks[len(seen) :])
        found.update(zip(keys, chain.from_iterable(seen), strict=True))

    def _look_at(self, kind: _Kind, files: Sequence[Media]) -> list[_Found]:
        return [self._one(kind, file) for file in files]

    def _one(self, kind: _Kind, media: Media) -> _Found:
        data, vision, audio = self._data, self._vision, self._audio
        try:
            if kind == "audio":
                assert audio is not None
                return ((read_num_frames(media, data.audio, 2 * audio.downsample), 1),)
            assert vision is not None
            return read_item_grids(kind, media, data.image, data.video, vision)
        except BadMediaError as bad:
            return bad


def _most_tokens(data: DataSettings) -> int:
    """Of one sample."""
    return min(data.max_sample_tokens or data.seq_len, data.seq_len)


def _key(media: Media) -> str | Media:
    return media.path if isinstance(media, FileMedia) else media


def _measure(
    sample: Sample, source: int, recipe: Recipe, count: _Count, found: _FoundOf
) -> MeasuredSample | Quarantined:
    data, vision, audio = recipe.data, recipe.model.vision, recipe.model.audio
    num_images, num_videos, num_clips = len(sample.images), len(sample.videos), len(sample.clips)
    miscounted = find_unusable(sample, has_vision=vision is not None, has_audio=audio is not None)
    if miscounted is not None:
        return miscounted
    if num_images > data.max_images:
        reason = f"{num_images} images, data.max_images = {data.max_images}"
        return Quarantined.of(sample, "too_many_images", reason)
    if num_images + num_videos and vision is None:
        return Quarantined.of(sample, "no_vision", "it has images or videos, but the recipe's model has no vision unit")
    if num_clips and audio is None:
        return Quarantined.of(sample, "no_audio", "it has clips, but the recipe's model has no audio unit")
    grids: dict[str, list[tuple[Grid, ...]]] = {"vision": [], "audio": []}
    pictures = num_images
    media_of: list[tuple[_Kind, Media]] = [*sample.visual_media, *[("audio", clip) for clip in sample.clips]]
    for kind, media in media_of:
        size = found[kind][_key(media)]
        if isinstance(size, BadMediaError):
            return Quarantined.of(sample, size.kind, str(size))
        pictures += len(size) if kind == "video" else 0
        grids["audio" if kind == "audio" else "vision"].append(size)
    if pictures > data.max_images:
        reason = f"{pictures} images, frames of videos included, data.max_images = {data.max_images}"
        return Quarantined.of(sample, "too_many_images", reason)
    merged, stacked = vision.merge**2 if vision else 1, 2 * audio.downsample if audio else 1
    tokens, targets = count(
        sample,
        [sum([r * c // merged for r, c in items]) for items in grids["vision"]],
        [frames // stacked for ((frames, _),) in grids["audio"]],
    )
    limit = _most_tokens(data)
    if tokens > limit:
        key = "data.max_sample_tokens" if limit == data.max_sample_tokens else "data.seq_len"
        at_least = "" if targets else "at least "  # nobody counted further
        return Quarantined.of(sample, "too_long", f"{at_least}{tokens} LLM tokens, {key} = {limit}")
    return MeasuredSample(sample, source, tokens, targets, grids)
