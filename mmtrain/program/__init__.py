"""Programs: for each rank an ordered list of actions for one step; built, checked, simulated, drawn, executed.

`build` turns a stage graph into a checked program; `simulate` predicts its timeline.
"""

from mmtrain.program.actions import (
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
from mmtrain.program.assemble import build
from mmtrain.program.builder import ScheduleKind, build_1f1b, build_coarse, build_explicit
from mmtrain.program.check import MemoryLimit, check
from mmtrain.program.graph import LLM, Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.loads import Route, StepLoads, step_loads
from mmtrain.program.lower import lower
from mmtrain.program.memory import peak_bytes, peak_live
from mmtrain.program.program import Program
from mmtrain.program.simulate import simulate
from mmtrain.program.text import action_from_text, action_to_text, from_text, graph_from_json, graph_to_json, to_text
from mmtrain.program.timeline import (
    BUBBLE_KINDS,
    BubbleKind,
    Span,
    Timeline,
    chrome_trace,
)
from mmtrain.program.timing import ModelTiming, Timing, Transport

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
