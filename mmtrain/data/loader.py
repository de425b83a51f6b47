"""The loader: prepares steps ahead in a background thread, each rank exactly the payload it needs."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from mmtrain.balance.batch import BatchMeta
from mmtrain.data.audio import BadAudioError, load_mels
from mmtrain.data.images import BadImageError, FloatArray, load_patches
from mmtrain.data.index import DataIndex, check_bad_rate
from mmtrain.data.order import GroupStream
from mmtrain.data.payload import AudioPayload, TextPayload, VisionPayload, audio_payload, text_payload, vision_payload
from mmtrain.data.sample import Quarantined
from mmtrain.data.tokenize import ChatTokenizer, Encoded
from mmtrain.errors import MmtrainError, RunError
from mmtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Need:
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
    quarantined: tuple[Quarantined, ...]  # samples found undecodable in this step, for the first time
    audio: dict[tuple[int, int], AudioPayload] = field(default_factory=dict)


class Preparer:
    """Turns a `BatchMeta` into the `StepData` of one rank."""

    def __init__(self, index: DataIndex, recipe: Recipe, needs: tuple[Need, ...], num_microbatches: int) -> None:
        """Prepare payload of `index`'s samples; `needs` name what this rank computes."""
        self._index, self._recipe, self._needs = index, recipe, needs
        self._num_microbatches = num_microbatches
        self._tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
        self._bad: dict[int, Quarantined] = {}  # by sample id

    def prepare(self, meta: BatchMeta) -> StepData:
        """Load what the needs name. A broken image or clip becomes zeros and its sample is named once.

        Raises `TooManyBadSamples` when these and the samples set aside before pass `data.max_bad_rate`.
        """
        known = len(self._bad)
        vision: dict[tuple[int, int], VisionPayload] = {}
        audio: dict[tuple[int, int], AudioPayload] = {}
        text: dict[tuple[int, int], TextPayload] = {}
        for need in self._needs:
            for i in range(self._num_microbatches):
                if need.unit == "llm":
                    text[need.replica, i] = self._text(meta, need, i)
                elif need.unit == "audio":
                    audio[need.replica, i] = self._audio(meta, need, i)
                else:
                    vision[need.replica, i] = self._vision(meta, need, i)
        new = tuple(self._bad.values())[known:]
        if new:
            total = len(self._index.samples) + len(self._index.quarantined)
            bad = (*self._index.quarantined, *self._bad.values())
            check_bad_rate(bad[::-1], total, self._recipe.data.max_bad_rate)
        return StepData(meta, vision, text, new, audio)

    def _vision(self, meta: BatchMeta, need: Need, i: int) -> VisionPayload:
        settings = self._recipe.model.vision
        assert settings is not None, "an encoder microbatch in a model without encoder"
        load = self._patches if need.media else None
        return vision_payload(meta, need.unit, need.replica, i, 3 * settings.patch**2, load)

    def _audio(self, meta: BatchMeta, need: Need, i: int) -> AudioPayload:
        settings = self._recipe.model.audio
        assert settings is not None, "a microbatch of clips in a model without audio unit"
        load = self._mels if need.media else None
        return audio_payload(meta, need.unit, need.replica, i, settings.mel_bins, load)

    def _text(self, meta: BatchMeta, need: Need, i: int) -> TextPayload:
        return text_payload(meta, need.replica, i, self._tokenizer.item_ids, self._encode, need.ids, need.labels)

    def _encode(self, sample_id: int) -> Encoded:
        sample = self._index.samples[sample_id]
        try:
            features, clip_features = (self._index.features(sample_id, unit) for unit in ("vision", "audio"))
            return self._tokenizer.encode(sample, features, clip_features)
        except Exception as error:
            raise RunError(f"{sample} cannot be encoded: {type(error).__name__}: {error}") from error

    def _patches(self, sample_id: int, position: int, rows: int, cols: int) -> FloatArray:
        settings = self._recipe.model.vision
        assert settings is not None, "an image in a model without encoder"
        sample = self._index.samples[sample_id]
        try:
            return load_patches(sample.images[position], rows, cols, self._recipe.data.image, settings.patch)
        except BadImageError as bad:  # its header was fine: too late to leave the sample out, all ranks count on it
            self._bad.setdefault(sample_id, Quarantined.of(sample, bad.kind, str(bad)))
            return np.zeros((rows * cols, 3 * settings.patch**2), dtype=np.float32)

    def _mels(self, sample_id: int, position: int, frames: int) -> FloatArray:
        settings = self._recipe.model.audio
        assert settings is not None, "a clip in a model without audio unit"
        sample = self._index.samples[sample_id]
        try:
            return load_mels(sample.clips[position], frames, settings.mel_bins)
        except BadAudioError as bad:  # as with images: all ranks count on it
            self._bad.setdefault(sample_id, Quarantined.of(sample, bad.kind, str(bad)))
            return np.zeros((frames, settings.mel_bins), dtype=np.float32)


class Loader:
    """Iterates over the steps of a run from `start_step` on, without end.

    Prepares `data.prefetch` steps ahead in one background thread; what goes wrong there is raised by the `next` that
    would have returned that step. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        index: DataIndex,
        stream: GroupStream,
        recipe: Recipe,
        dp: Mapping[str, int],
        num_microbatches: int,
        needs: tuple[Need, ...],
        start_step: int = 0,
    ) -> None:
        """Start preparing. `dp` gives every unit's data-parallel size, "llm" included."""
        self._stream, self._dp, self._num_microbatches = stream, dp, num_microbatches
        self._preparer = Preparer(index, recipe, needs, num_microbatches)
        self._step = start_step
        self._ahead = _Ahead(self._make, start_step, recipe.data.prefetch) if recipe.data.prefetch else None
        self.wait_s = 0.0  # how long `next` kept its caller waiting, all together

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        start = time.perf_counter()
        try:
            data = self._ahead.take() if self._ahead is not None else self._make(self._step)
        except MmtrainError:
            raise
        except Exception as error:
            raise RunError(f"preparing step {self._step} failed: {type(error).__name__}: {error}") from error
        finally:
            self.wait_s += time.perf_counter() - start
        self._step += 1
        return data

    def _make(self, step: int) -> StepData:
        global_batch = self._dp["llm"] * self._num_microbatches
        return self._preparer.prepare(self._stream.batch(step, global_batch, self._dp, self._num_microbatches))

    def close(self) -> None:
        """Stop the background thread and wait for it to end."""
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Ahead:
    """Calls `make(step)` for successive steps in a thread, at most `depth` results ahead of the one taken."""

    def __init__(self, make: Callable[[int], StepData], first: int, depth: int) -> None:
        self._make, self._depth = make, depth
        self._ready: deque[StepData | Exception] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(first,), name="mmtrain-loader", daemon=True)
        self._thread.start()

    def take(self) -> StepData:
        """The next result, or the exception that took its place."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed)
            if not self._ready:
                raise RunError("the loader is closed")
            result = self._ready[0]
            if isinstance(result, Exception):  # stays: the thread has ended, and asking again must not hang
                raise result
            self._ready.popleft()
            self._changed.notify_all()
            return result

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _work(self, step: int) -> None:
        while True:
            try:
                result: StepData | Exception = self._make(step)
            except Exception as error:
                result = error
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                if self._closed:
                    return
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, Exception):
                return
            step += 1
