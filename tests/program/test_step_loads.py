"""Loads and routes against a literal scatter of labeled rows."""

from dataclasses import replace
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import assign
from mmtrain.balance.batch_meta import BatchMeta, ItemTable
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.program import Microbatch, StageGraph, step_loads
from tests.balance.test_assign import make_groups, make_lengths
from tests.call_counter import count_calls
from tests.program.graphs import Unit, chain


def random_meta(graph: StageGraph, seed: int, num_samples: int, max_items: int = 3) -> BatchMeta:
    """Return a batch with samples in random microbatches; items are in the group and block of their sample."""
    rng = np.random.default_rng(seed)
    llm = graph.mesh("llm")
    replica, index = rng.integers(llm.dp, size=num_samples), rng.integers(llm.num_microbatches, size=num_samples)
    order = np.lexsort((index, replica))
    replica, index = replica[order], index[order]
    tables = {}
    for mesh in graph.meshes:
        if mesh.unit == "llm":
            continue
        counts = rng.integers(0, max_items + 1, size=num_samples)
        sample = np.repeat(np.arange(num_samples), counts)
        position = np.array([k for c in counts for k in range(c)], dtype=np.int64)
        per_group = mesh.dp // graph.num_groups
        group = replica[sample] // (llm.dp // graph.num_groups)
        item_replica = group * per_group + rng.integers(per_group, size=len(sample))
        blocks = gcd(mesh.num_microbatches, llm.num_microbatches)
        per_block = mesh.num_microbatches // blocks
        item_index = index[sample] * blocks // llm.num_microbatches * per_block + rng.integers(
            per_block, size=len(sample)
        )
        shuffled = rng.permutation(len(sample))
        if rng.integers(2):
            shuffled = np.arange(len(sample))  # neighbors stay neighbors
        by_slot = shuffled[np.lexsort((item_index[shuffled], item_replica[shuffled]))]
        rows, cols = rng.integers(1, 5, size=len(sample)), rng.integers(1, 5, size=len(sample))
        table = ItemTable(
            sample,
            position,
            rows,
            cols,
            rows * cols + 1,
            rng.integers(0, 4, size=len(sample)),
            item_replica,
            item_index,
        )
        tables[mesh.unit] = ItemTable(*(column[by_slot] for column in vars(table).values()))
    tokens = rng.integers(1, 20, size=num_samples)
    return BatchMeta(0, 0, np.arange(num_samples), tokens, tokens, replica, index, tables)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 12),
    st.sampled_from(["", "audio", "generator"]),
    st.integers(0, 2**32),
)
def test_every_row_arrives_once_in_the_order_of_samples_and_items(encoders, llms, n, llm_n, num_samples, third, seed):
    before = [Unit("audio", 2, 2, n=2)] if third == "audio" else []
    after = [Unit("generator", 2, 3, n=n + 1)] if third == "generator" else []
    graph = chain(Unit("vision", 1, encoders, n=n), *before, Unit("llm", 2, llms, n=llm_n), *after)
    meta = random_meta(graph, seed, num_samples)
    loads = step_loads(graph, meta)
    for unit, items in meta.items.items():
        pair = ("llm", unit) if unit == "generator" else (unit, "llm")
        route = loads.routes[pair]
        held: dict[Microbatch, list] = {}  # rows of features, as the two ends hold them
        for mb in microbatches(graph, unit):
            rows = items.microbatch(mb.replica, mb.index)
            held[mb] = [(items.sample[k], items.position[k], row) for k in rows for row in range(items.features[k])]
            assert loads.loads[mb] == TokenLoad.of(items.tokens[rows])
        for mb in microbatches(graph, "llm"):
            held[mb] = sorted(
                (s, items.position[k], row)
                for s in meta.microbatch(mb.replica, mb.index)
                for k in np.flatnonzero(items.sample == s)
                for row in range(items.features[k])
            )
        assert all(loads.rows_out[mb] == len(held[mb]) for mb in microbatches(graph, pair[0]))
        arrived: dict[Microbatch, list] = {mb: [None] * len(held[mb]) for mb in microbatches(graph, pair[1])}
        edge = next(e for e in graph.edges if (e.src.unit, e.dst.unit) == pair)
        for (src, dst), spans in route.spans.items():
            assert dst in graph.destinations(edge, src)
            assert len(spans)
            assert route.rows(src, dst) == spans[:, 2].sum()
            for src_offset, dst_offset, length in spans:
                assert length > 0
                assert arrived[dst][dst_offset : dst_offset + length] == [None] * length
                arrived[dst][dst_offset : dst_offset + length] = held[src][src_offset : src_offset + length]
        assert all(rows == held[mb] for mb, rows in arrived.items())
    for mb in microbatches(graph, "llm"):
        samples = meta.microbatch(mb.replica, mb.index)
        assert loads.loads[mb] == replace(TokenLoad.of(meta.tokens[samples]), targets=meta.targets[samples].sum())


