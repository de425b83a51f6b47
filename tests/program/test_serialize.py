"""Programs as text are read back exactly; a broken one is rejected with a reason."""

import pytest
from hypothesis import given

from mmtrain.errors import ProgramError
from mmtrain.program import build_program, program_from_text, program_to_text
from mmtrain.program.ir.actions import Recv, Share
from tests.program.graphs import Unit, chain, graphs, unified


@given(graphs())
def test_programs_round_trip(graph):
    program = build_program(graph)
    assert program_from_text(program_to_text(program), graph) == program


def test_text_has_the_form_that_actions_describe():
    program = build_program(chain(Unit("vision"), Unit("llm", tp=2), n=1))
    assert program_to_text(program).splitlines() == [
        "rank 0",
        "GP vision 0",
        "RG vision.0>llm.0 vision:0.0 llm:0.0 @1",
        "F vision.0 vision:0.0",
        "SA vision.0>llm.0 vision:0.0 llm:0.0 @1",
        "B vision.0 vision:0.0",
        "RS vision 0",
        "STEP",
        "rank 1",
        "GP llm 0",
        "RA vision.0>llm.0 vision:0.0 llm:0.0 @0",
        "XA vision.0>llm.0 llm:0.0",
        "F llm.0 llm:0.0",
        "B llm.0 llm:0.0",
        "SG vision.0>llm.0 vision:0.0 llm:0.0 @0",
        "RS llm 0",
        "STEP",
        "rank 2",
        "GP llm 0",
        "XA vision.0>llm.0 llm:0.0",
        "F llm.0 llm:0.0",
        "B llm.0 llm:0.0",
        "RS llm 0",
        "STEP",
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("F llm.0 llm:0.0", "line 1"),
        ("rank 0\nF llm.0 llm:0.0\n\nF llm.0", "line 4"),
        ("rank 0\nF llm llm:0.0", "'llm' is no stage"),
        ("rank 0\nF llm.0 llm.0", "'llm.0' is no microbatch"),
        ("rank 0\nSA llm.0 llm:0.0 llm:0.0 @1", "'llm.0' is no edge"),
        ("rank 0\nRG llm.0>llm.1 llm:0.0 llm:0.0 1", "'1' is no rank"),
        ("rank 0\nSX llm.0>llm.1 llm:0.0 llm:0.0 @1", "no such action"),
        ("rank 0\nSTEP\nrank 0", "rank 0 comes a second time"),
    ],
)
def test_broken_text_names_the_line(text, where):
    with pytest.raises(ProgramError, match=where):
        program_from_text(text, unified(2))


def test_other_replica_groups_repeat_the_first():
    """Two groups of 1 encoder and 2 LLM replicas, tp 2: every rank runs its mirror's program on other replicas."""
    graph = chain(Unit("vision", dp=2), Unit("llm", dp=4, tp=2), n=1)
    program = build_program(graph)
    assert sorted(program.actions) == [0, 2, 3, 4, 5]
    assert program.for_rank(3) == program.actions[3]
    first, mirrored = program.for_rank(4), program.for_rank(8)
    received = [a for a in mirrored if isinstance(a, Recv)]
    assert [(str(a.src), str(a.dst), a.peer) for a in received] == [("vision:1.0", "llm:3.0", 1)]
    assert [str(a.mb) for a in mirrored if isinstance(a, Share)] == ["llm:3.0"]
    assert [type(a) for a in first] == [type(a) for a in mirrored]
    with pytest.raises(ProgramError, match=r"rank 10 holds no stage; the program's ranks are 0-9"):
        program.for_rank(10)
