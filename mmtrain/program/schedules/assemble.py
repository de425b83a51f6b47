"""The room's story: a stage graph becomes a program that is known to run."""

from collections.abc import Mapping, Sequence

from mmtrain.errors import ProgramError
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.program import Program
from mmtrain.program.schedules.builder import ScheduleKind, build_compute
from mmtrain.program.schedules.lower import lower
from mmtrain.program.verify.check import MemoryLimit, check_program


def build_program(
    graph: StageGraph,
    memory: MemoryLimit | None = None,
    kind: ScheduleKind = "1f1b",
    order: Mapping[int, Sequence[str]] | None = None,
) -> Program:
    """Order the compute of one step, add the communication, and prove that the result runs to its end.

    `order` is that of an explicit schedule, by rank; see `build_explicit`. Gradients are reduced as early as it lets
    them be: right after a unit's last backward, or after all compute where ranks would otherwise wait in a circle.

    Raises:
        ProgramError: the graph's parts do not fit together, an explicit order is incomplete or would wait for ever,
            or (with `memory`) activations do not fit.
    """
    program = build_compute(graph, kind, order)
    lowered = lower(program)
    try:
        check_program(lowered, memory)
    except ProgramError:
        if kind != "explicit":
            raise
        # Ranks that end their work on two encoders in different orders would wait for each other's reductions.
        lowered = lower(program, reduce_last=True)
        check_program(lowered, memory)
    return lowered
