"""The checker refuses exactly the broken programs: one mutation at a time, judged by the interpreter."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.errors import ProgramError
from mmtrain.program import Program, build, check, from_text
from mmtrain.program.actions import Action, Backward, Forward, Recv, Send, Share
from mmtrain.program.graph import Microbatch
from tests.program.graphs import graphs
from tests.program.interpreter import interpret


@st.composite
def mutations(draw: st.DrawFn) -> Program:
    """A good program with one thing changed on one rank."""
    program = build(draw(graphs(max_n=3)))
    rank = draw(st.sampled_from(sorted(program.actions)))
    actions = list(program.actions[rank])
    at = draw(st.integers(0, len(actions) - 1))
    how = draw(st.sampled_from(["delete", "duplicate", "swap", "neighbours", "move", "alter", "steal"]))
    if how == "delete":
        del actions[at]
    elif how == "duplicate":
        actions.insert(draw(st.integers(0, len(actions))), actions[at])
    elif how == "swap":
        other = draw(st.integers(0, len(actions) - 1))
        actions[at], actions[other] = actions[other], actions[at]
    elif how == "neighbours" and at:
        actions[at - 1 : at + 1] = actions[at], actions[at - 1]
    elif how == "move":
        moved = actions.pop(at)
        actions.insert(draw(st.integers(0, len(actions))), moved)
    elif how == "alter":
        actions[at] = draw(st.sampled_from(altered(program, actions[at])))
    elif how == "steal":
        other = draw(st.sampled_from(sorted(program.actions)))
        actions.insert(at, draw(st.sampled_from(program.actions[other])))
    return replace(program, actions={**program.actions, rank: tuple(actions)})


def altered(program: Program, action: Action) -> list[Action]:
    """The same action with another microbatch, peer or direction."""
    n = program.graph.num_microbatches

    def others(mb: Microbatch) -> list[Microbatch]:
        return [replace(mb, index=i) for i in range(n)]

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


@settings(max_examples=600)
@given(mutations())
def test_refuses_what_the_interpreter_cannot_run_and_nothing_else(program):
    problems = interpret(program.graph, program.actions).problems
    if problems:
        with pytest.raises(ProgramError, match="program refused"):
            check(program)
    else:
        check(program)


def swap(text: str, graph, one: str, two: str) -> Program:
    assert text.count(one) == text.count(two) == 1
    return from_text(text.replace(one, "@@").replace(two, one).replace("@@", two), graph)
