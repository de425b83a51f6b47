"""`mmtrain data check`: everything is read and decoded once, so that nothing is left to go wrong while training."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from mmtrain.data.callbacks import NotifyCallback, ProgressCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample, find_unusable
from mmtrain.data.index.sample_lengths import MeasuredSample, measure_samples, notify_progress
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ, decoded_duration_s, load_log_mels, read_num_frames
from mmtrain.data.media.image_grids import Grid
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.vision_items import VisionItemDecoder, read_item_grids
from mmtrain.recipe.model_settings import VisionSettings
from mmtrain.recipe.schema import AudioDataSettings, ImageSettings, LimitSettings, Recipe, SourceSettings, VideoSettings

Kind = Literal["image", "video", "audio"]
_PER_CORE = 8  # media in flight, so that results wait in order without filling the memory
_PATCH = 14  # where no recipe says; decoding is the same for any


@dataclass(frozen=True)
class CheckReport:
    """What was found in some sources."""

    samples: int
    media: dict[str, int]  # decoded without fault, by kind; one that several samples show counts once
    seconds_of_sound: float
    bad: tuple[Quarantined, ...]  # in the order of the sources, those found while reading first
    allowed_rate: float

    @property
    def kinds(self) -> dict[str, int]:
        """How many samples are bad in which way, the most frequent first."""
        return dict(Counter(q.kind for q in self.bad).most_common())

    @property
    def passed(self) -> bool:
        """Whether no more samples are bad than allowed."""
        return len(self.bad) <= self.allowed_rate * self.samples


@dataclass(frozen=True)
class _Seen:
    """A medium and the grids of its items."""

    kind: Kind
    media: Media
    grids: tuple[Grid, ...]


def check_sources_for_recipe(
    recipe: Recipe,
    sources: Sequence[SourceSettings],
    progress: ProgressCallback | None = None,
    notify: NotifyCallback = lambda _: None,
) -> CheckReport:
    """Check sources as a recipe would use them: its limits, its preprocessing and its tokenizer apply.

    progress: told how decoding goes on; notify: how reading does, before that.
    Raises `DataError` if a source cannot be read at all.
    """
    looked = list(notify_progress(measure_samples(recipe, sources), notify))
    usable = [one for one in looked if isinstance(one, MeasuredSample)]
    bad = [one for one in looked if isinstance(one, Quarantined)]
    found: list[tuple[Sample, list[_Seen]]] = []
    for one in usable:
        sights = zip(one.sample.visual_media, one.grids["vision"], strict=True)
        clips = zip(one.sample.clips, one.grids["audio"], strict=True)
        media = [_Seen(kind, medium, grids) for (kind, medium), grids in sights]
        found.append((one.sample, media + [_Seen("audio", medium, grids) for medium, grids in clips]))
    vision, audio = recipe.model.vision, recipe.model.audio
    decoder = _Decoder(recipe.data.image, vision.patch if vision else _PATCH, audio.mel_bins if audio else None)
    return _report(found, bad, decoder, recipe.data.max_bad_rate, progress)


def check_sources(
    sources: Sequence[SourceSettings], progress: ProgressCallback | None = None, notify: NotifyCallback = lambda _: None
) -> CheckReport:
    """Check sources for no model in particular: default limits, any length.

    progress: told how decoding goes on; notify: how reading does, before that.
    Raises `DataError` if a source cannot be read at all.
    """
    found: list[tuple[Sample, list[_Seen]]] = []
    bad: list[Quarantined] = []
    entries = (entry for source in sources for entry in read_samples(source, LimitSettings()))
    for entry in notify_progress(entries, notify):
        looked = entry if isinstance(entry, Quarantined) else _look(entry)
        if isinstance(looked, Quarantined):
            bad.append(looked)
        else:
            assert isinstance(entry, Sample)
            found.append((entry, looked))
    return _report(found, bad, _Decoder(ImageSettings(), _PATCH, None), _DEFAULT_BAD_RATE, progress)


_DEFAULT_BAD_RATE = 0.01
_ANY_ENCODER = VisionSettings(layers=1, hidden=1, heads=1, ffn=1, patch=_PATCH)
_ANY_LENGTH = AudioDataSettings(max_seconds=86_400)


def _look(sample: Sample) -> list[_Seen] | Quarantined:
    """Read the headers of a sample's media."""
    miscounted = find_unusable(sample, has_vision=True, has_audio=bool(sample.clips))
    if miscounted is not None:
        return miscounted
    try:
        seen = [
            _Seen(kind, media, read_item_grids(kind, media, ImageSettings(), VideoSettings(), _ANY_ENCODER))
            for kind, media in sample.visual_media
        ]
        return seen + [_Seen("audio", clip, ((read_num_frames(clip, _ANY_LENGTH, 2), 1),)) for clip in sample.clips]
    except BadMediaError as bad:
        return Quarantined.of(sample, bad.kind, str(bad))


@dataclass(frozen=True)
class _Decoder:
    """Decodes a medium as training would, and forgets it."""

    image: ImageSettings
    patch: int
    bins: int | None  # None: clips of any length are decoded, and not looked at further

    def __call__(self, seen: _Seen) -> BadMediaError | None:
        try:
            if seen.kind != "audio":
                VisionItemDecoder(self.image, self.patch).patches(
                    seen.kind, seen.media, 0, len(seen.grids), seen.grids[0]
                )
            elif self.bins is None:
                decoded_duration_s(seen.media)
            else:
                load_log_mels(seen.media, seen.grids[0][0], self.bins)
        except BadMediaError as bad:
            return bad
        return None


def _report(
    found: Sequence[tuple[Sample, list[_Seen]]],
    bad: Sequence[Quarantined],
    decode: Callable[[_Seen], BadMediaError | None],
    allowed_rate: float,
    progress: ProgressCallback | None,
) -> CheckReport:
    distinct = list(dict.fromkeys(seen for _, media in found for seen in media))
    faults: dict[_Seen, BadMediaError] = {}
    for done, (seen, fault) in enumerate(_decoded(distinct, decode), 1):
        if fault is not None:
            faults[seen] = fault
        if progress is not None:
            progress(done, len(distinct))
    broken = []
    for sample, media in found:
        fault = next((faults[seen] for seen in media if seen in faults), None)
        if fault is not None:
            broken.append(Quarantined.of(sample, fault.kind, str(fault)))
    whole = [seen for seen in distinct if seen not in faults]
    seconds = sum(seen.grids[0][0] for seen in whole if seen.kind == "audio") * HOP_SAMPLES / SAMPLE_RATE_HZ
    counts: dict[str, int] = dict(Counter[str](seen.kind for seen in whole))
    return CheckReport(len(found) + len(bad), counts, seconds, (*bad, *broken), allowed_rate)


def _decoded(
    distinct: Sequence[_Seen], decode: Callable[[_Seen], BadMediaError | None]
) -> Iterator[tuple[_Seen, BadMediaError | None]]:
    """Decode on all cores, in order; decoders release the interpreter's lock."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        for first in range(0, len(distinct), cores * _PER_CORE):
            some = distinct[first : first + cores * _PER_CORE]
            yield from zip(some, pool.map(decode, some), strict=True)
