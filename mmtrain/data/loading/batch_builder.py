"""What a rank needs for a step, made from lengths: alike in a thread, in a process and on another machine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.batch_meta import BatchMeta
from mmtrain.balance.step_targets import StepTargets
from mmtrain.data.formats.sample import Quarantined
from mmtrain.data.index.data_index import DataIndex, check_bad_rate
from mmtrain.data.loading.payload import (
    AudioPayload,
    TextPayload,
    VisionPayload,
    build_audio_payload,
    build_text_payload,
    build_vision_payload,
)
from mmtrain.data.media.audio import load_log_mels
from mmtrain.data.media.images import Float32Array
from mmtrain.data.media.media_bytes import BadMediaError
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.data.text.chat_tokenizer import ChatTokenizer, EncodedSample
from mmtrain.errors import RunError
from mmtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class PayloadNeed:
    """A replica whose microbatches this rank takes part in, and which payload it wants beside the lengths."""

    unit: str
    replica: int
    media: bool = False  # encoder: its first stage
    ids: bool = False  # LLM: the stage with the embedding
    labels: bool = False  # LLM: the stage with the head


@dataclass(frozen=True)
class StepData:
    """Everything a rank needs for one step. Keys of payloads are (replica, microbatch index)."""

    meta: BatchMeta
    vision: dict[tuple[int, int], VisionPayload]
    text: dict[tuple[int, int], TextPayload]
    quarantined: tuple[Quarantined, ...]  # samples found undecodable in this step
    audio: dict[tuple[int, int], AudioPayload] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRequest:
    """Which step to make and for whom: what a builder must be told beside the recipe and the data."""

    step: int
    dp: dict[str, int]  # data-parallel size of every unit, "llm" included
    num_microbatches: dict[str, int]  # of each replica of every unit
    needs: tuple[PayloadNeed, ...]
    step_targets: StepTargets = NO_TARGETS  # what to arrange the step's samples for


NO_SAMPLE = -1


@dataclass(frozen=True)
class ReadMonitor:
    """Looking on while a step is made, and knowing better."""

    on_read: Callable[[int], None] = lambda _: None  # told the id of the sample whose media are read next, or NO_SAMPLE
    deadly: frozenset[int] = frozenset()  # samples whose media are not to be read again


NO_MONITOR = ReadMonitor()


class BatchBuilder:
    """Turns a `BatchMeta` into the `StepData` of one rank."""

    def __init__(
        self,
        index: DataIndex,
        recipe: Recipe,
        needs: tuple[PayloadNeed, ...],
        num_microbatches: Mapping[str, int],
        tokenizer: ChatTokenizer | None = None,
        monitor: ReadMonitor = NO_MONITOR,
    ) -> None:
        """Prepare payload of `index`'s samples; `needs` name what this rank computes. The tokenizer is the recipe's."""
        self._index, self._recipe, self._needs = index, recipe, needs
        self._num_microbatches, self._monitor = num_microbatches, monitor
        self._tokenizer = tokenizer or ChatTokenizer.load(recipe.data.tokenizer_file)
        self._bad: dict[int, Quarantined] = {}  # by sample id, of the step being prepared
        vision = recipe.model.vision
        self._pictures = VisionItemDecoder(recipe.data.image, vision.patch) if vision is not None else None

    def build(self, meta: BatchMeta) -> StepData:
        """Load what the needs name. A broken image or clip becomes zeros, and its sample is named.

        The same `meta` gives the same data, whoever asks and whatever was prepared before.
        """
        self._bad = {}
        vision: dict[tuple[int, int], VisionPayload] = {}
        audio: dict[tuple[int, int], AudioPayload] = {}
        text: dict[tuple[int, int], TextPayload] = {}
        for need in self._needs:
            for i in range(self._num_microbatches[need.unit]):
                if need.unit == "llm":
                    text[need.replica, i] = self._text(meta, need, i)
                elif need.unit == "audio":
                    audio[need.replica, i] = self._audio(meta, need, i)
                else:
                    vision[need.replica, i] = self._vision(meta, need, i)
        return StepData(meta, vision, text, tuple(self._bad.values()), audio)

    def _vision(self, meta: BatchMeta, need: PayloadNeed, i: int) -> VisionPayload:
        settings = self._recipe.model.vision
        assert settings is not None, "an encoder microbatch in a model without encoder"
        load = self._patches if need.media else None
        return build_vision_payload(meta, need.unit, need.replica, i, 3 * settings.patch**2, load)

    def _audio(self, meta: BatchMeta, need: PayloadNeed, i: int) -> AudioPayload:
        settings = self._recipe.model.audio
        assert settings is not None, "a microbatch of clips in a model without audio unit"
        load = self._mels if need.media else None
        return build_audio_payload(meta, need.unit, need.replica, i, settings.mel_bins, load)

    def _text(self, meta: BatchMeta, need: PayloadNeed, i: int) -> TextPayload:
        return build_text_payload(meta, need.replica, i, self._tokenizer.item_ids, self._encode, need.ids, need.labels)

    def _encode(self, sample_id: int) -> EncodedSample:
        sample = self._index.samples[sample_id]
        self._monitor.on_read(NO_SAMPLE)
        try:
            features, clip_features = (self._index.features(sample_id, unit) for unit in ("vision", "audio"))
            return self._tokenizer.encode(sample, features, clip_features)
        except Exception as error:
            raise RunError(f"{sample} cannot be encoded: {type(error).__name__}: {error}") from error

    def _patches(self, sample_id: int, position: int, rows: int, cols: int) -> Float32Array:
        assert self._pictures is not None, "an image in a model without encoder"
        sample = self._index.samples[sample_id]
        try:
            self._begin(sample_id)
            medium, part, parts = self._index.locate_item(sample_id, position)
            return self._pictures.patches(*sample.visual_media[medium], part, parts, (rows, cols))
        except BadMediaError as bad:  # its header was fine: too late to leave the sample out, all ranks count on it
            self._bad.setdefault(sample_id, Quarantined.of(sample, bad.kind, str(bad)))
            return self._pictures.blank((rows, cols))

    def _begin(self, sample_id: int) -> None:
        """Say what is read next, since decoders of what comes from elsewhere may crash or never end."""
        if sample_id in self._monitor.deadly:
            raise BadMediaError("deadly", "reading its media ended worker processes or kept them for ever")
        self._monitor.on_read(sample_id)

    def _mels(self, sample_id: int, position: int, frames: int) -> Float32Array:
        settings = self._recipe.model.audio
        assert settings is not None, "a clip in a model without audio unit"
        sample = self._index.samples[sample_id]
        try:
            self._begin(sample_id)
            return load_log_mels(sample.clips[position], frames, settings.mel_bins)
        except BadMediaError as bad:  # as with images: all ranks count on it
            self._bad.setdefault(sample_id, Quarantined.of(sample, bad.kind, str(bad)))
            return np.zeros((frames, settings.mel_bins), dtype=np.float32)


class StepBuilder:
    """Makes any step for any rank: a function of index, stream and recipe alone."""

    def __init__(self, index: DataIndex, stream: GroupStream, recipe: Recipe) -> None:
        """Make steps of `stream`, whose samples `index` names."""
        self._index, self._stream, self._recipe = index, stream, recipe
        self._tokenizer = ChatTokenizer.load(recipe.data.tokenizer_file)

    def meta(self, request: StepRequest) -> BatchMeta:
        """The step's samples, and where each goes."""
        global_batch = request.dp["llm"] * request.num_microbatches["llm"]
        return self._stream.batch(
            request.step, global_batch, request.dp, request.num_microbatches, request.step_targets
        )

    def name(self, sample_id: int) -> str:
        """What to call a sample in messages."""
        return str(self._index.samples[sample_id])

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        """Everything that the request needs."""
        batch_builder = BatchBuilder(
            self._index, self._recipe, request.needs, request.num_microbatches, self._tokenizer, monitor
        )
        return batch_builder.build(self.meta(request))


class BadSampleTracker:
    """Remembers the samples that turned out bad while running: each is named once, and there may not be too many."""

    def __init__(self, index: DataIndex, max_bad_rate: float, known: Iterable[Quarantined] = ()) -> None:
        """Count together with what `index` set aside; `known` ones were named before."""
        self._index, self._max_bad_rate = index, max_bad_rate
        aside = {(q.source, q.index) for q in index.quarantined}
        self._found = {(q.source, q.index): q for q in known if (q.source, q.index) not in aside}

    def record_new(self, found: Iterable[Quarantined]) -> tuple[Quarantined, ...]:
        """Those that are named for the first time.

        Raises `TooManyBadSamples` when all that are known pass the rate allowed.
        """
        new = {(q.source, q.index): q for q in found if (q.source, q.index) not in self._found}
        if new:
            self._found |= new
            total = len(self._index.samples) + len(self._index.quarantined)
            bad = (*self._index.quarantined, *self._found.values())
            check_bad_rate(bad[::-1], total, self._max_bad_rate)
        return tuple(new.values())
