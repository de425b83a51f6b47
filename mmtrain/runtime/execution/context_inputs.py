"""Take a rank's share of an LLM microbatch whose sequences lie on the ranks of a context-parallel group."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtrain.balance import BatchMeta, IntArray
from mmtrain.balance.context_split import ContextSplit
from mmtrain.models.attention import Spans
from mmtrain.models.attention.context_parallel import ContextShare, RowExchange
from mmtrain.models.stage.stage_inputs import RowMix, TextInput
from mmtrain.program import UnitMesh
from mmtrain.program.ir.context_loads import (
    num_features_of_samples,
    owners_of_features,
    ranks_of_whole,
    split_microbatch,
)


def context_share(text: TextInput, mesh: UnitMesh, meta: BatchMeta, replica: int, index: int) -> TextInput:
    """Return what `replica` of the LLM computes of a whole microbatch on the host, which its cp group shares.

    `text` has the labels of the whole microbatch, already shifted, so no rank needs a token of another for its loss.
    """
    d, rank = divmod(replica, mesh.cp)
    split = split_microbatch(mesh, meta, d, index)
    rows_by_rank = [_rows(split, r) for r in range(mesh.cp)]
    rows = torch.from_numpy(rows_by_rank[rank])
    local = np.full(sum(split.lengths), -1, dtype=np.int64)
    local[rows_by_rank[rank]] = np.arange(len(rows))
    rank_of_token = _rank_of_token(rows_by_rank, len(local))
    features = {
        unit: _features(text, unit, rank_of_token, _owners(unit, split, meta, (d, index)), (rank, mesh.cp))
        for unit in text.feature_positions
    }
    targets = _kept_targets(text, local)
    return replace(
        text,
        lengths=tuple(piece.num_tokens for piece in split.pieces(rank)),
        ids=None if text.ids is None else text.ids[rows],
        labels=None if text.labels is None else text.labels[rows],
        position_ids=None if text.position_ids is None else text.position_ids[:, rows].contiguous(),
        token_keys=None if text.token_keys is None else text.token_keys[rows],
        feature_positions={unit: torch.from_numpy(local[own.tokens]) for unit, own in features.items()},
        feature_mixes={unit: own.mix for unit, own in features.items() if own.mix is not None},
        image_spans=(),
        target_positions=None if targets is None else targets[0],
        target_sources=None if targets is None or text.target_sources is None else text.target_sources[targets[1]],
        context=ContextShare(
            rank=rank,
            method=mesh.cp_method,
            starts=tuple(piece.start for piece in split.pieces(rank)),
            whole_lengths=tuple(piece.num_tokens for piece in split.whole_pieces[rank]),
            cut_lengths=tuple(split.lengths[sequence] for sequence in split.cut),
            pieces=tuple(tuple(piece.num_tokens for piece in pieces) for pieces in split.cut_pieces),
            sequences=tuple(piece.sequence for piece in split.pieces(rank)),
            num_sequences=len(split.lengths),
            whole_spans=_spans(text.image_spans, split, [piece.sequence for piece in split.whole_pieces[rank]]),
            cut_spans=_spans(text.image_spans, split, split.cut),
            features={unit: own.exchange for unit, own in features.items() if own.exchange is not None},
        ),
    )


def _rows(split: ContextSplit, rank: int) -> IntArray:
    """Return where a rank's tokens stand in the whole microbatch, in the order of the rank."""
    firsts = np.cumsum(split.lengths, dtype=np.int64) - split.lengths
    runs = [np.arange(piece.start, piece.stop) + firsts[piece.sequence] for piece in split.pieces(rank)]
    return np.concatenate([np.empty(0, dtype=np.int64), *runs])


def _spans(spans: Spans, split: ContextSplit, sequences: Sequence[int]) -> Spans:
    """Return the spans inside some sequences, as if these were laid one after another."""
    firsts = np.cumsum(split.lengths, dtype=np.int64) - split.lengths
    kept = []
    place = 0
    for sequence in sequences:
        first, length = int(firsts[sequence]), split.lengths[sequence]
        inside = [(a, b) for a, b in spans if first <= a < first + length]
        kept += [(a - first + place, b - first + place) for a, b in inside]
        place += length
    return tuple(kept)


