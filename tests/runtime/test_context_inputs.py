"""Shares of an LLM microbatch, put together by hand, are the whole microbatch: tokens, targets, positions, features."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.batch_meta import BatchMeta, ItemTable
from mmtrain.models.stage.stage_inputs import RowMix, TextInput
from mmtrain.program.ir.graph import Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.step_loads import step_loads
from mmtrain.runtime.execution.context_inputs import context_share


def _case(seed: int, cp: int, method: str, split: str, is_mixed: bool) -> tuple[StageGraph, BatchMeta, list[TextInput]]:
    """Draw a step of two replicas with two microbatches, and what the loader makes of each of the four."""
    rng = np.random.default_rng(seed)
    mesh = UnitMesh("llm", 1, 1, 2, tuple(range(2 * cp)), 2, cp=cp, cp_method=method, cp_split=split)  # type: ignore[arg-type]
    encoder = UnitMesh("vision", 1, 1, 2, tuple(range(2 * cp, 2 * cp + 2)), 2)
    stages = [
        Stage(StageId(m.unit, 0), (0, 1), tuple(m.tp_group(0, r) for r in range(m.num_replicas)), trainable=True)
        for m in (encoder, mesh)
    ]
    graph = StageGraph((encoder, mesh), tuple(stages), (Edge(stages[0].id, stages[1].id),))
    slot = np.sort(rng.integers(0, 4, size=9))
    replica, index = slot // 2, slot % 2
    num_items = rng.integers(0, 4, size=9)
    sample = np.repeat(np.arange(9), num_items)
    position = np.array([k for n in num_items for k in range(n)], dtype=np.int64)
    features = rng.integers(0, 5, size=len(sample))
    num_features = np.bincount(sample, features, 9).astype(np.int64)
    tokens = num_features + rng.integers(1, 12, size=9)
    order = np.lexsort((rng.random(len(sample)), index[sample], replica[sample]))
    columns = (sample, position, features, features, features, features, replica[sample], index[sample])
    table = ItemTable(*(column[order] for column in columns))
    meta = BatchMeta(0, 0, np.arange(9), tokens, tokens // 2, replica, index, {"vision": table})
    texts = []
    for s in range(4):
        samples = meta.microbatch(s // 2, s % 2)
        lengths = tuple(tokens[samples].tolist())
        places, first = [], 0
        for i in samples:
            places += (first + np.sort(rng.permutation(tokens[i])[: num_features[i]])).tolist()
            first += int(tokens[i])
        ids, labels = torch.from_numpy(rng.integers(0, 99, size=first)), torch.from_numpy(rng.integers(-100, 99, first))
        labels = torch.where(labels < 0, -100, labels)
        targets = torch.nonzero(labels != -100).squeeze(1)
        rows = torch.from_numpy(rng.integers(0, max(len(places), 1), size=(len(places), 2)))
        mixes = {"vision": RowMix(rows, torch.from_numpy(rng.random(rows.shape)))} if is_mixed and places else {}
        texts.append(
            TextInput(lengths, ids, labels, {"vision": torch.tensor(places, dtype=torch.int64)}, None, mixes,
                      target_positions=targets, target_sources=targets % 3, num_sources=3)
        )  # fmt: skip
    return graph, meta, texts


def _received(graph: StageGraph, meta: BatchMeta, slot: int) -> list[list[int]]:
    """Return, for each replica that shares a microbatch, which of its rows the encoder's route brings, in order."""
    loads, mesh, items = step_loads(graph, meta), graph.mesh("llm"), meta.items["vision"]
    d, i = divmod(slot, 2)
    in_order = [
        (s, k, row)
        for s in meta.microbatch(d, i)
        for k in sorted(np.flatnonzero(items.sample == s), key=lambda k: items.position[k])
        for row in range(items.features[k])
    ]
    number = {row: n for n, row in enumerate(in_order)}
    arrived = []
    for replica in mesh.cp_replicas(d * mesh.cp):
        rows: dict[int, int] = {}
        for (src, dst), spans in loads.routes["vision", "llm"].spans.items():
            if dst != Microbatch("llm", replica, i):
                continue
            held = [(items.sample[k], k, r) for k in items.microbatch(src.replica, src.index)
                    for r in range(items.features[k])]  # fmt: skip
            for a, b, n in spans.tolist():
                rows |= {b + j: number[held[a + j]] for j in range(n)}
        assert sorted(rows) == list(range(len(rows)))
        arrived.append([rows[k] for k in range(len(rows))])
    return arrived


