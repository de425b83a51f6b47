"""Divide samples into those that train and those held out (`data.validation_fraction`), by a hash of each."""

import json
import os
import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Protocol

from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.media.media_bytes import FileMedia, InlineMedia, Media, TarMember
from mmtrain.recipe.settings.data_settings import DataPart, DataSettings, SourceSettings
from mmtrain.recipe.settings.source_path import is_url

_HASH_BYTES = 8


class SampleFilter(Protocol):
    """Chooses which samples of a source are used, before anything is made of them."""

    def select(self, source: SourceSettings, samples: Iterable[Sample | Quarantined]) -> Iterator[Sample | Quarantined]:
        """Yield the samples that are used; one after another, for each source in order."""


class ChosenSamples:
    """Chooses samples by their numbers, from 0 through all sources."""

    def __init__(self, numbers: Iterable[int], fraction: float | None = None) -> None:
        """Choose `numbers`; note which of these a held-out `fraction` takes away from training."""
        self._wanted = frozenset(numbers)
        self._last = max(self._wanted)
        self._fraction = fraction or 0.0
        self.num_samples = 0  # that were looked at
        self.numbers: list[int] = []  # of those chosen, in order
        self.held_out: set[int] = set()

    def select(self, source: SourceSettings, samples: Iterable[Sample | Quarantined]) -> Iterator[Sample | Quarantined]:
        """See `SampleFilter`. Nothing behind the last one is read."""
        for sample in samples if self.num_samples <= self._last else ():
            number = self.num_samples
            self.num_samples += 1
            if number in self._wanted:
                self.numbers.append(number)
                if isinstance(sample, Sample) and sample_position(sample, source) < self._fraction:
                    self.held_out.add(number)
                yield sample
            if number >= self._last:
                return


class SampleSplit:
    """Chooses the samples of one part. The choice depends on nothing but the sample itself.

    So it is the same on resume, on other machines and when samples are added, and samples that say the same about media
    of the same names are in the same part, also where a source is named twice. A larger fraction holds out more of
    them, and none that was held out before trains.
    """

    def __init__(self, fraction: float, part: DataPart) -> None:
        """Hold out `fraction` of the samples, and choose those that train or those held out."""
        self.fraction, self.part = fraction, part
        self.num_samples = 0  # that were looked at
        self.num_held_out = 0

    @classmethod
    def of(cls, data: DataSettings, part: DataPart) -> "SampleSplit | None":
        """Return the split of a recipe's `data.sources`; None where nothing is held out of them."""
        return None if data.validation_fraction is None else cls(data.validation_fraction, part)

    def select(self, source: SourceSettings, samples: Iterable[Sample | Quarantined]) -> Iterator[Sample | Quarantined]:
        """Yield the samples of the part; those that cannot be read are counted as samples that train."""
        for sample in samples:
            is_held_out = isinstance(sample, Sample) and sample_position(sample, source) < self.fraction
            self.num_samples += 1
            self.num_held_out += is_held_out
            if is_held_out == (self.part == "validation"):
                yield sample

    @property
    def remark(self) -> str:
        """What the user should know of it."""
        return (
            f"data.validation_fraction = {self.fraction:g} holds out {self.num_held_out:,} of {self.num_samples:,} "
            "samples, on which nothing is trained"
        )


def sample_position(sample: Sample, source: SourceSettings) -> float:
    """Return a number in [0, 1) by a hash of what a sample says, and of the names of its media below their folder.

    Neither its id, its position nor its folder count: other machines keep data elsewhere.
    """
    root = _media_root(sample, source)
    said = [[turn.role, turn.text, turn.fields] for turn in sample.turns]
    media = [_media_name(medium, root) for of_kind in sample.media.values() for medium in of_kind]
    drawn = [_media_name(medium, root) for medium in sample.target_images]
    text = json.dumps([said, sample.tools, media, drawn])
    digest = blake2b(text.encode(), digest_size=_HASH_BYTES, person=b"held out").digest()
    position: float = int.from_bytes(digest, "big") / 2 ** (8 * _HASH_BYTES)
    return position


def _media_root(sample: Sample, source: SourceSettings) -> str:
    """Return the folder of a sample's media, as the start of their paths."""
    root = str(source.image_root) if source.image_root is not None else os.path.dirname(sample.source)
    if not is_url(root):
        root = os.path.abspath(root)
    return root.rstrip("/") + "/"


def _media_name(medium: Media, root: str) -> str:
    """Name a medium by what is the same wherever the data lie; macOS stores the accents of names apart."""
    if isinstance(medium, FileMedia):
        return unicodedata.normalize("NFC", medium.path.removeprefix(root))
    if isinstance(medium, TarMember):
        return f"{os.path.basename(medium.shard)} {medium.name}"
    file = os.path.basename(medium.file)
    if isinstance(medium, InlineMedia):
        return f"{file} {medium.offset}"
    return f"{file} {medium.row_group} {medium.name}"
