"""What a microbatch computes on, as numpy arrays: patches for an encoder, ids and labels for the LLM.

Lengths are always there; payload only where the caller hands in a way to get it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch import BatchMeta, IntArray
from mmtrain.data.images import FloatArray
from mmtrain.data.tokenize import Encoded

PatchLoader = Callable[[int, int, int, int], FloatArray]  # sample id, position, rows, cols -> (rows * cols, F)
Encoder = Callable[[int], Encoded]  # sample id -> ids and labels


@dataclass(frozen=True)
class VisionPayload:
    """One encoder microbatch of I images with N patches in all, packed one after another."""

    rows: tuple[int, ...]  # (I,) patch rows of each image
    cols: tuple[int, ...]  # (I,)
    patches: FloatArray | None  # (N, 3 * patch * patch), row-major per image


@dataclass(frozen=True)
class TextPayload:
    """One LLM microbatch of S sequences with T tokens in all, packed one after another."""

    lengths: tuple[int, ...]  # (S,) LLM tokens of each sequence
    ids: IntArray | None  # (T,)
    labels: IntArray | None  # (T,) the token to predict at each place, -100 where none
    feature_places: dict[str, IntArray]  # with ids: encoder unit -> (F,) places in [0, T) its rows go to


def vision_payload(
    meta: BatchMeta, unit: str, replica: int, index: int, patch_features: int, load: PatchLoader | None
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


def text_payload(
    meta: BatchMeta, replica: int, index: int, image_id: int, encode: Encoder | None, ids: bool, labels: bool
) -> TextPayload:
    """LLM microbatch (replica, index) with its ids, its labels, both or neither."""
    here = meta.microbatch(replica, index)
    lengths = tuple(meta.tokens[here].tolist())
    if encode is None or not (ids or labels):
        return TextPayload(lengths, None, None, {})
    encoded = [encode(int(sample_id)) for sample_id in meta.sample_id[here]]
    all_ids = np.concatenate([e.ids for e in encoded])
    assert all_ids.size == sum(lengths), "the data changed under a running index"
    places = {unit: np.flatnonzero(all_ids == image_id).astype(np.int64) for unit in meta.items} if ids else {}
    all_labels = np.concatenate([e.labels for e in encoded])
    return TextPayload(lengths, all_ids if ids else None, all_labels if labels else None, places)
