"""Explicit orders: encoder work anywhere between the LLM's, as long as the checker accepts it."""

import pytest

from mmtrain.errors import ProgramError
from mmtrain.program import build_1f1b, build_program, simulate
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.serialize import action_to_text
from tests.program.graphs import Unit, chain
from tests.program.test_coarse import encoder_on_every_rank
from tests.program.test_simulate import Given

# Two ranks of an LLM pipeline with an encoder replica each, three waves; `Fv1` stands for vision's forward of wave 1.
ORDER = {
    0: "Fv0 Fl0 Fv1 Fl1 Bl0 Bv0 Fv2 Fl2 Bl1 Bv1 Bl2 Bv2",
    1: "Fv0 Fv1 Fl0 Bl0 Fv2 Fl1 Bl1 Bv0 Fl2 Bl2 Bv1 Bv2",
}


def in_full(order: dict[int, str]) -> dict[int, list[str]]:
    """Return orders in full, for vision replica r on rank r and LLM stage r on rank r."""
    lines: dict[int, list[str]] = {}
    for rank, short in order.items():
        lines[rank] = [
            f"{kind} vision.0 vision:{rank}.{wave}" if unit == "v" else f"{kind} llm.{rank} llm:0.{wave}"
            for kind, unit, wave in short.split()
        ]
    return lines


def test_encoder_work_between_that_of_the_llm():
    graph = encoder_on_every_rank(2, n=3)
    program = build_program(graph, kind="explicit", order=in_full(ORDER))
    for rank, lines in in_full(ORDER).items():
        assert [action_to_text(a) for a in program.actions[rank] if isinstance(a, Forward | Backward)] == lines
    times = Given({"vision.0": 0.5, "llm.0": 1, "llm.1": 1}, {"vision.0": 0.5, "llm.0": 2, "llm.1": 2})
    assert simulate(program, times).step_time_s < simulate(build_program(graph, kind="coarse"), times).step_time_s


def test_the_order_of_a_builder_can_be_written_as_text():
    graph = chain(Unit("vision", 2), Unit("llm", 2, num_stages=4), n=3)
    order = {rank: [action_to_text(a) for a in todo] for rank, todo in build_1f1b(graph).actions.items()}
    assert build_program(graph, kind="explicit", order=order) == build_program(graph)


def test_backwards_that_a_stage_does_not_have_are_skipped():
    graph = chain(Unit("vision", trainable=(False,)), Unit("llm"), n=1)
    order = {0: ["F vision.0 vision:0.0", "B vision.0 vision:0.0"], 1: ["F llm.0 llm:0.0", "B llm.0 llm:0.0"]}
    assert build_program(graph, kind="explicit", order=order) == build_program(graph)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (ORDER | {0: ORDER[0].replace(" Bv2", "")}, r"rank 0: `B vision\.0 vision:0\.2` is missing"),
        (
            {0: "Fv0 Fl0 Bl0 Bv0 Fv1 Fl1 Fv2 Fl2 Bl1 Bv1 Bl2 Bv2", 1: ORDER[1].replace("Bl0 Fv2 Fl1", "Fv2 Fl1 Bl0")},
            "deadlock: each of these waits",
        ),
        ({0: ORDER[0]}, r"has actions for ranks \[0\], but replica group 0 is \[0, 1\]"),
    ],
)
def test_an_order_that_cannot_run_is_rejected(order, message):
    with pytest.raises(ProgramError, match=message):
        build_program(encoder_on_every_rank(2, n=3), kind="explicit", order=in_full(order))


@pytest.mark.parametrize("line", ["F llm.0", "RS llm 0", "forward llm.0 llm:0.0"])
def test_the_message_names_a_line_that_is_no_compute_action(line):
    with pytest.raises(ProgramError, match=f"order of rank 0, line 1: '{line}'.*write forwards and backwards"):
        build_program(chain(Unit("llm"), n=1), kind="explicit", order={0: ["F llm.0 llm:0.0", line]})


def test_encoders_may_end_in_another_order_on_another_rank():
    """Then all reductions come last, in one order; each right after its last backward, they would form a cycle."""
    encoders = [Unit(name, dp=2, ranks=(0, 1)) for name in ("vision", "audio")]
    graph = chain(*encoders, Unit("llm", 2, ranks=(0, 1)), n=1)
    order = {}
    for rank, last in enumerate((["audio", "vision"], ["vision", "audio"])):
        forwards = [f"F {unit}.0 {unit}:{rank}.0" for unit in last] + [f"F llm.{rank} llm:0.0"]
        order[rank] = [*forwards, f"B llm.{rank} llm:0.0", *(f"B {unit}.0 {unit}:{rank}.0" for unit in last)]
    program = build_program(graph, kind="explicit", order=order)
    for rank in (0, 1):
        lines = [action_to_text(a) for a in program.actions[rank]]
        assert [line for line in lines if line.startswith(("RS", "B"))][-3:] == [
            "RS llm 0",
            "RS audio 0",
            "RS vision 0",
        ]
