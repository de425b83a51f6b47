"""Forwards and backwards in parts: the checker, the simulator and the memory count against the interpreter."""

from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from mmtrain.errors import ProgramError
from mmtrain.program import (
    Fill,
    GatherParams,
    Partial,
    Program,
    build_program,
    check_program,
    peak_in_flight_by_stage,
    program_from_text,
    program_to_text,
    simulate,
)
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.graph import Microbatch, StageId
from mmtrain.program.ir.segments import expand_all
from tests.program.graphs import Unit, chain
from tests.program.interpreter import interpret
from tests.program.parts import cut_programs, deeper, filled_programs
from tests.program.test_coarse import encoder_on_every_rank
from tests.program.test_simulate import Given


@given(st.one_of(cut_programs(), filled_programs()))
def test_programs_in_parts_round_trip(program):
    assert program_from_text(program_to_text(program), program.graph) == program


@given(cut_programs())
def test_a_program_that_runs_still_runs_when_cut_into_parts(program):
    assert interpret(program.graph, program.actions).problems == []
    check_program(program)


@st.composite
def mutations(draw: st.DrawFn) -> Program:
    """Draw a program in parts with one of its parts, or any action, deleted, doubled, moved or altered on one rank."""
    program = draw(st.one_of(cut_programs(max_n=2), filled_programs(max_n=2)))
    rank = draw(st.sampled_from(sorted(program.actions)))
    actions = list(program.actions[rank])
    inside = [position for position, a in enumerate(actions) if isinstance(a, Partial | Fill)]
    position = draw(st.sampled_from(inside or range(len(actions))))
    how = draw(
        st.sampled_from(["nothing", "nothing", "nothing", "delete", "duplicate", "swap", "move", "alter", "spill"])
    )
    action = actions[position]
    if how == "delete":
        del actions[position]
    elif how == "duplicate":
        actions.insert(draw(st.integers(0, len(actions))), action)
    elif how == "swap":
        other = draw(st.integers(0, len(actions) - 1))
        actions[position], actions[other] = actions[other], actions[position]
    elif how == "move":
        actions.insert(draw(st.integers(0, len(actions) - 1)), actions.pop(position))
    elif how == "alter" and isinstance(action, Partial):
        hi = draw(st.integers(action.lo + 1, action.hi + 1))
        actions[position] = replace(action, hi=hi, kind=draw(st.sampled_from("FB")))
    elif how == "spill" and isinstance(action, Fill):  # parts of it are lost, doubled or come in another order
        inner = draw(st.lists(st.sampled_from(action.partials), min_size=1, max_size=3))
        actions[position] = replace(action, partials=tuple(inner))
    return replace(program, actions={**program.actions, rank: tuple(actions)})


@given(mutations())
def test_rejects_exactly_the_programs_that_the_interpreter_cannot_run(program):
    problems = interpret(program.graph, program.actions).problems
    fills = any(isinstance(a, Fill) for todo in program.actions.values() for a in todo)
    event(f"{'fills' if fills else 'parts'} that {'fail' if problems else 'run'}")
    if problems:
        with pytest.raises(ProgramError, match="program rejected"):
            check_program(program)
    else:
        check_program(program)


def test_ranks_that_gather_and_compute_in_two_orders_are_rejected() -> None:
    """The replicas of one unit are the tensor-parallel group of another, and one of them gathers too late."""
    graph = chain(Unit("vision", tp=2, ranks=(0, 1)), Unit("llm", dp=2, ranks=(0, 1)), n=1)
    program = build_program(graph)
    first = list(program.actions[0])
    gather = next(a for a in first if isinstance(a, GatherParams) and a.unit == "llm")
    forward = next(position for position, a in enumerate(first) if isinstance(a, Forward))
    first.remove(gather)
    first.insert(forward, gather)
    late = replace(program, actions={**program.actions, 0: tuple(first)})
    [problem] = interpret(graph, late.actions).problems
    assert problem.startswith("[0, 1]: not all have begun as many reductions and gathers before Forward")
    with pytest.raises(ProgramError, match="ranks 0 and 1 share the group"):
        check_program(late)
    assert interpret(graph, program.actions).problems == []
    check_program(program)


