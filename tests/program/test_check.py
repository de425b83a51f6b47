"""The checker rejects exactly the broken programs: one mutation at a time, compared with the interpreter."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ProgramError
from mmtrain.program import (
    MemoryLimit,
    Program,
    build_program,
    check_program,
    peak_activation_bytes,
    peak_in_flight_by_stage,
    program_from_text,
    program_to_text,
)
from mmtrain.program.ir.actions import Action, Backward, Forward, Recv, Send, Share
from mmtrain.program.ir.graph import Microbatch, StageId
from tests.program.graphs import Unit, chain, graphs
from tests.program.interpreter import interpret


@st.composite
def mutations(draw: st.DrawFn) -> Program:
    """Draw a correct program with one thing changed on one rank."""
    program = build_program(draw(graphs(max_n=3)))
    rank = draw(st.sampled_from(sorted(program.actions)))
    actions = list(program.actions[rank])
    position = draw(st.integers(0, len(actions) - 1))
    how = draw(st.sampled_from(["delete", "duplicate", "swap", "swap neighbors", "move", "alter", "steal"]))
    if how == "delete":
        del actions[position]
    elif how == "duplicate":
        actions.insert(draw(st.integers(0, len(actions))), actions[position])
    elif how == "swap":
        other = draw(st.integers(0, len(actions) - 1))
        actions[position], actions[other] = actions[other], actions[position]
    elif how == "swap neighbors" and position:
        actions[position - 1 : position + 1] = actions[position], actions[position - 1]
    elif how == "move":
        moved = actions.pop(position)
        actions.insert(draw(st.integers(0, len(actions))), moved)
    elif how == "alter":
        actions[position] = draw(st.sampled_from(altered(program, actions[position])))
    elif how == "steal":
        other = draw(st.sampled_from(sorted(program.actions)))
        actions.insert(position, draw(st.sampled_from(program.actions[other])))
    return replace(program, actions={**program.actions, rank: tuple(actions)})


def altered(program: Program, action: Action) -> list[Action]:
    """Return the same action with another microbatch, peer or direction."""
    n = program.graph.mesh("llm").num_microbatches

    def others(mb: Microbatch) -> list[Microbatch]:
        return [mb._replace(index=i) for i in range(n)]

    match action:
        case Forward(stage, mb):
            return [Backward(stage, mb), *(replace(action, mb=other) for other in others(mb))]
        case Backward(stage, mb):
            return [Forward(stage, mb), *(replace(action, mb=other) for other in others(mb))]
        case Share(_, mb, _):
            return [replace(action, mb=other) for other in others(mb)]
        case Send() | Recv():
            peers = [replace(action, peer=rank) for rank in program.actions]
            return peers + [replace(action, src=s, dst=d) for s in others(action.src) for d in others(action.dst)]
    return [action]


@given(mutations())
def test_rejects_exactly_the_programs_that_the_interpreter_cannot_run(program):
    problems = interpret(program.graph, program.actions).problems
    if problems:
        with pytest.raises(ProgramError, match="program rejected"):
            check_program(program)
    else:
        check_program(program)


def rejection(program: Program, memory: MemoryLimit | None = None) -> str:
    with pytest.raises(ProgramError) as error:
        check_program(program, memory)
    return str(error.value)


def test_a_deadlock_is_reported_action_by_action():
    """Each rank first runs an action that needs a later one of the other: rank 0 a backward, rank 1 a forward."""
    graph = chain(Unit("llm", pp=2), n=2)
    text = """
