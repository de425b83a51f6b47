"""The index of a dataset: every usable sample with its lengths, and every other one with the reason why not.

Reads the data files and headers of media, never pixels or sound. What was read is kept beside large files, so that the
next run, and the other ranks of this one, read it from there; fingerprints tell that ranks agree.
"""

import gc
import hashlib
import io
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import IntArray, ItemLengths, SampleLengths
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.index.index_cache import IndexCache, StoredIndex
from mmtrain.data.index.sample_lengths import MeasuredSample, encoder_settings, measure_samples, notify_progress
from mmtrain.data.index.sample_table import SampleTable, content_json, sample_record
from mmtrain.data.index.stated_lengths import read_stated_lengths
from mmtrain.data.media.image_grids import Grid
from mmtrain.errors import DataError, TooManyBadSamples
from mmtrain.recipe.model_settings import AudioSettings
from mmtrain.recipe.schema import Recipe, SourceSettings

MAX_SAMPLES_IN_MESSAGE = 5


@dataclass(frozen=True)
class DataIndex:
    """The usable samples of a dataset, their lengths, and what was set aside."""

    samples: Sequence[Sample]
    lengths: SampleLengths
    weights: npt.NDArray[np.float64]  # (S,) how often an epoch uses each sample
    quarantined: tuple[Quarantined, ...]
    # encoder unit -> (I,) which part of its medium (image, video, clip) an item is, from 0
    parts: dict[str, IntArray] = field(default_factory=dict)
    content_sha256: str = ""  # of what is said in the samples, wherever their files lie
    cache_folder: Path | None = None  # where it was read from, if not from the data

    def features(self, sample: int, unit: str = "vision") -> list[int]:
        """LLM tokens of each medium of a sample, all its items together; none where the model has no such encoder."""
        items = self.lengths.items.get(unit)
        if items is None or items.first[sample] == items.first[sample + 1]:
            return []
        here = slice(items.first[sample], items.first[sample + 1])
        starts = np.flatnonzero(self.parts[unit][here] == 0)
        features: list[int] = np.add.reduceat(items.features[here], starts).tolist()
        return features

    def locate_item(self, sample: int, position: int) -> tuple[int, int, int]:
        """Which medium of its sample a vision item is of, which part of that, and how many parts it has."""
        first = self.lengths.items["vision"].first
        parts = self.parts["vision"][first[sample] : first[sample + 1]]
        starts = np.flatnonzero(parts == 0)
        medium = int(np.searchsorted(starts, position, side="right")) - 1
        end = starts[medium + 1] if medium + 1 < len(starts) else len(parts)
        return medium, int(parts[position]), int(end - starts[medium])

    def remarks(self) -> tuple[str, ...]:
        """What whoever uses it may want to know: that nothing was read anew, and what was set aside."""
        kept = f"{len(self.lengths):,} samples are known from the index kept in {self.cache_folder}"
        return (*([kept] if self.cache_folder else []), *([_set_aside(self)] if self.quarantined else []))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over samples, weights and lengths: equal on two ranks iff they see the same data."""
        digest = hashlib.sha256(self.content_sha256.encode())
        arrays = [self.weights, self.lengths.tokens, self.lengths.targets]
        for unit, items in sorted(self.lengths.items.items()):
            digest.update(unit.encode())
            arrays += [items.first, items.rows, items.cols, items.tokens, items.features, self.parts[unit]]
        for values in arrays:
            digest.update(values.tobytes())
        return digest.hexdigest()


def _set_aside(index: DataIndex) -> str:
    total = len(index.lengths) + len(index.quarantined)
    kinds = _by_kind(index.quarantined)
    return f"{len(index.quarantined):,} of {total:,} samples are set aside ({kinds}); the first: {index.quarantined[0]}"


def _by_kind(quarantined: Sequence[Quarantined]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(q.kind for q in quarantined).most_common())


def build_index(
    recipe: Recipe, which: Literal["train", "validation"] = "train", notify: NotifyCallback = lambda _: None
) -> DataIndex:
    """Index the recipe's samples, or read the index kept since nothing changed.

    Samples that cannot be used are set aside with kind and reason. notify: told how reading a large source goes on, and
    of a kept index that turned out broken. Raises `DataError` if a source cannot be read, no sample is usable, or the
    settings fit no image; `TooManyBadSamples` above `data.max_bad_rate`.
    """
    sources = recipe.data.sources if which == "train" else recipe.data.validation
    if sources and sources[0].states_lengths:
        return _stated(recipe, sources)
    cache = IndexCache.of(recipe, sources)
    with nullcontext() if cache is None else cache.held():  # others on this machine wait here for whoever builds
        stored = cache.load(notify) if cache is not None else None
        kept_in = cache.folder if cache is not None and stored is not None else None
        if stored is None and cache is not None:
            try:
                stored = _read(recipe, sources, cache, notify)
            except OSError as error:  # of the cache: a full disk, say; what is wrong with sources is a DataError
                notify(f"the index cannot be kept in {cache.folder} (data.index_cache chooses another place): {error}")
        if stored is None:
            stored = _read(recipe, sources, None, notify)
    check_bad_rate(stored.quarantined, len(stored.samples) + len(stored.quarantined), recipe.data.max_bad_rate)
    if not len(stored.samples):
        where = "data.sources" if which == "train" else "data.validation"
        raise DataError(f"{where}: no usable samples in {', '.join(str(s.path) for s in sources) or 'an empty list'}")
    return replace(_index(stored, recipe, sources), cache_folder=kept_in)


def _stated(recipe: Recipe, sources: Sequence[SourceSettings]) -> DataIndex:
    """An index of lengths without samples."""
    stated = read_stated_lengths(recipe, sources)
    num_usable, aside = len(stated.lengths), stated.quarantined
    check_bad_rate(aside, num_usable + len(aside), recipe.data.max_bad_rate)
    if not num_usable:
        raise DataError(f"data.sources: no usable rows in {', '.join(str(s.path) for s in sources)}")
    parts = {unit: np.zeros(len(items.tokens), dtype=np.int64) for unit, items in stated.lengths.items.items()}
    weights = np.array([source.weight for source in sources], dtype=np.float64)[stated.source]
    return DataIndex((), stated.lengths, weights, aside, parts, stated.sha256)


def check_bad_rate(quarantined: Sequence[Quarantined], total: int, allowed: float) -> None:
    """Raise `TooManyBadSamples`, with counts by kind and the first few named, above the rate `allowed`."""
    if len(quarantined) <= allowed * total:
        return
    first = "".join(f"\n  {q}" for q in quarantined[:MAX_SAMPLES_IN_MESSAGE])
    raise TooManyBadSamples(
        f"{len(quarantined)} of {total} samples are unusable ({_by_kind(quarantined)}); "
        f"data.max_bad_rate = {allowed:g} allows {int(allowed * total)}. Repair them or raise the rate. "
        f"The first ones:{first}"
    )


def _read(
    recipe: Recipe, sources: Sequence[SourceSettings], cache: IndexCache | None, notify: NotifyCallback
) -> StoredIndex:
    """Read all sources, and keep what was found where there is a cache."""
    with _no_cycles(), io.BytesIO() if cache is None else cache.records() as records:
        columns = _Columns(records, list(encoder_settings(recipe)))
        quarantined: list[Quarantined] = []
        for entry in notify_progress(measure_samples(recipe, sources), notify):
            if isinstance(entry, MeasuredSample):
                columns.add(entry)
            else:
                quarantined.append(entry)
        arrays, content = columns.arrays(), columns.content.hexdigest()
        if cache is None:
            table = SampleTable(records.getvalue(), arrays["ends"])  # type: ignore[attr-defined]
            return StoredIndex(table, arrays, tuple(quarantined), content)
        return cache.store(records, arrays, quarantined, content)


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Let the collector of cycles rest: there are none here, and looking for them takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Columns:
    """Collects measured samples: one number a value instead of objects, and the samples as records."""

    def __init__(self, records: BinaryIO, units: Sequence[str]) -> None:
        self._records, self._units = records, units
        self._ends = 0
        self._sample = {name: array("q") for name in ("tokens", "targets", "source", "ends")}
        self._items = {f"{unit}.{name}": array("q") for unit in units for name in ("count", "rows", "cols", "part")}
        self.content = hashlib.sha256()

    def add(self, one: MeasuredSample) -> None:
        said = content_json(one.sample)
        record = sample_record(one.sample, said)
        self._records.write(record)
        self._ends += len(record)
        self.content.update(said.encode("ascii"))
        self._sample["tokens"].append(one.tokens)
        self._sample["targets"].append(one.targets)
        self._sample["source"].append(one.source)
        self._sample["ends"].append(self._ends)
        for unit in self._units:
            self._add_items(unit, one.grids[unit])

    def _add_items(self, unit: str, media: Sequence[tuple[Grid, ...]]) -> None:
        items = self._items
        items[f"{unit}.count"].append(sum(map(len, media)))
        for grids in media:
            for part, (rows, cols) in enumerate(grids):
                items[f"{unit}.rows"].append(rows)
                items[f"{unit}.cols"].append(cols)
                items[f"{unit}.part"].append(part)

    def arrays(self) -> dict[str, IntArray]:
        return {name: np.array(column, dtype=np.int64) for name, column in (self._sample | self._items).items()}


def _index(stored: StoredIndex, recipe: Recipe, sources: Sequence[SourceSettings]) -> DataIndex:
    arrays = stored.arrays
    items: dict[str, ItemLengths] = {}
    for unit, encoder in encoder_settings(recipe).items():
        first = np.concatenate([[0], np.cumsum(arrays[f"{unit}.count"])]).astype(np.int64)
        rows, cols = arrays[f"{unit}.rows"], arrays[f"{unit}.cols"]
        if isinstance(encoder, AudioSettings):
            items[unit] = ItemLengths(first, rows, cols, rows // 2, rows // (2 * encoder.downsample))
        else:
            area: IntArray = rows * cols
            features = area // encoder.merge**2
            items[unit] = ItemLengths(first, rows, cols, area + int(encoder.class_token), features)
    return DataIndex(
        samples=stored.samples,
        lengths=SampleLengths(arrays["tokens"], arrays["targets"], items),
        weights=np.array([source.weight for source in sources], dtype=np.float64)[arrays["source"]],
        quarantined=stored.quarantined,
        parts={unit: arrays[f"{unit}.part"] for unit in items},
        content_sha256=stored.content_sha256,
    )
