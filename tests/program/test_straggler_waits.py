"""What a step loses to slower ranks: expected maxima against drawn ones, and what each placement pays."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mmtrain.costs.time_spread import TimeSpread, expected_maximum
from mmtrain.program import build_program, simulate
from mmtrain.program.ir.actions import ReduceGrads
from mmtrain.program.simulation.straggler_waits import StragglerWaits, straggler_waits
from tests.program.graphs import Unit, chain
from tests.program.test_simulate import Given

SPREAD = TimeSpread(ranks=0.02, layers=0.01)


@pytest.mark.parametrize("count", [2, 8, 100])
def test_expected_maximum_is_that_of_drawn_numbers(count):
    drawn = np.random.default_rng(0).standard_normal((20_000, count)).max(axis=1)
    assert expected_maximum(count) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / math.sqrt(len(drawn)))
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-5)
    assert expected_maximum(1) == 0.0


def drawn_1f1b_steps(num_ranks, num_microbatches, deviation, num_draws=200):
    """Return the mean of drawn steps, forwards of 1 and backwards of 2 on average."""
    rng = np.random.default_rng(1)
    ends, clocks, orders = {}, [np.zeros(num_draws)] * num_ranks, []
    for rank in range(num_ranks):
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        order = [("F", i) for i in range(ahead)]
        for i in range(ahead, num_microbatches):
            order += [("F", i), ("B", i - ahead)]
        orders.append(order + [("B", i) for i in range(num_microbatches - ahead, num_microbatches)])
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                kind, i = order[0]
                source = (rank - 1, "F", i) if kind == "F" else (rank + 1, "B", i)
                if kind == "B" and rank == num_ranks - 1:
                    source = (rank, "F", i)
                if source[0] >= 0 and source not in ends:
                    break
                mean = 1.0 if kind == "F" else 2.0
                seconds = mean * (1 + deviation * rng.standard_normal(num_draws))
                clocks[rank] = np.maximum(clocks[rank], ends.get(source, 0.0)) + seconds
                ends[rank, kind, i] = clocks[rank]
                order.pop(0)
    return np.maximum.reduce(clocks).mean()


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 32), (8, 32)])
def test_a_pipeline_loses_what_drawn_steps_lose(num_ranks, num_microbatches):
    """Its stages have two layers; both losses lie within a factor of 1.6."""
    graph = chain(Unit("llm", num_ranks), n=num_microbatches)
    waits = straggler_waits(graph, TimeSpread(layers=0.05))
    even = 3.0 * (num_microbatches + num_ranks - 1)
    drawn = drawn_1f1b_steps(num_ranks, num_microbatches, 0.05 / math.sqrt(2)) / even - 1
    assert 1 / 1.6 < (waits.passes["llm"] - 1) / drawn < 1.6


def step(graph, waits):
    names = [str(stage.id) for stage in graph.stages]
    times = Given(dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0), collective_s=0.5)
    return simulate(build_program(graph), times, graph.num_groups, waits)


@pytest.mark.parametrize("unit", [Unit("llm", 1, 8), Unit("llm", 4, 2), Unit("llm", 2, 2, 2), Unit("llm", 1, 1, 8)])
def test_every_placement_waits_for_the_slowest_of_all_ranks(unit):
    waits = straggler_waits(chain(unit, n=4), TimeSpread(ranks=0.02))
    assert waits.passes["llm"] * waits.groups == pytest.approx(1 + 0.02 * expected_maximum(8))
    in_group = unit.tp * unit.pp
    assert waits.passes["llm"] == pytest.approx(1 + 0.02 * expected_maximum(in_group))


def test_ranks_that_share_layers_wait_at_every_layer_and_others_once_a_step():
    def loss(**sizes):
        graph = chain(Unit("llm", **sizes), n=32)
        waits = straggler_waits(graph, TimeSpread(layers=0.01))
        return waits.passes["llm"] * waits.groups - 1

    assert loss(tp=8) == pytest.approx(0.01 * math.sqrt(2) * expected_maximum(8))
    assert loss(dp=8) == pytest.approx(0.01 / math.sqrt(2 * 2 * 32) * expected_maximum(8))
    assert loss(tp=8) > loss(pp=8) > loss(dp=8) > loss() == 0.0


def test_costs_that_hold_waits_are_not_charged_twice():
    graph = chain(Unit("llm", 1, 2, 4))
    ratio = 1 + SPREAD.ranks * expected_maximum(8)
    modelled = straggler_waits(graph, SPREAD, ratio)
    measured = straggler_waits(graph, SPREAD, ratio, costs_hold_tp_waits=True)
    assert modelled.passes["llm"] > measured.passes["llm"]
    assert measured.passes["llm"] * ratio == pytest.approx(1 + SPREAD.ranks * expected_maximum(4))


def test_replica_groups_wait_before_their_reduction():
    """Parameters are gathered in 0.5 s, two microbatches of 3 s follow, then the reduction and the step, 0.5 s each."""
    graph = chain(Unit("llm", 1, 2), n=2)
    even, late = step(graph, None), step(graph, StragglerWaits({"llm": 1.1}, 1.05))
    assert even.step_time_s == pytest.approx(7.5)
    assert late.step_time_s == pytest.approx((0.5 + 6.0 * 1.1) * 1.05 + 1.0)
    assert late.bubbles[0]["imbalance"] == pytest.approx(7.1 * 0.05)
    [reduction] = {span.start_s for span in late.spans if isinstance(span.action, ReduceGrads)}
    assert reduction == pytest.approx(7.1 * 1.05)
    assert sum(span.duration_s for span in late.critical_path) == pytest.approx(late.step_time_s)


def test_a_step_that_reduces_nothing_waits_too():
    graph = chain(Unit("vision", 1, 2, trainable=(False,)), Unit("llm", 1, 2, trainable=(False,)))
    even, late = step(graph, None), step(graph, StragglerWaits({"vision": 1.0, "llm": 1.0}, 1.5))
    assert late.step_time_s - 0.5 == pytest.approx(1.5 * (even.step_time_s - 0.5))


def test_equally_fast_ranks_wait_for_nothing():
    graph = chain(Unit("vision"), Unit("llm", 2, 2, 2), n=4)
    waits = straggler_waits(graph, TimeSpread())
    assert not waits.has_any
    assert step(graph, waits).step_time_s == step(graph, None).step_time_s
    with_ratio = replace(waits, passes=dict.fromkeys(waits.passes, 1.01))
    assert with_ratio.has_any


def test_ranks_that_share_weights_lose_what_drawn_steps_lose():
    """A layer's weights are gathered in 0.7 of its compute, once every rank has begun the layer before."""
    num_ranks, num_layers, gather_s, rng = 8, 64, 0.7, np.random.default_rng(2)

    def drawn(spread):
        pace = 1 + spread.ranks * rng.standard_normal((200, num_ranks))
        start = np.zeros((200, num_ranks))
        for _ in range(num_layers):
            end = start + pace * (1 + spread.layers * rng.standard_normal((200, num_ranks)))
            start = np.maximum(end, start.max(axis=1, keepdims=True) + gather_s)
        return end.max(axis=1).mean() / num_layers - 1

    graph = chain(Unit("llm", 1, num_ranks), n=num_layers // 4)  # two layers, forward and backward
    mesh = replace(graph.meshes[0], shard=num_ranks)
    graph = replace(graph, meshes=(mesh,))
    for spread in (TimeSpread(layers=0.02), TimeSpread(ranks=0.02)):
        waits = straggler_waits(graph, spread)
        assert waits.groups == 1.0
        assert waits.passes["llm"] - 1 == pytest.approx(drawn(spread), rel=0.15)
