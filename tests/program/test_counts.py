"""Units with different numbers of microbatches: what may flow where, in which order, and without deadlock."""

from itertools import product

import pytest
from hypothesis import given

from mmtrain.errors import ProgramError
from mmtrain.program import build_1f1b, build_program, peak_in_flight_by_stage, simulate
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.graph import Edge, Microbatch, StageId
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.program.graphs import Unit, chain, graphs, unified
from tests.program.interpreter import interpret
from tests.program.timings import Seconds
from tests.tiers import quick_and_long


def compute(graph, rank):
    kinds = {Forward: "F", Backward: "B"}
    return " ".join(f"{kinds[type(a)]}{a.stage.unit[0]}{a.mb.index}" for a in build_1f1b(graph).actions[rank])


def names(microbatches):
    return " ".join(map(str, microbatches))


def test_a_smaller_number_merges_microbatches_and_a_larger_one_splits_them():
    edge = Edge(StageId("vision", 0), StageId("llm", 0))
    merged = chain(Unit("vision", n=2), Unit("llm", dp=2, n=4))
    assert names(merged.sources(edge, Microbatch("llm", 1, 3))) == "vision:0.1"
    assert names(merged.destinations(edge, Microbatch("vision", 0, 1))) == "llm:0.2 llm:1.2 llm:0.3 llm:1.3"
    split = chain(Unit("vision", dp=2, n=6), Unit("llm", n=2))
    assert names(split.sources(edge, Microbatch("llm", 0, 1))) == names(
        Microbatch("vision", replica, index) for index in (3, 4, 5) for replica in (0, 1)
    )
    assert names(split.destinations(edge, Microbatch("vision", 1, 2))) == "llm:0.0"


def test_numbers_that_do_not_divide_meet_in_the_smallest_block_that_both_fill():
    graph = chain(Unit("vision", n=4), Unit("llm", n=6))
    edge = Edge(StageId("vision", 0), StageId("llm", 0))
    for index in range(4):
        expected = (0, 1, 2) if index < 2 else (3, 4, 5)
        assert [d.index for d in graph.destinations(edge, Microbatch("vision", 0, index))] == list(expected)


@given(graphs(max_n=6))
def test_sources_and_destinations_are_two_views_of_the_same_pairs(graph):
    for edge in graph.edges:
        src, dst = graph.mesh(edge.src.unit), graph.mesh(edge.dst.unit)
        sources = [Microbatch(src.unit, r, i) for r in range(src.dp) for i in range(src.num_microbatches)]
        destinations = [Microbatch(dst.unit, r, i) for r in range(dst.dp) for i in range(dst.num_microbatches)]
        pairs = {(s, d) for s in sources for d in graph.destinations(edge, s)}
        assert pairs == {(s, d) for d in destinations for s in graph.sources(edge, d)}
        assert {s for s, _ in pairs} == set(sources)
        assert {d for _, d in pairs} == set(destinations)


def test_a_merged_encoder_microbatch_runs_when_the_llm_needs_it_and_returns():
    graph = chain(Unit("vision", n=2), Unit("llm", n=6))
    assert compute(graph, 0) == "Fv0 Fv1 Bv0 Bv1"
    graph = chain(Unit("vision", n=3), Unit("llm", n=6))
    assert compute(graph, 0) == "Fv0 Fv1 Bv0 Fv2 Bv1 Bv2"


def test_split_encoder_microbatches_run_ahead_by_those_of_one_llm_microbatch():
    graph = chain(Unit("vision", n=8), Unit("llm", n=4))
    assert compute(graph, 0) == "Fv0 Fv1 Fv2 Fv3 Bv0 Fv4 Bv1 Fv5 Bv2 Fv6 Bv3 Fv7 Bv4 Bv5 Bv6 Bv7"


def test_a_merged_generator_makes_the_llm_run_ahead_by_a_block():
    graph = chain(Unit("llm", n=6), Unit("generator", n=3))
    assert compute(graph, 1) == "Fg0 Bg0 Fg1 Bg1 Fg2 Bg2"
    assert compute(graph, 0) == "Fl0 Fl1 Fl2 Fl3 Bl0 Fl4 Bl1 Fl5 Bl2 Bl3 Bl4 Bl5"


def test_a_position_before_another_of_its_unit_runs_ahead_by_one_of_its_own():
    graph = chain(Unit("vision", 2, n=4), Unit("llm", n=8))
    assert compute(graph, 1) == "Fv0 Fv1 Bv0 Fv2 Bv1 Fv3 Bv2 Bv3"
    assert compute(graph, 0) == "Fv0 Fv1 Fv2 Bv0 Fv3 Bv1 Bv2 Bv3"


def test_a_mixed_stage_runs_the_encoder_with_the_first_and_the_last_of_a_block():
    assert compute(unified(2, n=4, vision_n=2), 0) == "Fv0 Fl0 Fl1 Bl0 Fv1 Fl2 Bl1 Bv0 Fl3 Bl2 Bl3 Bv1"
    assert compute(unified(1, n=2, vision_n=4), 0) == "Fv0 Fv1 Fl0 Bl0 Bv0 Bv1 Fv2 Fv3 Fl1 Bl1 Bv2 Bv3"


@pytest.mark.parametrize(("pp", "chunks", "vision_n"), [*product((1, 2, 3), (1, 2), (1, 2, 3, 4, 12, 24))])
def test_the_llm_has_the_same_order_with_any_encoders(pp, chunks, vision_n):
    llm = Unit("llm", pp, num_stages=pp * chunks)
    equal = build_1f1b(chain(Unit("vision"), Unit("audio", 2), llm, n=12)).actions
    other = build_1f1b(chain(Unit("vision", n=vision_n), Unit("audio", 2, n=6), llm, n=12)).actions
    for rank in range(3, 3 + pp):
        assert other[rank] == equal[rank]