@given(
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (4, 2)]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_an_assigned_batch_flows_along_the_edges_of_its_graph(dp, n, llm_n, seed):
    graph = chain(Unit("vision", dp=dp[0], n=n), Unit("llm", dp=dp[1], n=llm_n))
    rng = np.random.default_rng(seed)
    num_groups = dp[1] * llm_n
    lengths = make_lengths(rng, 3 * num_groups)
    counts = {"vision": n, "llm": llm_n}
    meta = assign(0, 0, make_groups(rng, 3 * num_groups, num_groups), lengths, {"vision": dp[0], "llm": dp[1]}, counts)
    loads = step_loads(graph, meta)
    route = loads.routes["vision", "llm"]
    spans = route.spans
    edge = graph.edges[-1]
    assert all(dst in graph.destinations(edge, src) for src, dst in spans)
    for dst in microbatches(graph, "llm"):
        assert route.received_rows(dst, is_back=False) == sum(route.rows(src, dst) for src in graph.sources(edge, dst))
    for src in microbatches(graph, "vision"):
        destinations = graph.destinations(edge, src)
        assert route.received_rows(src, is_back=True) == sum(route.rows(src, dst) for dst in destinations)
    assert sum(int(s[:, 2].sum()) for s in spans.values()) == lengths.items["vision"].features.sum()


def microbatches(graph: StageGraph, unit: str) -> list[Microbatch]:
    mesh = graph.mesh(unit)
    return [Microbatch(unit, r, i) for r in range(mesh.dp) for i in range(mesh.num_microbatches)]


def test_neighboring_items_travel_as_one_span():
    """One microbatch of two samples with two items each, encoded in the same order: one span of all 10 rows."""
    graph = chain(Unit("vision"), Unit("llm"), n=1)
    zeros = np.zeros(4, dtype=np.int64)
    features = np.array([1, 2, 3, 4])
    items = ItemTable(
        np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), features, features, features, features, *[zeros] * 2
    )
    per_sample = np.zeros(2, dtype=np.int64)
    meta = BatchMeta(0, 0, per_sample, per_sample + 9, per_sample, per_sample, per_sample, {"vision": items})
    route = step_loads(graph, meta).routes["vision", "llm"]
    pair = (Microbatch("vision", 0, 0), Microbatch("llm", 0, 0))
    assert [spans.tolist() for spans in route.spans.values()] == [[[0, 0, 10]]]
    assert list(route.spans) == [pair]
    assert route.rows(*pair) == 10
    assert route.rows(pair[1], pair[0]) == 0


def test_text_only_models_have_no_routes():
    graph = chain(Unit("llm", dp=2), n=2)
    loads = step_loads(graph, random_meta(graph, 0, 10))
    assert loads.routes == {}
    assert sorted(map(str, loads.loads)) == ["llm:0.0", "llm:0.1", "llm:1.0", "llm:1.1"]


def test_a_batch_without_images_loads_nothing():
    graph = chain(Unit("vision"), Unit("llm"), n=2)
    loads = step_loads(graph, random_meta(graph, 0, 4, max_items=0))
    assert loads.loads[Microbatch("vision", 0, 1)] == TokenLoad(0, 0, 0, 0)
    assert loads.routes["vision", "llm"].spans == {}


def test_a_batch_without_the_encoder_is_an_error():
    graph = chain(Unit("llm"), n=2)
    with pytest.raises(KeyError, match="vision"):
        step_loads(chain(Unit("vision"), Unit("llm"), n=2), random_meta(graph, 0, 4))


def test_four_times_the_samples_take_hardly_more_python_calls():
    """Samples are in arrays; Python loops run only over microbatches and pairs of them."""
    graph = chain(Unit("vision", dp=16), Unit("llm", dp=64), n=16)
    small, large = (random_meta(graph, 0, num_samples) for num_samples in (4_000, 16_000))
    calls = count_calls(lambda: step_loads(graph, small))
    assert count_calls(lambda: step_loads(graph, large)) < 1.5 * calls < 60_000
