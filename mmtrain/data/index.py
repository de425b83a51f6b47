"""The index of a dataset: every usable sample with its lengths, and every other one with the reason why not.

Reads the data files and headers of media, never pixels or sound; each rank builds its own, and fingerprints tell
that they agree.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch import IntArray, ItemLengths, SampleLengths
from mmtrain.data.audio import read_frames, require_soundfile
from mmtrain.data.media import BadMediaError, Media
from mmtrain.data.pictures import read_grids
from mmtrain.data.read import read
from mmtrain.data.resize import Grid
from mmtrain.data.sample import Quarantined, Sample, find_miscount
from mmtrain.data.tokenize import AUDIO, NO_LABEL, ChatTokenizer
from mmtrain.errors import DataError, TooManyBadSamples
from mmtrain.recipe.schema import AudioSettings, Recipe, SourceSettings, VisionSettings

HEADER_THREADS = 8  # reading headers waits for the disk, not for the processor
NAMED_IN_MESSAGE = 5

Progress = Callable[[int, int], None]  # done, total
_Kind = Literal["image", "video", "audio"]
_Sizes = dict[tuple[_Kind, Media], tuple[Grid, ...] | BadMediaError]  # the items that each medium becomes


@dataclass(frozen=True)
class DataIndex:
    """The usable samples of a dataset, their lengths, and what was set aside."""

    samples: tuple[Sample, ...]
    lengths: SampleLengths
    weights: npt.NDArray[np.float64]  # (S,) how often an epoch uses each sample
    quarantined: tuple[Quarantined, ...]
    # encoder unit -> (I,) which part of its medium (image, video, clip) an item is, from 0
    parts: dict[str, IntArray] = field(default_factory=dict)

    def features(self, sample: int, unit: str = "vision") -> list[int]:
        """LLM tokens of each medium of a sample, all its items together; none where the model has no such encoder."""
        items = self.lengths.items.get(unit)
        if items is None or items.first[sample] == items.first[sample + 1]:
            return []
        here = slice(items.first[sample], items.first[sample + 1])
        starts = np.flatnonzero(self.parts[unit][here] == 0)
        features: list[int] = np.add.reduceat(items.features[here], starts).tolist()
        return features

    def grids(self, sample: int, unit: str = "vision") -> tuple[tuple[Grid, ...], ...]:
        """Rows and columns of the items of each medium of a sample; none where the model has no such encoder."""
        items = self.lengths.items.get(unit)
        if items is None:
            return ()
        here = slice(items.first[sample], items.first[sample + 1])
        found: list[tuple[Grid, ...]] = []
        for part, rows, cols in zip(self.parts[unit][here], items.rows[here], items.cols[here], strict=True):
            so_far = found.pop() if part else ()
            found.append((*so_far, (int(rows), int(cols))))
        return tuple(found)

    def part_of(self, sample: int, position: int, unit: str = "vision") -> tuple[int, int, int]:
        """Which medium of its sample an item is of, which part of that, and how many parts it has."""
        first = self.lengths.items[unit].first
        parts = self.parts[unit][first[sample] : first[sample + 1]]
        starts = np.flatnonzero(parts == 0)
        medium = int(np.searchsorted(starts, position, side="right")) - 1
        end = starts[medium + 1] if medium + 1 < len(starts) else len(parts)
        return medium, int(parts[position]), int(end - starts[medium])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over ids, weights and lengths: equal on two ranks iff they see the same data."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(f"{sample.index}:{sample.id}\n".encode())
        arrays = [self.weights, self.lengths.tokens, self.lengths.targets]
        for unit, items in sorted(self.lengths.items.items()):
            digest.update(unit.encode())
            arrays += [items.first, items.rows, items.cols, items.tokens, items.features]
        for array in arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()


def build(
    recipe: Recipe, which: Literal["train", "validation"] = "train", progress: Progress | None = None
) -> DataIndex:
    """Index the recipe's samples.

    Samples that cannot be used are set aside with kind and reason. Raises `DataError` if a source cannot be read, no
    sample is usable, or the settings fit no image; `TooManyBadSamples` above `data.max_bad_rate`.
    """
    data = recipe.data
    sources = data.sources if which == "train" else data.validation
    usable, quarantined = measure(recipe, sources, progress)
    check_bad_rate(quarantined, len(usable) + len(quarantined), data.max_bad_rate)
    if not usable:
        where = "data.sources" if which == "train" else "data.validation"
        raise DataError(f"{where}: no usable samples in {', '.join(str(s.path) for s in sources) or 'an empty list'}")
    return DataIndex(
        samples=tuple(m.sample for m in usable),
        lengths=_lengths(usable, recipe),
        weights=np.array([m.weight for m in usable], dtype=np.float64),
        quarantined=tuple(quarantined),
        parts={unit: _parts([m.grids[unit] for m in usable]) for unit in encoders_of(recipe)},
    )


def measure(
    recipe: Recipe, sources: Sequence[SourceSettings], progress: Progress | None = None
) -> tuple[list["Measured"], list[Quarantined]]:
    """Read sources and headers of their media: the samples that can be used, with their lengths, and the others.

    Raises `DataError` if a source cannot be read, or the settings fit no image.
    """
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
    _check_settings(recipe, tokenizer)
    read_samples = [(entry, source.weight) for source in sources for entry in read(source, recipe.data.limits)]
    sizes = _read_sizes([s for s, _ in read_samples if isinstance(s, Sample)], recipe, progress)
    usable: list[Measured] = []
    quarantined: list[Quarantined] = []
    for entry, weight in read_samples:
        measured = _measure(entry, weight, recipe, tokenizer, sizes) if isinstance(entry, Sample) else entry
        (quarantined if isinstance(measured, Quarantined) else usable).append(measured)  # type: ignore[arg-type]
    return usable, quarantined


def check_bad_rate(quarantined: Sequence[Quarantined], total: int, allowed: float) -> None:
    """Raise `TooManyBadSamples`, with counts by kind and the first few named, above the rate `allowed`."""
    if len(quarantined) <= allowed * total:
        return
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(q.kind for q in quarantined).most_common())
    first = "".join(f"\n  {q}" for q in quarantined[:NAMED_IN_MESSAGE])
    raise TooManyBadSamples(
        f"{len(quarantined)} of {total} samples are unusable ({kinds}); data.max_bad_rate = {allowed:g} allows "
        f"{int(allowed * total)}. Repair them or raise the rate. The first ones:{first}"
    )


@dataclass(frozen=True)
class Measured:
    """A usable sample and its lengths."""

    sample: Sample
    weight: float
    tokens: int
    targets: int
    grids: dict[str, list[tuple[Grid, ...]]]  # encoder unit -> by medium, of each item; a clip's are its frames and 1


def _check_settings(recipe: Recipe, tokenizer: ChatTokenizer) -> None:
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
                f"data.tokenizer: {recipe.data.tokenizer} lacks the special token {AUDIO} that model.audio needs; "
                "add it with `Tokenizer.add_special_tokens` of the `tokenizers` library and save it"
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


def _read_sizes(samples: Sequence[Sample], recipe: Recipe, progress: Progress | None) -> _Sizes:
    """The grid of every image and clip of the samples, or what is wrong with it; each file is looked at once."""
    data, vision, audio = recipe.data, recipe.model.vision, recipe.model.audio
    files: list[tuple[_Kind, Media]] = []
    if vision is not None:
        files += [("image", image) for s in samples if len(s.images) <= data.max_images for image in s.images]
        files += [("video", video) for s in samples for video in s.videos]
    if audio is not None:
        files += [("audio", clip) for s in samples for clip in s.clips]
    files = list(dict.fromkeys(files))

    def look(file: tuple[_Kind, Media]) -> tuple[Grid, ...] | BadMediaError:
        kind, media = file
        try:
            if kind == "audio":
                assert audio is not None
                return ((read_frames(media, data.audio, 2 * audio.downsample), 1),)
            assert vision is not None
            return read_grids(kind, media, data.image, data.video, vision)
        except BadMediaError as bad:
            return bad

    found: _Sizes = {}
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        for done, (file, size) in enumerate(zip(files, pool.map(look, files), strict=True), 1):
            found[file] = size
            if progress is not None:
                progress(done, len(files))
    return found


def _measure(
    sample: Sample,
    weight: float,
    recipe: Recipe,
    tokenizer: ChatTokenizer,
    sizes: _Sizes,
) -> Measured | Quarantined:
    data, vision, audio = recipe.data, recipe.model.vision, recipe.model.audio
    num_images, num_videos, num_clips = len(sample.images), len(sample.videos), len(sample.clips)
    miscounted = find_miscount(sample, sees=vision is not None, hears=audio is not None)
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
    media_of: list[tuple[_Kind, Media]] = [*sample.sights, *(("audio", clip) for clip in sample.clips)]
    for kind, media in media_of:
        size = sizes[kind, media]
        if isinstance(size, BadMediaError):
            return Quarantined.of(sample, size.kind, str(size))
        pictures += len(size) if kind == "video" else 0
        grids["audio" if kind == "audio" else "vision"].append(size)
    if pictures > data.max_images:
        reason = f"{pictures} images, frames of videos included, data.max_images = {data.max_images}"
        return Quarantined.of(sample, "too_many_images", reason)
    merged, stacked = vision.merge**2 if vision else 1, 2 * audio.downsample if audio else 1
    encoded = tokenizer.encode(
        sample,
        [sum(r * c // merged for r, c in items) for items in grids["vision"]],
        [frames // stacked for ((frames, _),) in grids["audio"]],
    )
    limit = min(data.max_sample_tokens or data.seq_len, data.seq_len)
    if len(encoded.ids) > limit:
        key = "data.max_sample_tokens" if limit == data.max_sample_tokens else "data.seq_len"
        return Quarantined.of(sample, "too_long", f"{len(encoded.ids)} LLM tokens, {key} = {limit}")
    targets = int((encoded.labels != NO_LABEL).sum())
    return Measured(sample, weight, len(encoded.ids), targets, grids)


def _lengths(usable: Sequence[Measured], recipe: Recipe) -> SampleLengths:
    tokens = np.array([m.tokens for m in usable], dtype=np.int64)
    targets = np.array([m.targets for m in usable], dtype=np.int64)
    items = {unit: _items([m.grids[unit] for m in usable], encoder) for unit, encoder in encoders_of(recipe).items()}
    return SampleLengths(tokens, targets, items)


def encoders_of(recipe: Recipe) -> dict[str, VisionSettings | AudioSettings]:
    """The encoders that the recipe's model has."""
    settings = {"vision": recipe.model.vision, "audio": recipe.model.audio}
    return {unit: encoder for unit, encoder in settings.items() if encoder is not None}


def _parts(grids: Sequence[list[tuple[Grid, ...]]]) -> IntArray:
    """Which part of its medium each item is; the grids are by sample and medium."""
    counts = np.array([len(items) for media in grids for items in media], dtype=np.int64)
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def _items(grids: Sequence[list[tuple[Grid, ...]]], encoder: VisionSettings | AudioSettings) -> ItemLengths:
    """One encoder's items; the grids are by sample and medium."""
    first = np.cumsum([0, *(sum(map(len, media)) for media in grids)], dtype=np.int64)
    sides = np.array([side for media in grids for items in media for side in items], dtype=np.int64).reshape(-1, 2)
    rows, cols = np.ascontiguousarray(sides[:, 0]), np.ascontiguousarray(sides[:, 1])
    if isinstance(encoder, AudioSettings):
        return ItemLengths(first, rows, cols, rows // 2, rows // (2 * encoder.downsample))
    area: IntArray = rows * cols
    return ItemLengths(first, rows, cols, area + int(encoder.class_token), area // encoder.merge**2)
