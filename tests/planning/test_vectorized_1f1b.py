"""Vectorized orders end at the same time as the simulation of the programs that builders make."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given

from mmtrain.planning.evaluate.partition_orders import unique_rows
from mmtrain.planning.evaluate.vectorized_1f1b import FloatArray, compute_order
from mmtrain.program import build_1f1b, simulate
from mmtrain.program.ir.actions import Compute, Forward, Pass
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules.lower import lower
from tests.program.graphs import Unit, chain, graphs_of_one_bucket
from tests.program.timings import Seconds


@dataclass
class Drawn(Seconds):
    """Random seconds for every forward and backward."""

    graph: StageGraph
    seconds: dict[StageId, tuple[FloatArray, FloatArray]]

    def compute(self, action: Compute) -> float:
        count = self.graph.mesh(action.stage.unit).num_microbatches
        forward, backward = self.seconds[action.stage]
        kind = forward if isinstance(action, Forward) else backward
        return float(kind[0, action.mb.replica * count + action.mb.index])


def holds(graph: StageGraph) -> None:
    """Check that every rank's last compute ends when the simulator says."""
    rng = np.random.default_rng(0)
    seconds = {}
    for stage in graph.stages:
        mesh = graph.mesh(stage.id.unit)
        shape = (1, mesh.dp * mesh.num_microbatches)
        seconds[stage.id] = rng.random(shape), rng.random(shape)
    order = compute_order(graph)
    untied = replace(
        graph, tied_embeddings=False
    )  # the reduction of shared weights holds ranks, which orders leave out
    timeline = simulate(lower(build_1f1b(untied)), Drawn(graph, seconds))
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if isinstance(span.action, Pass):
            ends[span.rank] = max(ends.get(span.rank, 0.0), span.start_s + span.duration_s)
    ends_by_rank = order.rank_ends(seconds, np.zeros(len(graph.edges)))
    assert {rank: float(end[0]) for rank, end in ends_by_rank.items()} == pytest.approx(
        {rank: ends[rank] for rank in ends_by_rank}, rel=1e-9
    )


@given(graphs_of_one_bucket(max_n=4, max_dp=3))
def test_ranks_end_when_the_program_does(graph: StageGraph) -> None:
    if graph.num_groups == 1 and all(mesh.tp == 1 for mesh in graph.meshes):
        holds(graph)


@pytest.mark.parametrize(("pp", "vpp", "n"), [(2, 2, 5), (3, 3, 4), (4, 2, 12)])
def test_ranks_of_interleaved_pipelines_end_when_the_program_does(pp: int, vpp: int, n: int) -> None:
    holds(chain(Unit("llm", pp, num_stages=pp * vpp), n=n))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 200])
@pytest.mark.parametrize("num_values", [1, 2, 4])
def test_distinct_rows_are_those_of_numpy(num_rows: int, num_values: int) -> None:
    table = np.random.default_rng(num_rows).integers(0, num_values, (num_rows, 5))
    for of_type in (table, table * 0.1):
        rows, number = unique_rows(of_type)
        expected, inverse = np.unique(of_type, axis=0, return_inverse=True)
        assert np.array_equal(rows, expected)
        assert np.array_equal(number, inverse.ravel())
