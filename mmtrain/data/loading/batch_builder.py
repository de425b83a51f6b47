"""Build what a rank needs for a step from lengths: the same in a thread, in a process and on another machine."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt

import numpy as np

from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.batch_meta import BatchMeta, IntArray
from mmtrain.balance.step_targets import StepTargets
from mmtrain.data.formats.sample import Quarantined
from mmtrain.data.index.data_index import DataIndex, check_bad_rate
from mmtrain.data.loading.payload import (
    EncoderPayload,
    PayloadNeed,
    TextPayload,
    build_encoder_payload,
    build_text_payload,
)
from mmtrain.data.loading.storage_outage import OutageReport, PatientReader, StorageProbe
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.data.media.images import CellArray
from mmtrain.data.media.item_readers import ITEM_READERS
from mmtrain.data.media.media_bytes import BadMediaError
from mmtrain.data.media.target_images import TargetImageReader
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.data.text.cut_samples import encode_kept
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.data.text.sample_tokenizer import EncodedSample, SampleTokenizer
from mmtrain.errors import RunError
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES, VISION
from mmtrain.recipe.settings.schema import Recipe


@dataclass(frozen=True)
class StepData:
    """Everything a rank needs for one step. Keys of payloads are (replica, microbatch index)."""

    meta: BatchMeta
    encoders: dict[str, dict[tuple[int, int], EncoderPayload]]  # by unit; the generator's images are among them
    text: dict[tuple[int, int], TextPayload]
    quarantined: tuple[Quarantined, ...]  # samples of this step with media that could not be decoded


def stream_position(step: int, skipped: Sequence[int]) -> int:
    """Return the position of the stream that `step` (from 0) trains on if those in `skipped`, ascending, are left out.

    >>> [stream_position(step, (1, 2, 4)) for step in range(3)]
    [0, 3, 5]
    """
    position = step
    for skipped_position in skipped:
        if skipped_position <= position:
            position += 1
    return position


@dataclass(frozen=True)
class StepRequest:
    """Which step to build and for which rank: all that building depends on besides the recipe and the data."""

    step: int
    dp: dict[str, int]  # data-parallel degree of every unit, "llm" included
    num_microbatches: dict[str, int]  # of each replica of every unit
    needs: tuple[PayloadNeed, ...]
    step_targets: StepTargets = NO_TARGETS  # for which the samples of the step are balanced and ordered
    skipped: tuple[int, ...] = ()  # positions of the stream that no step trains on, ascending

    @property
    def position(self) -> int:
        """The position in the stream whose samples this step trains on."""
        return stream_position(self.step, self.skipped)


RequestOf = Callable[[int], StepRequest]  # step -> what to build


@dataclass(frozen=True)
class ReadMonitor:
    """Reports which sample is being read, and names the samples whose media must not be read.

    Decoders of data from untrusted places may crash or never return; the watching process must know over which sample.
    """

    on_read: Callable[[int | None], None] = lambda _: None  # called with the sample whose media are read next, or None
    deadly: frozenset[int] = frozenset()  # samples whose media must not be read again
    on_outage: Callable[[str], None] | None = None  # called with what is waited for, and then with ""; None: print it


NO_MONITOR = ReadMonitor()


class BatchBuilder:
    """Turns a `BatchMeta` into the `StepData` of one rank."""

    def __init__(
        self,
        index: DataIndex,
        recipe: Recipe,
        needs: tuple[PayloadNeed, ...],
        num_microbatches: Mapping[str, int],
        tokenizer: SampleTokenizer | None = None,
        monitor: ReadMonitor = NO_MONITOR,
        probe: StorageProbe | None = None,
    ) -> None:
        """Build the payload of `index`'s samples that `needs` name. Tokenizer and probe are made by default."""
        self._index = index
        self._recipe = recipe
        self._needs = needs
        self._num_microbatches = num_microbatches
        self._monitor = monitor
        self._tokenizer = tokenizer or load_recipe_tokenizer(recipe)
        self._bad: dict[int, Quarantined] = {}  # sample id -> why, in the step that is being built
        self._encoders = recipe.model.all_encoders
        self._readers = {
            unit: ITEM_READERS[settings.modality](settings, recipe.data) for unit, settings in self._encoders.items()
        }
        self._generator = recipe.model.generator
        self._target_reader = None if self._generator is None else TargetImageReader(self._generator, recipe.data)
        find_outage = (probe or StorageProbe(index.samples)).find_outage
        patience_s = recipe.data.storage_patience_s
        on_outage = monitor.on_outage or OutageReport(partial(print, file=sys.stderr), patience_s).tell
        self._patient = PatientReader(find_outage, patience_s, monitor.on_read, on_outage)

    def build(self, meta: BatchMeta) -> StepData:
        """Load what the needs name. A broken image or clip becomes zeros, and its sample is quarantined.

        The result depends on `meta` alone, not on what was built before.
        """
        self._bad = {}
        encoders: dict[str, dict[tuple[int, int], EncoderPayload]] = {}
        text: dict[tuple[int, int], TextPayload] = {}
        for need in self._needs:
            for i in range(self._num_microbatches[need.unit]):
                if need.unit == "llm":
                    text[need.replica, i] = self._text(meta, need, i)
                else:
                    encoders.setdefault(need.unit, {})[need.replica, i] = self._encoder(meta, need, i)
        return StepData(meta, encoders, text, tuple(self._bad.values()))

    def _encoder(self, meta: BatchMeta, need: PayloadNeed, i: int) -> EncoderPayload:
        load = partial(self._load_cells, need.unit) if need.media else None
        if need.unit == GENERATOR:
            assert self._generator is not None
            cell_features = self._generator.cell_features
        else:
            cell_features = self._encoders[need.unit].cell_features
        return build_encoder_payload(meta, need.unit, need.replica, i, cell_features, load)

    def _text(self, meta: BatchMeta, need: PayloadNeed, i: int) -> TextPayload:
        item_ids = {unit: self._tokenizer.item_ids[settings.modality] for unit, settings in self._encoders.items()}
        join_features = {unit: partial(self._index.joined_features, unit) for unit in self._index.joins}
        if self._tokenizer.query_id is not None and self._generator is not None:
            item_ids[GENERATOR] = (self._tokenizer.query_id,)
        return build_text_payload(meta, need, i, item_ids, self._encode, self._find_positions, join_features)

    def _encode(self, sample_id: int) -> EncodedSample:
        sample = self._index.samples[sample_id]
        self._monitor.on_read(None)
        try:
            features = self._index.media_features(sample_id, self._tokenizer.writes_rows_apart)
            return encode_kept(self._tokenizer, sample, features)
        except Exception as error:
            raise RunError(f"{sample} cannot be encoded: {type(error).__name__}: {error}") from error

    def _find_positions(self, sample_id: int, ids: IntArray) -> IntArray:
        """Return (3, T) the rotary positions of a sample's tokens, whose images one encoder reads."""
        unit, settings = next(entry for entry in self._encoders.items() if entry[1].modality == VISION.name)
        merge = isqrt(settings.tokens_per_feature)
        media = self._index.media_grids(sample_id, unit, merge, self._tokenizer.writes_items_apart)
        behind_times = self._recipe.model.llm.rope_after_media == "all"
        return find_media_positions(ids, self._tokenizer.item_ids[VISION.name], media, behind_times)

    def _load_cells(self, unit: str, sample_id: int, position: int, rows: int, cols: int) -> CellArray | None:
        """Return the cells of an item of a sample; None if it cannot be decoded."""
        sample = self._index.samples[sample_id]
        try:
            self._report_read(sample_id)
            if unit == GENERATOR:
                assert self._target_reader is not None
                medium = sample.target_images[position]
                load = partial(self._target_reader.load_cells, medium, (rows, cols))
            else:
                settings = self._encoders[unit]
                number, part, num_parts = self._index.locate_item(sample_id, unit, position)
                kind, medium = sample.media_of(MODALITIES[settings.modality].media)[number]
                load = partial(self._readers[unit].load_cells, kind, medium, part, num_parts, (rows, cols))
            return self._patient.read(sample_id, medium, load)
        except BadMediaError as bad:  # its header was fine: too late to leave the sample out, all ranks count on it
            self._bad.setdefault(sample_id, Quarantined.of(sample, bad.kind, str(bad)))
            return None

    def _report_read(self, sample_id: int) -> None:
        """Report which sample is read next. Raises `BadMediaError` if it must not be read."""
        if sample_id in self._monitor.deadly:
            raise BadMediaError("deadly", "reading its media crashed worker processes or blocked them")
        self._monitor.on_read(sample_id)


