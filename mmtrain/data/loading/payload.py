"""The input of a microbatch as numpy arrays: patches or log-mel frames for an encoder, ids and labels for the LLM.

Lengths are always there; payload only where the caller passes a function that loads it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray, ItemTable
from mmtrain.data.media.images import CellArray
from mmtrain.data.media.joined_tiles import FeatureMix
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, EncodedSample
from mmtrain.recipe.settings.modalities import GENERATOR

# Sample id, position, rows, cols -> (rows * cols, F); None for an item without anything to see or to hear.
LoadCells = Callable[[int, int, int, int], CellArray | None]
EncodeSample = Callable[[int], EncodedSample]  # sample id -> ids and labels
JoinFeatures = Callable[[int, int], FeatureMix]  # sample id, number of its items -> see `DataIndex.joined_features`
FindPositions = Callable[[int, IntArray], IntArray]  # sample id, its ids (T,) -> (3, T) time, row and column


@dataclass(frozen=True)
class PayloadNeed:
    """A replica whose microbatches a rank computes, and the payload that the rank needs besides the lengths."""

    unit: str
    replica: int
    media: bool = False  # encoder: on its first stage; generator: on its first and last stage
    ids: bool = False  # LLM: on the stage with the embedding
    labels: bool = False  # LLM: on the stage with the head
    position_ids: bool = False  # LLM: on all stages, if images have rows and columns there
    image_spans: tuple[str, ...] = ()  # LLM: on all stages, encoders whose features of an image see each other


@dataclass(frozen=True)
class EncoderPayload:
    """One encoder microbatch of I items with N cells in all, packed without padding.

    An item is a grid of cells: an image has rows x cols patches, a clip has frames x 1 log-mel frames.
    """

    rows: tuple[int, ...]  # (I,)
    cols: tuple[int, ...]  # (I,)
    cells: CellArray | None  # (N, features of a cell), row-major for each item
    # [start, stop) of cells that are zeros behind normalization too: no byte says so.
    blank_cells: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TextPayload:
    """One LLM microbatch of S sequences with T tokens in all, packed; padding belongs to the sequence before it."""

    lengths: tuple[int, ...]  # (S,) LLM tokens of each sequence
    ids: IntArray | None  # (T,)
    labels: IntArray | None  # (T,) the token to predict at each position, -100 where none
    feature_positions: dict[str, IntArray]  # with ids: encoder unit -> (F,) positions in [0, T) of its features
    position_ids: IntArray | None = None  # (3, T) rotary positions in time, row and column
    # With ids, for encoders whose tiles are joined: what each of their features is made of.
    feature_mixes: dict[str, FeatureMix] = field(default_factory=dict)
    image_spans: tuple[tuple[int, int], ...] = ()  # [start, stop) in [0, T) of the features of each image
    # (Q,) with ids or labels, for models with a generator: the positions in [0, T) of the queries of images to draw.
    query_positions: IntArray | None = None


def build_encoder_payload(
    meta: BatchMeta, unit: str, replica: int, index: int, cell_features: int, load: LoadCells | None
) -> EncoderPayload:
    """Build microbatch (unit, replica, index); `load` returns the cells of an item, `cell_features` values each.

    Items without cells become zeros.
    """
    table = meta.items[unit]
    items = table.microbatch(replica, index)
    rows = table.rows[items].tolist()
    cols = table.cols[items].tolist()
    if load is None:
        return EncoderPayload(tuple(rows), tuple(cols), None)
    sample_ids = meta.sample_id[table.sample[items]].tolist()
    positions = table.position[items].tolist()
    cells_of_items = [load(*item) for item in zip(sample_ids, positions, rows, cols, strict=True)]
    dtype = next((item.dtype for item in cells_of_items if item is not None), np.dtype(np.float32))
    cells = np.zeros((int((table.rows[items] * table.cols[items]).sum()), cell_features), dtype=dtype)
    blank_cells: list[tuple[int, int]] = []
    start = 0
    for item_cells, item_rows, item_cols in zip(cells_of_items, rows, cols, strict=True):
        stop = start + item_rows * item_cols
        if item_cells is None:
            blank_cells.append((start, stop))
        else:
            cells[start:stop] = item_cells
        start = stop
    return EncoderPayload(tuple(rows), tuple(cols), cells, tuple(blank_cells))


def build_text_payload(
    meta: BatchMeta,
    need: PayloadNeed,
    index: int,
    item_ids: Mapping[str, tuple[int, ...]],
    encode: EncodeSample,
    find_positions: FindPositions | None = None,
    join_features: Mapping[str, JoinFeatures] | None = None,
) -> TextPayload:
    """Build LLM microbatch `index` of a replica with what is needed of its ids, labels, positions and spans.

    item_ids: encoder unit -> the token ids at the positions of its features; encoders of one modality share them. For a
        generator: those at the positions of its queries.
    find_positions: for needs with `position_ids`.
    join_features: by encoder unit, for those whose tiles are joined.
    """
    samples = meta.microbatch(need.replica, index)
    lengths = tuple(meta.tokens[samples].tolist())
    if not (need.ids or need.labels or need.position_ids or need.image_spans):
        return TextPayload(lengths, None, None, {})
    sample_ids = meta.sample_id[samples].tolist()
    encoded = [encode(sample_id) for sample_id in sample_ids]
    padding = [0] * len(samples) if meta.padding is None else meta.padding[samples].tolist()
    encoded = [_padded(*entry, item_ids) for entry in zip(encoded, padding, strict=True)]
    empty = np.empty(0, dtype=np.int64)  # a microbatch may have no samples when answers are generated
    all_ids = np.concatenate([empty, *(e.ids for e in encoded)])
    assert all_ids.size == sum(lengths), "the data changed under a running index"
    ids = positions = None
    feature_positions: dict[str, IntArray] = {}
    feature_mixes: dict[str, FeatureMix] = {}
    if need.ids:
        ids, feature_positions = all_ids, _feature_positions(all_ids, meta, samples, item_ids)
        feature_mixes = _feature_mixes(meta, samples, join_features or {})
    labels = np.concatenate([empty, *(e.labels for e in encoded)]) if need.labels else None
    if need.position_ids:
        assert find_positions is not None, "positions are needed, but nothing finds them"
        of_samples = [find_positions(sample_id, e.ids) for sample_id, e in zip(sample_ids, encoded, strict=True)]
        positions = np.concatenate([np.empty((3, 0), dtype=np.int64), *of_samples], axis=1)
    image_ids = tuple({token for unit in need.image_spans for token in item_ids[unit]})
    spans = _image_spans([e.ids for e in encoded], image_ids) if image_ids else ()
    queries = np.flatnonzero(np.isin(all_ids, item_ids[GENERATOR])).astype(np.int64) if GENERATOR in item_ids else None
    return TextPayload(lengths, ids, labels, feature_positions, positions, feature_mixes, spans, queries)


def _padded(sample: EncodedSample, num_padding: int, item_ids: Mapping[str, tuple[int, ...]]) -> EncodedSample:
    """Append tokens without a target behind a sample: under causal attention none of its own tokens sees them."""
    if not num_padding:
        return sample
    reserved = {token for tokens in item_ids.values() for token in tokens}  # features would take their places
    pad_id = next(token for token in count() if token not in reserved)
    ids = np.concatenate([sample.ids, np.full(num_padding, pad_id, dtype=np.int64)])
    return EncodedSample(ids, np.concatenate([sample.labels, np.full(num_padding, IGNORE_INDEX, dtype=np.int64)]))


def _image_spans(ids_of_samples: list[IntArray], image_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return where consecutive tokens of images start and stop, counted through all samples."""
    spans: list[tuple[int, int]] = []
    first = 0
    for ids in ids_of_samples:
        is_image = np.isin(ids, image_ids).astype(np.int64)
        edges = first + np.flatnonzero(np.diff(is_image, prepend=0, append=0))
        spans += zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        first += len(ids)
    return tuple(spans)


