"""Programs: for each rank the ordered list of actions of one step; built, checked, simulated and executed.

`build_program` turns a stage graph into a checked program, `simulate` predicts its timeline. `ir` holds the format,
`schedules` builds programs, `verify` proves that they run, `simulation` times them, `trace` reads timelines.
"""

from mmtrain.program.ir.actions import (
    Action,
    Backward,
    Collective,
    Compute,
    Dispatch,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Payload,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.graph import LLM, DispatchMode, Edge, Exchange, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.serialize import (
    action_from_text,
    action_to_text,
    program_from_text,
    program_to_text,
)
from mmtrain.program.ir.step_loads import Route, StepLoads, step_loads
from mmtrain.program.schedules.builder import ScheduleKind, build_1f1b, build_coarse, build_explicit, build_program
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.simulation.timing import ModelTiming, Timing, TransferCost
from mmtrain.program.trace.timeline import (
    BUBBLE_KINDS,
    BubbleKind,
    Span,
    Timeline,
    chrome_trace,
)
from mmtrain.program.verify.check import MemoryLimit, check_program
from mmtrain.program.verify.live_activations import peak_activation_bytes, peak_in_flight_by_stage

__all__ = [
    "BUBBLE_KINDS",
    "LLM",
    "Action",
    "Backward",
    "BubbleKind",
    "Collective",
    "Compute",
    "Dispatch",
    "DispatchMode",
    "Edge",
    "Exchange",
    "Fill",
    "Forward",
    "GatherParams",
    "MemoryLimit",
    "Microbatch",
    "ModelTiming",
    "Partial",
    "Payload",
    "Program",
    "Recv",
    "ReduceGrads",
    "ReduceShared",
    "Route",
    "ScheduleKind",
    "Send",
    "Share",
    "Span",
    "Stage",
    "StageGraph",
    "StageId",
    "Step",
    "StepLoads",
    "Timeline",
    "Timing",
    "TransferCost",
    "UnitMesh",
    "action_from_text",
    "action_to_text",
    "build_1f1b",
    "build_coarse",
    "build_explicit",
    "build_program",
    "check_program",
    "chrome_trace",
    "lower",
    "peak_activation_bytes",
    "peak_in_flight_by_stage",
    "program_from_text",
    "program_to_text",
    "simulate",
    "step_loads",
]