class StepBuilder:
    """Builds any step for any rank, as a function of index, stream and recipe alone."""

    def __init__(self, index: DataIndex, stream: GroupStream, recipe: Recipe) -> None:
        """Build the steps of `stream`, whose samples are in `index`."""
        self._index = index
        self._stream = stream
        self._recipe = recipe
        self._tokenizer = load_recipe_tokenizer(recipe)
        self._probe = StorageProbe(index.samples)

    @property
    def patience_s(self) -> float:
        """How long to wait for storage that is away."""
        return self._recipe.data.storage_patience_s

    def find_outage(self, sample_id: int) -> str:
        """Return why the storage of a sample's media is away; empty if it is there."""
        outage = self._probe.find_outage(sample_id)
        return outage and f"media of {self.name(sample_id)} cannot be read, and {outage}"

    def meta(self, request: StepRequest) -> BatchMeta:
        """Return the samples of the step, and which replica computes each of them in which microbatch."""
        global_batch = request.dp["llm"] * request.num_microbatches["llm"]
        meta = self._stream.batch(
            request.position, global_batch, request.dp, request.num_microbatches, request.step_targets
        )
        return replace(meta, step=request.step)

    def name(self, sample_id: int) -> str:
        """Return what messages call a sample."""
        return str(self._index.samples[sample_id])

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        """Build everything that the request needs."""
        batch_builder = BatchBuilder(
            self._index,
            self._recipe,
            request.needs,
            request.num_microbatches,
            self._tokenizer,
            monitor,
            self._probe,
        )
        return batch_builder.build(self.meta(request))