rank 0
GP llm 0
F llm.0 llm:0.0
SA llm.0>llm.1 llm:0.0 llm:0.0 @1
RG llm.0>llm.1 llm:0.0 llm:0.0 @1
B llm.0 llm:0.0
F llm.0 llm:0.1
SA llm.0>llm.1 llm:0.1 llm:0.1 @1
RG llm.0>llm.1 llm:0.1 llm:0.1 @1
B llm.0 llm:0.1
RS llm 0
STEP
rank 1
GP llm 0
RA llm.0>llm.1 llm:0.0 llm:0.0 @0
RA llm.0>llm.1 llm:0.1 llm:0.1 @0
F llm.1 llm:0.0
F llm.1 llm:0.1
B llm.1 llm:0.0
SG llm.0>llm.1 llm:0.0 llm:0.0 @0
B llm.1 llm:0.1
SG llm.0>llm.1 llm:0.1 llm:0.1 @0
RS llm 0
STEP
"""
    message = rejection(program_from_text(text, graph))
    assert "deadlock" in message
    for action in ("rank 0 `B llm.0 llm:0.0`", "rank 0 `F llm.0 llm:0.1`", "rank 1 `F llm.1 llm:0.1`"):
        assert action in message
    assert "STEP" not in message


def test_messages_of_a_channel_in_another_order_are_rejected():
    program = build_program(chain(Unit("llm", pp=2, trainable=(False, False)), n=2))
    actions = list(program.actions[1])
    posts = [position for position, a in enumerate(actions) if isinstance(a, Recv)]
    first, second = (actions[position] for position in posts)
    actions.remove(second)
    actions.insert(0, second)
    message = rejection(replace(program, actions={**program.actions, 1: tuple(actions)}))
    assert first != second
    assert "message 0 is sent as llm:0.0 for llm:0.0, received as llm:0.1 for llm:0.1" in message


def test_collectives_of_a_group_in_another_order_are_rejected():
    """Ranks 0 and 1 are the data-parallel group of two encoders at once."""
    encoders = [Unit(name, dp=2, ranks=(0, 1)) for name in ("vision", "audio")]
    program = build_program(chain(*encoders, Unit("llm", ranks=(2,)), n=1))
    actions = list(program.actions[1])
    actions[:2] = reversed(actions[:2])
    message = rejection(replace(program, actions={**program.actions, 1: tuple(actions)}))
    assert "ranks 0 and 1 share the group [0, 1]" in message
    assert "collective 0 is `GP vision 0` on one and `GP audio 0` on the other" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("B llm.1 llm:0.1\n", "", "rank 1: `B llm.1 llm:0.1` is missing"),
        ("F llm.1 llm:0.1\n", "F llm.1 llm:0.1\nF llm.1 llm:0.1\n", "rank 1: `F llm.1 llm:0.1` comes 2 times"),
        ("F llm.1 llm:0.1\n", "F llm.0 llm:0.1\n", "rank 1: `F llm.0 llm:0.1` does not belong on this rank"),
        ("F llm.1 llm:0.1\n", "F llm.1 llm:3.7\n", "rank 1: `F llm.1 llm:3.7` does not belong on this rank"),
        (
            "RS llm 0\nSTEP\nrank 1",
            "STEP\nRS llm 0\nrank 1",
            "rank 0: `STEP` (action 9) comes before `RS",
        ),
    ],
)
def test_the_message_names_what_is_wrong(old, new, message):
    program = build_program(chain(Unit("llm", pp=2), n=2))
    text = program_to_text(program)
    assert text.count(old) == 1
    assert message in rejection(program_from_text(text.replace(old, new), program.graph))


def test_parameters_must_be_gathered_before_they_are_used():
    program = build_program(chain(Unit("llm", pp=2), n=2))
    gather, *actions = program.actions[1]
    first = next(position for position, action in enumerate(actions) if isinstance(action, Forward))
    late = (*actions[: first + 1], gather, *actions[first + 1 :])
    message = rejection(replace(program, actions={**program.actions, 1: late}))
    assert f"rank 1: `F llm.1 llm:0.0` (action {first}) comes before `GP llm 0`" in message


def test_the_message_names_ranks_without_actions():
    program = build_program(chain(Unit("llm", 2)))
    message = rejection(replace(program, actions={0: program.actions[0]}))
    assert message == "program: has actions for ranks [0], but replica group 0 is [0, 1]"


def test_many_problems_are_counted_not_printed():
    program = build_program(chain(Unit("llm"), n=40))
    message = rejection(replace(program, actions={0: ()}))
    assert "... and 63 more" in message
    assert message.count("is missing") == 20


def test_activations_must_fit():
    """Stage 0 of two keeps two microbatches of 3 bytes, stage 1 one of 5."""
    program = build_program(chain(Unit("llm", pp=2), n=4))
    sizes = {"llm.0": 3, "llm.1": 5}
    check_program(program, MemoryLimit(lambda stage, mb: sizes[str(stage)], {0: 6, 1: 5}))
    message = rejection(program, MemoryLimit(lambda stage, mb: sizes[str(stage)], {0: 5, 1: 5}))
    assert "rank 0" in message
    assert "`F llm.0 llm:0.1`" in message
    assert "rank 1" not in message


def test_without_backward_nothing_is_kept():
    program = build_program(chain(Unit("vision", trainable=(False,)), Unit("llm"), n=4))
    assert peak_activation_bytes(program.graph, program.actions[0], lambda stage, mb: 10)[0] == 10
    assert peak_in_flight_by_stage(program.graph, program.actions[0]) == {StageId("vision", 0): 1}
