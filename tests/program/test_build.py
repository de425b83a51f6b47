"""Builders and lowering: every graph gets a program that an independent interpreter can run."""

import pytest
from hypothesis import given

from mmtrain.program import build_1f1b, build_program, peak_in_flight_by_stage
from mmtrain.program.ir.actions import Backward, Forward, Recv, Send, Share
from mmtrain.program.ir.graph import StageId
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.program.graphs import Unit, chain, graphs, unified
from tests.program.interpreter import interpret


def compute(graph, rank):
    kinds = {Forward: "F", Backward: "B"}
    return " ".join(f"{kinds[type(a)]}{a.stage.unit[0]}{a.mb.index}" for a in build_1f1b(graph).actions[rank])


@given(graphs(max_n=5, max_dp=4))
def test_every_program_runs_to_its_end_on_all_ranks(graph):
    program = build_program(graph)
    all_actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    assert interpret(graph, all_actions).problems == []


def test_1f1b_of_a_text_model():
    graph = chain(Unit("llm", pp=3), n=4)
    assert compute(graph, 0) == "Fl0 Fl1 Fl2 Bl0 Fl3 Bl1 Bl2 Bl3"
    assert compute(graph, 1) == "Fl0 Fl1 Bl0 Fl2 Bl1 Fl3 Bl2 Bl3"
    assert compute(graph, 2) == "Fl0 Bl0 Fl1 Bl1 Fl2 Bl2 Fl3 Bl3"


def test_more_stages_than_microbatches():
    assert compute(chain(Unit("llm", pp=4), n=2), 0) == "Fl0 Fl1 Bl0 Bl1"


def test_a_rank_with_encoder_and_llm_runs_both_stages_of_a_wave():
    assert compute(unified(2, n=3), 0) == "Fv0 Fl0 Fv1 Fl1 Bl0 Bv0 Fv2 Fl2 Bl1 Bv1 Bl2 Bv2"


def test_a_frozen_encoder_only_runs_forward():
    graph = chain(Unit("vision", trainable=(False,)), Unit("llm"), n=3)
    assert compute(graph, 0) == "Fv0 Fv1 Fv2"
    program = build_program(graph)
    assert not any(isinstance(a, Recv) for a in program.actions[0])
    assert not any(isinstance(a, Send) for a in program.actions[1])


@pytest.mark.parametrize(("encoders", "llms"), [(1, 1), (2, 3), (3, 2), (1, 4), (4, 1), (4, 6)])
def test_any_ratio_of_replicas(encoders, llms):
    graph = chain(Unit("vision", 2, encoders), Unit("llm", 2, llms), n=3)
    program = build_program(graph)
    group = graph.num_groups
    first_llm = program.actions[2 * encoders]
    received = [a for a in first_llm if isinstance(a, Recv) and a.payload == "activation"]
    assert len(received) == 3 * encoders // group
    returned = [a for a in first_llm if isinstance(a, Send) and a.payload == "gradient"]
    assert [(a.src, a.dst) for a in returned] == [(a.src, a.dst) for a in received]


def test_positions_on_the_longest_path_are_in_flight():
    graph = chain(Unit("vision", 3), Unit("audio"), Unit("llm", 2), n=9)
    in_flight = {str(stage): count for stage, count in in_flight_microbatches(graph).items()}
    assert in_flight == {"vision.0": 5, "vision.1": 4, "vision.2": 3, "audio.0": 3, "llm.0": 2, "llm.1": 1}


def test_ranks_visited_in_no_regular_round_run_one_wave_at_a_time():
    graph = chain(Unit("vision", 3, ranks=(0, 1, 2)), Unit("llm", 4, ranks=(2, 1, 0, 3)), n=3)
    in_flight = {str(s): count for s, count in in_flight_microbatches(graph).items()}
    assert in_flight == dict.fromkeys(("vision.0", "vision.1", "vision.2", "llm.0", "llm.1", "llm.2"), 2) | {"llm.3": 1}
    assert compute(graph, 0) == "Fv0 Fl0 Fv1 Fl1 Bl0 Bv0 Fv2 Fl2 Bl1 Bv1 Bl2 Bv2"


def test_receives_are_posted_one_compute_action_ahead():
    actions = build_program(chain(Unit("llm", pp=2), n=2)).actions[1]
    forwards = [i for i, a in enumerate(actions) if isinstance(a, Forward)]
    receives = [i for i, a in enumerate(actions) if isinstance(a, Recv)]
    assert receives[0] < forwards[0]
    assert actions[receives[1] + 1] == Backward(StageId("llm", 1), actions[forwards[0]].mb)
    assert receives[1] == forwards[0] + 1


def test_in_flight_microbatches_follow_the_longest_path():
    program = build_program(chain(Unit("vision", 2), Unit("llm", 2), n=6))
    counts = [peak_in_flight_by_stage(program.graph, program.actions[rank]) for rank in range(4)]
    assert [next(iter(c.values())) for c in counts] == [4, 3, 2, 1]


def test_same_tp_group_needs_no_messages_between_units():
    for tp in (1, 2):
        actions = build_program(unified(1, tp=tp)).actions[0]
        assert not any(isinstance(a, Send | Recv | Share) for a in actions)


def test_tp_groups_that_differ_in_tp_but_start_on_the_same_rank_share_without_a_message():
    graph = chain(Unit("vision", ranks=(0,)), Unit("llm", tp=2, ranks=(0, 1)), n=1)
    program = build_program(graph)
    assert not any(isinstance(a, Send | Recv) for actions in program.actions.values() for a in actions)
    assert [str(a.mb) for a in program.actions[1] if isinstance(a, Share)] == ["llm:0.0"]
    reverse = chain(Unit("vision", tp=2, ranks=(0, 1)), Unit("llm", ranks=(0,)), n=1)
    shared = [a for a in build_program(reverse).actions[1] if isinstance(a, Share)]
    assert [(str(a.mb), a.payload) for a in shared] == [("vision:0.0", "gradient")]


@given(graphs())
def test_no_stage_holds_more_microbatches_than_are_counted(graph):
    counted = in_flight_microbatches(graph)
    for actions in build_1f1b(graph).actions.values():
        for stage, most in peak_in_flight_by_stage(graph, actions).items():
            assert most <= counted[stage]
