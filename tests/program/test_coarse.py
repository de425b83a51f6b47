"""The coarse colocated order: encoder forwards before the LLM's pipeline, encoder backwards after it."""

from dataclasses import replace

import pytest
from hypothesis import given

from mmtrain.program import build_1f1b, build_coarse, build_program, peak_in_flight_by_stage, simulate
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.graph import StageGraph, StageId
from tests.program.graphs import Unit, chain, graphs
from tests.program.interpreter import interpret
from tests.program.test_simulate import Given


def encoder_on_every_rank(pp: int, n: int, **more: object) -> StageGraph:
    """Return an LLM pipeline with an encoder replica on each of its ranks."""
    ranks = tuple(range(pp))
    return chain(Unit("vision", 1, pp, ranks=ranks), Unit("llm", pp, ranks=ranks), n=n, **more)  # type: ignore[arg-type]


def order(graph: StageGraph, rank: int) -> str:
    actions = build_coarse(graph).actions[rank]
    return " ".join(f"{'F' if isinstance(a, Forward) else 'B'}{a.stage.unit[0]}{a.mb.index}" for a in actions)


def test_the_llms_order_is_untouched_and_encoders_work_around_it():
    graph = encoder_on_every_rank(2, n=3)
    assert order(graph, 0) == "Fv0 Fv1 Fv2 Fl0 Fl1 Bl0 Fl2 Bl1 Bl2 Bv0 Bv1 Bv2"
    assert order(graph, 1) == "Fv0 Fv1 Fv2 Fl0 Bl0 Fl1 Bl1 Fl2 Bl2 Bv0 Bv1 Bv2"


def test_encoders_that_share_ranks_may_have_pipelines_of_their_own():
    """Put vision replicas on both ranks of a pipeline of audio, whose second rank begins with vision all the same."""
    ranks = (0, 1)
    graph = chain(Unit("vision", 1, 2, ranks=ranks), Unit("audio", 2, ranks=ranks), Unit("llm", 2, ranks=ranks), n=2)
    for rank in ranks:
        assert order(graph, rank).startswith("Fv0 Fv1 Fa0 Fa1 Fl0")
        assert order(graph, rank).endswith("Bv0 Bv1 Ba0 Ba1")
    program = build_program(graph, kind="coarse")
    assert interpret(graph, {rank: program.for_rank(rank) for rank in ranks}).problems == []


@given(graphs())
def test_any_graph_runs_to_its_end_in_this_order(graph):
    program = build_program(graph, kind="coarse")
    all_actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    assert interpret(graph, all_actions).problems == []


def test_a_frozen_llm_still_sends_gradients_to_the_encoders():
    graph = encoder_on_every_rank(2, n=2)
    frozen = replace(graph, stages=tuple(replace(s, trainable=s.id.unit == "vision") for s in graph.stages))
    assert order(frozen, 0) == order(graph, 0)
    frozen = replace(graph, stages=tuple(replace(s, trainable=s.id.unit == "llm") for s in graph.stages))
    assert order(frozen, 0) == "Fv0 Fv1 Fl0 Fl1 Bl0 Bl1"


@pytest.mark.parametrize("pp", [2, 4])
def test_encoders_never_stall_the_pipeline(pp):
    """The step takes the encoders' forwards, 1F1B of the LLM alone, and the encoders' backwards."""
    n = 8
    seconds = {"forward": {"vision.0": 0.5}, "backward": {"vision.0": 1.0}}
    for k in range(pp):
        seconds["forward"][f"llm.{k}"], seconds["backward"][f"llm.{k}"] = 1.0, 2.0
    graph = encoder_on_every_rank(pp, n)
    coarse = simulate(build_program(graph, kind="coarse"), Given(**seconds)).step_time_s
    assert coarse <= n * 0.5 + 3 * (n + pp - 1) + n * 1.0
    assert coarse < simulate(build_program(graph), Given(**seconds)).step_time_s


def test_all_encoder_activations_live_at_once():
    graph = encoder_on_every_rank(2, n=5)
    coarse = peak_in_flight_by_stage(graph, build_program(graph, kind="coarse").actions[0])
    assert coarse == {StageId("vision", 0): 5, StageId("llm", 0): 2}


def test_units_apart_keep_the_order_of_their_own_pipeline():
    graph = chain(Unit("vision", 2), Unit("llm", 2, num_stages=4), n=4)
    for rank in (2, 3):
        assert build_coarse(graph).actions[rank] == build_1f1b(graph).actions[rank]
    assert not any(
        isinstance(before, Backward) and isinstance(after, Forward)
        for rank in (0, 1)
        for before, after in zip(build_coarse(graph).actions[rank], build_coarse(graph).actions[rank][1:], strict=False)
    )
