"""The room's story: a stage graph becomes a program that is known to run."""

from collections.abc import Callable, Mapping
from typing import Literal

from mmtrain.program.builder import build_1f1b, build_coarse
from mmtrain.program.check import MemoryLimit, check
from mmtrain.program.graph import StageGraph
from mmtrain.program.lower import lower
from mmtrain.program.program import Program

ScheduleKind = Literal["1f1b", "coarse"]
_BUILDERS: Mapping[ScheduleKind, Callable[[StageGraph], Program]] = {"1f1b": build_1f1b, "coarse": build_coarse}


def build(graph: StageGraph, memory: MemoryLimit | None = None, kind: ScheduleKind = "1f1b") -> Program:
    """Order the compute of one step, add the communication, and prove that the result runs to its end.

    Raises:
        ProgramError: the graph's parts do not fit together, or (with `memory`) activations do not fit.
    """
    program = lower(_BUILDERS[kind](graph))
    check(program, memory)
    return program