def _feature_positions(
    ids: IntArray, meta: BatchMeta, samples: IntArray, item_ids: Mapping[str, tuple[int, ...]]
) -> dict[str, IntArray]:
    """Return for each encoder the positions of its features among `ids`, those of the `samples` one after another.

    Encoders with the same tokens share their positions: those of an item belong to one encoder after another, in the
    order of `meta.items`.
    """
    units_of_tokens: dict[tuple[int, ...], list[str]] = {}
    for unit in meta.items:
        if unit != GENERATOR:  # it sends the LLM no features
            units_of_tokens.setdefault(item_ids[unit], []).append(unit)
    positions: dict[str, IntArray] = {}
    for tokens, units in units_of_tokens.items():
        of_tokens = np.flatnonzero(np.isin(ids, tokens)).astype(np.int64)
        if len(units) == 1:
            positions[units[0]] = of_tokens
            continue
        counts = np.stack([_features_in_order(meta.items[unit], samples) for unit in units], axis=1)  # (items, units)
        owner = np.repeat(np.tile(np.arange(len(units)), len(counts)), counts.ravel())
        assert len(owner) == len(of_tokens), "the data changed under a running index"
        for number, unit in enumerate(units):
            positions[unit] = of_tokens[owner == number]
    return positions


def _feature_mixes(
    meta: BatchMeta, samples: IntArray, join_features: Mapping[str, JoinFeatures]
) -> dict[str, FeatureMix]:
    """Return `TextPayload.feature_mixes`: the encoders send the items of the samples one sample after another."""
    mixes: dict[str, FeatureMix] = {}
    for unit, join in join_features.items():
        table = meta.items[unit]
        of_samples, first_rows = [], []
        first_row = 0
        for sample in samples:
            in_sample = table.sample == sample
            of_samples.append(join(int(meta.sample_id[sample]), int(in_sample.sum())))
            first_rows.append(first_row)
            first_row += int(table.features[in_sample].sum())
        mixes[unit] = FeatureMix.join(of_samples, first_rows)
    return mixes


def _features_in_order(table: ItemTable, samples: IntArray) -> IntArray:
    """Return the features of each item of the samples, sample by sample."""
    rows = np.flatnonzero(np.isin(table.sample, samples))
    in_order = rows[np.lexsort((table.position[rows], table.sample[rows]))]
    return table.features[in_order]