def _kept_targets(text: TextInput, local: IntArray) -> tuple[Tensor, Tensor] | None:
    """Return the places of this rank's targets among its tokens, and their places among all targets."""
    if text.target_positions is None:
        return None
    of_all = local[text.target_positions.numpy()]
    kept = np.flatnonzero(of_all >= 0)
    kept = kept[np.argsort(of_all[kept], kind="stable")]
    return torch.from_numpy(of_all[kept]), torch.from_numpy(kept)


class _Features(NamedTuple):
    """The features of one encoder that are tokens of this rank."""

    tokens: IntArray  # of the whole microbatch, in the order of the features
    mix: RowMix | None  # what features are made of, where they are no rows
    exchange: RowExchange | None  # how the rows get here; None: every rank got those that it needs


def _rank_of_token(rows_by_rank: Sequence[IntArray], num_tokens: int) -> IntArray:
    """Return (T,) which rank computes each token of the whole microbatch."""
    ranks = np.empty(num_tokens, dtype=np.int64)
    for rank, rows in enumerate(rows_by_rank):
        ranks[rows] = rank
    return ranks


def _owners(unit: str, split: ContextSplit, meta: BatchMeta, microbatch: tuple[int, int]) -> IntArray:
    """Return (R,) the rank to which the encoder sends each of its rows for a microbatch."""
    num_features = num_features_of_samples(meta.items[unit], len(meta.tokens))[meta.microbatch(*microbatch)]
    return owners_of_features(num_features, ranks_of_whole(split), split.cp)


def _features(
    text: TextInput, unit: str, rank_of_token: IntArray, owners: IntArray, place: tuple[int, int]
) -> _Features:
    """Find the features of an encoder that this rank's tokens are, and how their rows get here.

    place: this rank, and the number of ranks.
    """
    rank, cp = place
    tokens = text.feature_positions[unit].numpy()
    ranks = rank_of_token[tokens]
    mine = np.flatnonzero(ranks == rank)
    mix = text.feature_mixes.get(unit)
    if mix is None:
        needed = [np.flatnonzero(ranks == r) for r in range(cp)]
    else:
        needed = [np.unique(mix.rows.numpy()[ranks == r]) for r in range(cp)]
    # Rows arrive sender by sender.
    needed = [rows[np.argsort(owners[rows], kind="stable")] for rows in needed]
    exchange = _exchange(owners, needed, rank)
    if mix is None:
        return _Features(tokens[needed[rank]], None, exchange)
    arrival = np.empty(len(owners), dtype=np.int64)
    arrival[needed[rank]] = np.arange(len(needed[rank]))
    own_mix = RowMix(torch.from_numpy(arrival[mix.rows.numpy()[mine]]), mix.weights[torch.from_numpy(mine)])
    return _Features(tokens[mine], own_mix, exchange)


def _exchange(owners: IntArray, needed: Sequence[IntArray], rank: int) -> RowExchange | None:
    """Return how the rows of one encoder get from their owners to the ranks that need them; None: all are there.

    Args:
        owners: (R,) the rank that has each row.
        needed: by rank, the rows that it needs, owner by owner.
        rank: this one.
    """
    owned = [np.flatnonzero(owners == r) for r in range(len(needed))]
    if all(np.array_equal(rows, own) for rows, own in zip(needed, owned, strict=True)):
        return None
    place = np.empty(len(owners), dtype=np.int64)  # of each of this rank's rows among them
    place[owned[rank]] = np.arange(len(owned[rank]))
    sent = [place[rows[owners[rows] == rank]] for rows in needed]
    return RowExchange(
        torch.from_numpy(np.concatenate(sent)),
        tuple(map(len, sent)),
        tuple(int((owners[needed[rank]] == r).sum()) for r in range(len(needed))),
    )