@given(graphs(max_n=9))
def test_in_flight_microbatches_are_predicted_exactly(graph):
    program = build_program(graph)
    in_flight = in_flight_microbatches(graph)
    for actions in program.actions.values():
        for stage, count in peak_in_flight_by_stage(graph, actions).items():
            assert count == (in_flight[stage] if graph.needs_backward(stage) else 1)


GRID = [*product((1, 2, 3, 4, 6, 12), (1, 2), ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2)), (1, 2), ("1f1b", "coarse"))]


@pytest.mark.parametrize(("vision_n", "tp", "dp", "chunks", "kind"), quick_and_long(GRID, every=7))
def test_a_grid_of_meshes_and_numbers_runs_to_its_end(vision_n, tp, dp, chunks, kind):
    vision, llm = Unit("vision", 2, dp[0], n=vision_n), Unit("llm", 2, dp[1], tp, num_stages=2 * chunks)
    program = build_program(chain(vision, llm, n=4), kind=kind)
    assert interpret(program.graph, program.actions).problems == []


@pytest.mark.parametrize("share", [1, 1 / 12], ids=["as fast", "faster"])
@pytest.mark.parametrize(("pp", "vision_n"), [*product((1, 2, 4), (1, 2, 3, 6, 12, 24, 36))])
def test_an_encoder_never_keeps_the_llm_waiting_once_it_runs(pp, vision_n, share):
    """The step takes the first block's forward, the LLM's pipeline as if alone, and the last block's backward."""
    graph = chain(Unit("vision", n=vision_n), Unit("llm", pp), n=12)
    vision = share * 12 / vision_n
    block = max(vision, share)
    timeline = simulate(build_program(graph), Seconds(vision=vision, llm=1))
    assert timeline.step_time_s == pytest.approx(block + 3 * (12 + pp - 1) + 2 * block)


@pytest.mark.parametrize(
    ("pp", "chunks", "vision_n"), quick_and_long(product((2, 4, 8), (2, 3), (6, 12, 24, 48)), every=5)
)
def test_an_encoder_as_fast_as_an_interleaved_llm_keeps_up_with_its_chunks(pp, chunks, vision_n):
    """The LLM waits only while the first group of microbatches comes at the encoder's speed, and the last returns."""
    graph = chain(Unit("vision", n=vision_n), Unit("llm", pp, num_stages=pp * chunks), n=24)
    vision = chunks * 24 / vision_n
    block = max(vision, chunks)
    alone, first_and_last = 3 * (24 * chunks + pp - 1), 3 * (pp - 1) * (chunks - 1)
    slack = 1 + 1e-9
    assert (
        simulate(build_program(graph), Seconds(vision=vision, llm=1)).step_time_s
        <= (3 * block + alone + first_and_last) * slack
    )


@pytest.mark.parametrize(
    ("other", "pp", "chunks", "merged"),
    quick_and_long(product(("vision", "generator"), (1, 2, 3, 4), (1, 2, 3), (2, 3, 4)), every=5),
)
def test_a_merged_unit_takes_the_time_of_one_that_merges_nothing(other, pp, chunks, merged):
    units = [Unit("llm"), Unit(other, pp, num_stages=pp * chunks, n=12 // merged)][:: 1 if other == "generator" else -1]
    time = simulate(build_program(chain(*units, n=12)), Seconds(llm=0.01, **{other: 1})).step_time_s
    equal = simulate(build_program(chain(*units, n=12 // merged)), Seconds(llm=0.01 * merged, **{other: 1})).step_time_s
    assert time == pytest.approx(equal)


@given(graphs(max_n=6))
def test_any_order_can_be_written_as_text(graph):
    order = {rank: [action_to_text(a) for a in actions] for rank, actions in build_1f1b(graph).actions.items()}
    assert build_program(graph, kind="explicit", order=order).actions == build_program(graph).actions


def test_a_backward_before_its_gradient_is_rejected():
    """One encoder microbatch feeds both of the LLM's; its backward is placed after the first of them."""
    graph = unified(1, n=2, vision_n=1)
    order = ["F vision.0 vision:0.0", "F llm.0 llm:0.0", "B llm.0 llm:0.0"]
    early = ["B vision.0 vision:0.0", "F llm.0 llm:0.1", "B llm.0 llm:0.1"]
    with pytest.raises(ProgramError, match=r"`B vision\.0 vision:0\.0` .* comes before `B llm\.0 llm:0\.1`"):
        build_program(graph, kind="explicit", order={0: [*order, *early]})
    build_program(graph, kind="explicit", order={0: [*order, *early[1:], early[0]]})


def test_a_rank_cannot_wait_for_a_block_that_waits_for_it():
    """The LLM returns its first microbatch before it runs the second, which the generator's block needs."""
    graph = chain(Unit("llm"), Unit("generator", n=1), n=2)
    order = {
        0: ["F llm.0 llm:0.0", "B llm.0 llm:0.0", "F llm.0 llm:0.1", "B llm.0 llm:0.1"],
        1: ["F generator.0 generator:0.0", "B generator.0 generator:0.0"],
    }
    with pytest.raises(ProgramError, match=r"deadlock: .*`B llm\.0 llm:0\.0`"):
        build_program(graph, kind="explicit", order=order)