@given(cut_programs(), st.integers(0, 2**32))
def test_programs_in_parts_take_the_time_of_the_interpreter(program, seed):
    def seconds(action):
        if not isinstance(action, Forward | Backward | Partial):
            return 0.0
        share = action.hi - action.lo if isinstance(action, Partial) else 4
        return float(share * (hash((seed, action.stage.index, action.mb.replica, action.mb.index)) % 5))

    groups = program.graph.num_groups
    timeline = simulate(program, Given({}, {}, rule=seconds), num_groups=groups)
    all_actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    assert timeline.step_time_s == max(interpret(program.graph, all_actions, seconds).clock.values())
    for rank, bubbles in timeline.bubbles.items():
        busy = sum(s.duration_s for s in timeline.spans if s.rank == rank and isinstance(s.action, Forward | Backward))
        busy += sum(s.duration_s for s in timeline.spans if s.rank == rank and isinstance(s.action, Partial))
        assert sum(bubbles.values()) == timeline.step_time_s - busy


# Two ranks of an LLM pipeline, an encoder replica on each; stages of three layers; two waves.
GRAPH = deeper(encoder_on_every_rank(2, n=2), 3)
ORDER = {
    rank: [
        f"F vision.0 vision:{rank}.0",
        f"F llm.{rank} llm:0.0 |1| PF vision.0 vision:{rank}.1 0:2",
        f"PF vision.0 vision:{rank}.1 2:3",
        *([f"F llm.{rank} llm:0.1"] if rank == 0 else []),
        f"B llm.{rank} llm:0.0",
        *([f"F llm.{rank} llm:0.1"] if rank == 1 else []),
        *([f"B llm.1 llm:0.1 |2| PB vision.0 vision:{rank}.0 1:3"] if rank == 1 else []),
        *([f"PB llm.0 llm:0.1 1:3 |2| PB vision.0 vision:{rank}.0 1:3"] if rank == 0 else []),
        *(["PB llm.0 llm:0.1 0:1"] if rank == 0 else []),
        f"PB vision.0 vision:{rank}.0 0:1",
        f"B vision.0 vision:{rank}.1",
    ]
    for rank in (0, 1)
}


def changed(rank: int, old: str, new: str) -> dict[int, list[str]]:
    assert sum(old in line for line in ORDER[rank]) >= 1
    lines = [line.replace(old, new) for line in ORDER[rank]]
    return ORDER | {rank: [line for line in lines if line]}


def test_encoder_work_in_the_gaps_of_the_llm():
    """Data that a partial in a gap reads arrives before the host; data that it produces is sent after the host."""
    program = build_program(GRAPH, kind="explicit", order=ORDER)
    assert interpret(GRAPH, program.actions).problems == []
    tasks = [a for a in program.actions[0] if isinstance(a, Fill)]
    assert [type(a.host) for a in tasks] == [Forward, Partial]
    times = Given({}, {}, rule=lambda a: float(a.hi - a.lo if isinstance(a, Partial) else 3))
    spans = simulate(program, times).spans
    host, inside, rest = [s for s in spans if s.rank == 0 and isinstance(s.action, Partial)][:3]
    assert (host.action.hi, inside.action.stage.unit, rest.action.lo) == (1, "vision", 1)
    assert host.start_s + 1 == inside.start_s == rest.start_s - 2


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "PF vision.0 vision:0.1 2:3", "", r"rank 0: `PF vision\.0 vision:0\.1 2:3` is missing"),
        (1, "0:2", "0:1", r"rank 1: `PF vision\.0 vision:1\.1 2:3` \(action \d+\) comes where segment 1 is due of 3"),
        (1, "1:3", "0:3", r"rank 1: `PB vision\.0 vision:1\.0 0:1` .* comes where all segments are done of 3"),
        (0, "0.1 2:3", "0.1 2:4", r"2:4` .* comes where segment 2 is due of 3"),
        (1, "F vision.0 vision:1.0", "", r"rank 1: `F vision\.0 vision:1\.0` is missing"),
        (0, "|1|", "|3|", r"rank 0, line 1: .*gap 3 of F llm\.0 llm:0\.0: allowed are 1 to 2"),
        (
            0,
            "1:3 |2|",
            "1:2 |2|",
            r"rank 0, line 5: .*gap 2 of B llm\.0 llm:0\.1: allowed are none, it has one segment",
        ),
        (0, "PF vision.0 vision:0.1 0:2", "F vision.0 vision:0.1", "line 1.*'F vision.0 vision:0.1' is no partial"),
        (0, "0:2", "2:2", "line 1.*2:2 holds no segment"),
        (0, "|1| PF vision.0 vision:0.1 0:2", "|1|", "line 1.*no such action"),
        (0, "PF vision.0 vision:0.1 0:2", "PF vision.1 vision:0.1 0:2", r"there is no stage vision\.1"),
        (0, "PF vision.0 vision:0.1 0:2", "PF vision.0 vision:0.7 0:2", r"they go from vision:0\.0 to vision:1\.1"),
    ],
)
def test_the_message_names_what_is_wrong_with_a_part(rank, old, new, message):
    with pytest.raises(ProgramError, match=message):
        build_program(GRAPH, kind="explicit", order=changed(rank, old, new))


