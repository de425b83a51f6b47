"""What a microbatch computes on, as numpy arrays: patches or log-mel frames for an encoder, ids and labels for the LLM.

Lengths are always there; payload only where the caller hands in a way to get it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray
from mmtrain.data.media.images import Float32Array
from mmtrain.data.text.chat_tokenizer import EncodedSample

LoadPatches = Callable[[int, int, int, int], Float32Array]  # sample id, position, rows, cols -> (rows * cols, F)
LoadMels = Callable[[int, int, int], Float32Array]  # sample id, position, frames -> (frames, bins)
EncodeSample = Callable[[int], EncodedSample]  # sample id -> ids and labels


@dataclass(frozen=True)
class VisionPayload:
    """One encoder microbatch of I images with N patches in all, packed one after another."""

    rows: tuple[int, ...]  # (I,) patch rows of each image
    cols: tuple[int, ...]  # (I,)
    patches: Float32Array | None  # (N, 3 * patch * patch), row-major per image


@dataclass(frozen=True)
class AudioPayload:
    """One encoder microbatch of I clips with N log-mel frames in all, packed one after another."""

    frames: tuple[int, ...]  # (I,) frames of each clip
    mels: Float32Array | None  # (N, mel_bins)


@dataclass(frozen=True)
class TextPayload:
    """One LLM microbatch of S sequences with T tokens in all, packed one after another."""

    lengths: tuple[int, ...]  # (S,) LLM tokens of each sequence
    ids: IntArray | None  # (T,)
    labels: IntArray | None  # (T,) the token to predict at each place, -100 where none
    feature_positions: dict[str, IntArray]  # with ids: encoder unit -> (F,) places in [0, T) its rows go to


def build_vision_payload(
    meta: BatchMeta, unit: str, replica: int, index: int, patch_features: int, load: LoadPatches | None
) -> VisionPayload:
    """Microbatch (unit, replica, index); `load` fetches an image's patches of `patch_features` features each."""
    table = meta.items[unit]
    here = table.microbatch(replica, index)
    rows, cols = table.rows[here].tolist(), table.cols[here].tolist()
    patches = None
    if load is not None:
        patches = np.empty((int((table.rows[here] * table.cols[here]).sum()), patch_features), dtype=np.float32)
        lo = 0
        for item, r, c in zip(here, rows, cols, strict=True):
            sample_id = int(meta.sample_id[table.sample[item]])
            patches[lo : lo + r * c] = load(sample_id, int(table.position[item]), r, c)
            lo += r * c
    return VisionPayload(tuple(rows), tuple(cols), patches)


def build_audio_payload(
    meta: BatchMeta, unit: str, replica: int, index: int, bins: int, load: LoadMels | None
) -> AudioPayload:
    """Microbatch (unit, replica, index); `load` fetches a clip's log-mel frames of `bins` features each."""
    table = meta.items[unit]
    here = table.microbatch(replica, index)
    frames = table.rows[here].tolist()
    if load is None:
        return AudioPayload(tuple(frames), None)
    mels = [np.empty((0, bins), dtype=np.float32)]
    for item, n in zip(here, frames, strict=True):
        mels.append(load(int(meta.sample_id[table.sample[item]]), int(table.position[item]), n))
    return AudioPayload(tuple(frames), np.concatenate(mels))


def build_text_payload(
    meta: BatchMeta,
    replica: int,
    index: int,
    item_ids: Mapping[str, int],
    encode: EncodeSample | None,
    ids: bool,
    labels: bool,
) -> TextPayload:
    """LLM microbatch (replica, index) with its ids, its labels, both or neither.

    item_ids: for every encoder unit the token id whose places its features take.
    """
    here = meta.microbatch(replica, index)
    lengths = tuple(meta.tokens[here].tolist())
    if encode is None or not (ids or labels):
        return TextPayload(lengths, None, None, {})
    encoded = [encode(int(sample_id)) for sample_id in meta.sample_id[here]]
    nothing = np.empty(0, dtype=np.int64)  # a microbatch may have no samples, where answers are written
    all_ids = np.concatenate([nothing, *(e.ids for e in encoded)])
    assert all_ids.size == sum(lengths), "the data changed under a running index"
    places = {unit: np.flatnonzero(all_ids == item_ids[unit]).astype(np.int64) for unit in meta.items} if ids else {}
    all_labels = np.concatenate([nothing, *(e.labels for e in encoded)])
    return TextPayload(lengths, all_ids if ids else None, all_labels if labels else None, places)