class BadSampleTracker:
    """Remembers the samples found bad while running: each is reported once, and their share is limited."""

    def __init__(self, index: DataIndex, max_bad_rate: float, known: Iterable[Quarantined] = ()) -> None:
        """Count them together with those that `index` quarantined; `known` ones were reported before."""
        self._index = index
        self._max_bad_rate = max_bad_rate
        in_index = {(q.source, q.index) for q in index.quarantined}
        self._reported = {(q.source, q.index): q for q in known if (q.source, q.index) not in in_index}

    def record_new(self, quarantined: Iterable[Quarantined]) -> tuple[Quarantined, ...]:
        """Record samples and return those that were not reported before.

        Raises `TooManyBadSamples` when all bad samples together exceed the allowed rate.
        """
        new = {(q.source, q.index): q for q in quarantined if (q.source, q.index) not in self._reported}
        if new:
            self._reported |= new
            total = len(self._index.samples) + len(self._index.quarantined)
            bad = (*self._index.quarantined, *self._reported.values())
            check_bad_rate(bad[::-1], total, self._max_bad_rate)  # the newest first, so that the message names them
        return tuple(new.values())


def find_media_positions(
    ids: IntArray, feature_tokens: Sequence[int], media: Sequence[MediumGrid], behind_times: bool = False
) -> IntArray:
    """Return (3, T) the positions of a sample's tokens, as `get_rope_index` of `transformers` 5 counts them.

    Text, and so features of clips, counts on in all three. Features of a medium are at the position of the next text
    plus their time, row and column. The text after it continues behind the longer side of the medium. With
    `behind_times`, it continues behind the largest position. Of `media` only the first are used if `ids`, those of a
    prompt, hold no features of the others.
    """
    positions = np.empty((3, len(ids)), dtype=np.int64)
    features = np.flatnonzero(np.isin(ids, feature_tokens))
    num_features = 0  # of the media so far
    end = 0  # tokens that have positions
    position = 0  # of the next text
    for medium in media:
        if num_features == len(features):
            break
        start = int(features[num_features])
        positions[:, end:start] = np.arange(position, position + start - end)
        position += start - end
        places = np.meshgrid(np.asarray(medium.times), np.arange(medium.rows), np.arange(medium.cols), indexing="ij")
        of_medium = np.stack(places).reshape(3, -1)
        end = start + of_medium.shape[1]
        num_features += of_medium.shape[1]
        assert features[num_features - 1] == end - 1, "the features of a medium are not in one piece"
        positions[:, start:end] = position + of_medium
        position += max(medium.rows, medium.cols, max(medium.times) + 1 if behind_times else 0)
    positions[:, end:] = np.arange(position, position + len(ids) - end)
    return positions