def test_a_part_in_a_gap_may_not_need_its_own_host():
    """The encoder's backward needs the gradient of the LLM's first segment, which runs after the gap."""
    graph = deeper(chain(Unit("vision"), Unit("llm", ranks=(0,)), n=1), 2)
    order = {
        0: ["F vision.0 vision:0.0", "F llm.0 llm:0.0", "B llm.0 llm:0.0 |1| PB vision.0 vision:0.0 0:2"],
    }
    message = r"`PB vision\.0 vision:0\.0 0:2` \(action 4\) comes before `B llm\.0 llm:0\.0`"
    with pytest.raises(ProgramError, match=message):
        build_program(graph, kind="explicit", order=order)


def test_the_message_of_a_deadlock_names_the_late_part():
    """Rank 0 finishes the forward of microbatch 1 after a backward that waits for rank 1 to have run it."""
    graph = deeper(chain(Unit("llm", 2), n=2), 2)
    order = {
        0: ["F llm.0 llm:0.0", "PF llm.0 llm:0.1 0:1", "B llm.0 llm:0.0", "PF llm.0 llm:0.1 1:2", "B llm.0 llm:0.1"],
        1: [f"{kind} llm.1 llm:0.{wave}" for kind in "FB" for wave in (0, 1)],
    }
    with pytest.raises(
        ProgramError,
        match=r"deadlock: .*rank 0 `PF llm\.0 llm:0\.1 1:2` -> rank 0 `SA [^`]* @1` -> rank 1 `F llm\.1 llm:0\.1`",
    ):
        build_program(graph, kind="explicit", order=order)
    order[0][2:4] = reversed(order[0][2:4])
    check_program(build_program(graph, kind="explicit", order=order))


def test_ranks_of_a_tp_group_must_cut_alike():
    graph = deeper(chain(Unit("llm", tp=2), n=1), 2)
    order = {0: ["F llm.0 llm:0.0", "B llm.0 llm:0.0"], 1: ["PF llm.0 llm:0.0 0:2", "B llm.0 llm:0.0"]}
    with pytest.raises(ProgramError, match="ranks 0 and 1 share the group"):
        build_program(graph, kind="explicit", order=order)


def test_validation_runs_the_forwards_of_a_gap():
    """Without backwards only the forwards of gaps and hosts stay."""
    frozen = replace(GRAPH, stages=tuple(replace(s, trainable=False) for s in GRAPH.stages))
    program = build_program(frozen, kind="explicit", order=ORDER)
    assert interpret(frozen, program.actions).problems == []
    assert not any(isinstance(a, Partial) and a.kind == "B" for a in expand_all(frozen, program.actions[0]))


def test_a_microbatch_in_parts_lives_from_its_first_part_to_its_last():
    """The second wave's encoder starts in a gap while the first is alive; it is freed after segment 0's backward."""
    program = build_program(GRAPH, kind="explicit", order=ORDER)
    assert peak_in_flight_by_stage(GRAPH, program.actions[0]) == {StageId("vision", 0): 2, StageId("llm", 0): 2}
    part = Partial(StageId("vision", 0), Microbatch("vision", 0, 0), "F", 0, 1)
    assert peak_in_flight_by_stage(GRAPH, (part,)) == {StageId("vision", 0): 1}