@given(
    st.integers(0, 2**32), st.integers(2, 4), st.sampled_from(["ulysses", "ring"]), st.sampled_from(["auto", "even"]),
    st.booleans(),
)  # fmt: skip
def test_shares_together_are_the_microbatch(seed: int, cp: int, method: str, split: str, is_mixed: bool) -> None:
    graph, meta, texts = _case(seed, cp, method, split, is_mixed)
    mesh, loads = graph.mesh("llm"), step_loads(graph, meta).loads
    for slot, text in enumerate(texts):
        d, index = divmod(slot, 2)
        shares = [context_share(text, mesh, meta, d * cp + rank, index) for rank in range(cp)]
        # Give every token a value of its own, to follow it.
        marked = [
            context_share(_with_marks(text), mesh, meta, d * cp + rank, index).ids.numpy()  # type: ignore[union-attr]
            for rank in range(cp)
        ]
        assert sorted(np.concatenate(marked).tolist()) == list(range(sum(text.lengths)))
        starts = np.cumsum((0, *text.lengths))
        received = _received(graph, meta, slot)
        sent = [_sent(share, rows) for share, rows in zip(shares, received, strict=True)]
        for rank, (share, mark) in enumerate(zip(shares, marked, strict=True)):
            assert sum(share.lengths) == len(mark) == loads[Microbatch("llm", d * cp + rank, index)].tokens
            assert share.context is not None
            own_positions = np.concatenate(
                [np.arange(n) + a for a, n in zip(share.context.starts, share.lengths, strict=True)] or [[]]
            )
            sequence = np.searchsorted(starts, mark, side="right") - 1
            assert own_positions.tolist() == (mark - starts[sequence]).tolist()
            assert text.labels is not None and share.labels is not None  # noqa: PT018
            assert share.labels.tolist() == text.labels[mark].tolist()
            assert share.target_positions is not None
            kept = mark[share.target_positions.numpy()]
            assert sorted(kept.tolist()) == [t for t in text.target_positions.tolist() if t in set(mark.tolist())]  # type: ignore[union-attr]
            assert share.target_sources.tolist() == (kept % 3).tolist()  # type: ignore[union-attr]
            _check_features(text, share, mark, [of_sender[rank] for of_sender in sent])


def _with_marks(text: TextInput) -> TextInput:
    assert text.ids is not None
    return TextInput(text.lengths, torch.arange(len(text.ids)), text.labels, text.feature_positions, None,
                     text.feature_mixes, target_positions=text.target_positions)  # fmt: skip


def _sent(share: TextInput, rows: list[int]) -> list[list[int]]:
    """Return what a rank with these rows sends each rank; its own rows stay where nothing is exchanged."""
    assert share.context is not None
    exchange = share.context.features.get("vision")
    if exchange is None:
        return [rows if rank == share.context.rank else [] for rank in range(len(share.context.pieces))]
    stops = np.cumsum(exchange.num_sent)
    sent = [rows[k] for k in exchange.sent.tolist()]
    return [sent[stop - n : stop] for stop, n in zip(stops, exchange.num_sent, strict=True)]


def _check_features(text: TextInput, share: TextInput, mark: np.ndarray, arriving: list[list[int]]) -> None:
    """Check that the rank's features are those of its tokens, when rows arrive sender by sender."""
    rows = [row for of_sender in arriving for row in of_sender]
    exchange = share.context.features.get("vision") if share.context is not None else None
    if exchange is not None:
        assert list(map(len, arriving)) == list(exchange.num_received)
    tokens = mark[share.feature_positions["vision"].numpy()]
    places = text.feature_positions["vision"].tolist()
    assert sorted(tokens.tolist()) == sorted(set(places) & set(mark.tolist()))
    features = [places.index(token) for token in tokens.tolist()]
    if "vision" not in text.feature_mixes:
        assert rows == features
        return
    mix, own = text.feature_mixes["vision"], share.feature_mixes["vision"]
    assert [[rows[k] for k in of_feature] for of_feature in own.rows.tolist()] == mix.rows[features].tolist()
    assert torch.equal(own.weights, mix.weights[features])


def test_a_whole_microbatch_on_one_rank_leaves_the_others_without_tokens() -> None:
    mesh = UnitMesh("llm", 1, 1, 1, (0, 1), 1, cp=2)
    empty = np.empty(0, dtype=np.int64)
    meta = BatchMeta(0, 0, empty, empty, empty, empty, empty, {})
    share = context_share(TextInput((), torch.empty(0, dtype=torch.int64)), mesh, meta, 1, 0)
    assert share.lengths == ()
    assert pytest.approx(0) == len(share.ids)  # type: ignore[arg-type]
