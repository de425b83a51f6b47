"""Programs: for each rank an ordered list of actions for one step; built, checked, simulated, drawn, executed.

`build` turns a stage graph into a checked program; `simulate` predicts its timeline.
"""

from mmtrain.program.ir.actions import (
    Action,
    Backward,
    Collective,
    Compute,
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
from mmtrain.program.ir.graph import LLM, Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.serialize import (
    action_from_text,
    action_to_text,
    from_text,
    graph_from_json,
    graph_to_json,
    to_text,
)
from mmtrain.program.ir.step_loads import Route, StepLoads, step_loads
from mmtrain.program.schedules.assemble import build
from mmtrain.program.schedules.builder import ScheduleKind, build_1f1b, build_coarse, build_explicit
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.simulation.timing import ModelTiming, Timing, Transport
from mmtrain.program.trace.timeline import (
    BUBBLE_KINDS,
    BubbleKind,
    Span,
    Timeline,
    chrome_trace,
)
from mmtrain.program.verify.check import MemoryLimit, check
from mmtrain.program.verify.live_activations import peak_bytes, peak_live

__all__ = [
    "BUBBLE_KINDS",
    "LLM",
    "Action",
    "Backward",
    "BubbleKind",
    "Collective",
    "Compute",
    "Edge",
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
    "Transport",
    "UnitMesh",
    "action_from_text",
    "action_to_text",
    "build",
    "build_1f1b",
    "build_coarse",
    "build_explicit",
    "check",
    "chrome_trace",
    "from_text",
    "graph_from_json",
    "graph_to_json",
    "lower",
    "peak_bytes",
    "peak_live",
    "simulate",
    "step_loads",
    "to_text",
]
