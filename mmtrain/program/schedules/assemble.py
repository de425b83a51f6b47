"""Turn a stage graph into a checked program: order its compute, add the communication, prove that it runs."""

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

    Gradients are reduced as early as possible: right after a unit's last backward, or after all compute where ranks
    would otherwise wait for each other in a cycle.

    Args:
        memory: what activations may take; without it the program is not checked for memory.
        order: the lines of each rank for an explicit schedule, see `build_explicit`.

    Raises:
        ProgramError: the graph's parts do not fit together, an explicit order is incomplete or deadlocks, or (with
            `memory`) activations do not fit.
    """
    program = build_compute(graph, kind, order)
    lowered = lower(program)
    try:
        check_program(lowered, memory)
    except ProgramError:
        if kind != "explicit":
            raise
        # Ranks would wait for each other's reductions of shared weights, which hold them.
        lowered = lower(program, reduce_last=True)
        check_program(lowered, memory)
    return lowered
