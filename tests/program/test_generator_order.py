"""A generator on the LLM's ranks, under a mesh of its own: its passes between the LLM's forwards and backwards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.program import action_to_text, build_coarse, build_program, peak_in_flight_by_stage, simulate
from mmtrain.program.ir.actions import Forward
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.schedules.builder import in_flight_microbatches
from mmtrain.program.schedules.generator_order import order_with_generator
from tests.program.graphs import Unit, chain
from tests.program.interpreter import interpret
from tests.program.test_simulate import Given


def generator_on_every_rank(pp: int, n: int, generator_n: int = 0, num_stages: int = 0) -> StageGraph:
    """Return an LLM pipeline with a generator replica on each of its ranks."""
    ranks = tuple(range(pp))
    llm = Unit("llm", pp, ranks=ranks, num_stages=num_stages)
    return chain(llm, Unit("generator", 1, pp, ranks=ranks, n=generator_n), n=n)


@st.composite
def colocated(draw: st.DrawFn) -> StageGraph:
    """Draw an LLM with an encoder or without, and a generator on its ranks whose tp and pp divide the LLM's."""
    pp, tp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    n = draw(st.sampled_from([1, 2, 4, 6]))
    own_pp = draw(st.sampled_from([p for p in range(1, pp + 1) if pp % p == 0]))
    own_tp = draw(st.sampled_from([t for t in (1, 2) if tp % t == 0]))

    def on_llm(name: str, own_tp: int, own_pp: int, **more: object) -> Unit:
        """Return a unit with a replica on each block of own_pp x own_tp ranks of an LLM replica."""
        grid = np.arange(pp * tp * dp).reshape(pp // own_pp, own_pp, dp, tp // own_tp, own_tp)
        ranks = tuple(grid.transpose(1, 2, 0, 3, 4).ravel().tolist())
        return Unit(name, own_pp, len(ranks) // (own_pp * own_tp), own_tp, ranks=ranks, **more)  # type: ignore[arg-type]

    own_pp = draw(st.sampled_from([p for p in range(1, pp + 1) if pp % p == 0]))
    own_tp = draw(st.sampled_from([t for t in (1, 2) if tp % t == 0]))
    trainable = tuple(draw(st.booleans()) for _ in range(own_pp))
    generator = on_llm("generator", own_tp, own_pp, trainable=trainable, n=draw(st.sampled_from([0, 1, 2])))
    llm = on_llm("llm", tp, pp, num_stages=pp * draw(st.sampled_from([1, 1, 2])))
    vision = [on_llm("vision", 1, 1)] if draw(st.booleans()) else []
    return chain(*vision, llm, generator, n=n, tied=draw(st.booleans()))


def order(graph: StageGraph, rank: int) -> str:
    actions = build_coarse(graph).actions[rank]
    return " ".join(f"{'F' if isinstance(a, Forward) else 'B'}{a.stage.unit[0]}{a.mb.index}" for a in actions)


def test_images_are_drawn_between_the_llms_forward_and_backward():
    graph = generator_on_every_rank(2, n=3)
    assert order(graph, 1) == "Fl0 Fg0 Bg0 Fl1 Fg1 Bg1 Bl0 Fl2 Fg2 Bg2 Bl1 Bl2"
    assert order(graph, 0) == "Fl0 Fl1 Fg0 Bg0 Fl2 Fg1 Bg1 Bl0 Fg2 Bg2 Bl1 Bl2"


def test_a_rank_has_one_order_whichever_are_asked_for():
    graph = generator_on_every_rank(4, n=4)
    for rank in range(4):
        assert build_coarse(graph, [rank]).actions[rank] == build_coarse(graph).actions[rank]


def test_a_generator_that_merges_microbatches_lets_the_llm_run_ahead():
    graph = generator_on_every_rank(2, n=4, generator_n=2)
    assert order(graph, 1).startswith("Fl0 Fl1 Fg0 Bg0 ")
    program = build_program(graph, kind="coarse")
    for rank in (0, 1):
        peak = peak_in_flight_by_stage(graph, program.for_rank(rank))
        assert {stage: count for stage, count in in_flight_microbatches(graph).items() if stage in peak} == peak


@given(colocated())
def test_any_graph_runs_to_its_end(graph):
    program = build_program(graph, kind="coarse")
    all_actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    assert interpret(graph, all_actions).problems == []


@pytest.mark.parametrize("pp", [2, 4])
def test_a_step_takes_the_llms_pipeline_and_a_share_of_the_generator(pp):
    """Divide the generator's work evenly: no rank waits for another one's share of it."""
    n = 8
    seconds = {"forward": {"generator.0": 0.25}, "backward": {"generator.0": 0.5}}
    for k in range(pp):
        seconds["forward"][f"llm.{k}"], seconds["backward"][f"llm.{k}"] = 1.0, 2.0
    graph = generator_on_every_rank(pp, n)
    step_s = simulate(build_program(graph, kind="coarse"), Given(**seconds)).step_time_s
    assert step_s == pytest.approx(3 * (n + pp - 1) + n * 0.75)


def test_durations_decide_where_passes_lie():
    """Give passes of a generator a twentieth of the LLM's time, and not the same: the step is shorter."""
    graph, ranks = generator_on_every_rank(8, n=8), list(range(8))
    seconds = {"forward": {"generator.0": 0.05}, "backward": {"generator.0": 0.1}}
    for rank in ranks:
        seconds["forward"][f"llm.{rank}"], seconds["backward"][f"llm.{rank}"] = 1.0, 2.0
    orders = order_with_generator(
        graph, ranks, lambda stage, kind: seconds["forward" if kind == "F" else "backward"][str(stage)]
    )
    lines = {rank: [action_to_text(action) for action in order] for rank, order in orders.items()}
    timing = Given(**seconds)
    planned = simulate(build_program(graph, kind="explicit", order=lines), timing)
    assert planned.step_time_s < simulate(build_program(graph, kind="coarse"), timing).step_time_s
    assert planned.step_time_s == pytest.approx(3 * (8 + 7) + 8 * 0.15)
