"""The room's story: a stage graph becomes a program that is known to run."""

from mmtrain.program.builder import build_1f1b
from mmtrain.program.check import MemoryLimit, check
from mmtrain.program.graph import StageGraph
from mmtrain.program.lower import lower
from mmtrain.program.program import Program


def build(graph: StageGraph, memory: MemoryLimit | None = None) -> Program:
    """Order the compute of one step, add the communication, and prove that the result runs to its end.

    Raises:
        ProgramError: the graph's parts do not fit together, or (with `memory`) activations do not fit.
    """
    program = lower(build_1f1b(graph))
    check(program, memory)
    return program
