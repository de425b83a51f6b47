"""Programs: for each rank an ordered list of actions for one step; built, checked, simulated, drawn, executed.

`build` turns a stage graph into a checked program; `simulate` predicts its timeline.
"""

from mmtrain.program.actions import (
    Action,
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Payload,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.assemble import build
from mmtrain.program.builder import build_1f1b
from mmtrain.program.check import MemoryLimit, check
from mmtrain.program.graph import LLM, Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.loads import Route, StepLoads
from mmtrain.program.lower import lower
from mmtrain.program.memory import peak_bytes, peak_live
from mmtrain.program.program import Program
from mmtrain.program.text import action_from_text, action_to_text, from_text, graph_from_json, graph_to_json, to_text

__all__ = [
    "LLM",
    "Action",
    "Backward",
    "Collective",
    "Compute",
    "Edge",
    "Forward",
    "GatherParams",
    "MemoryLimit",
    "Microbatch",
    "Payload",
    "Program",
    "Recv",
    "ReduceGrads",
    "ReduceShared",
    "Route",
    "Send",
    "Share",
    "Stage",
    "StageGraph",
    "StageId",
    "Step",
    "StepLoads",
    "UnitMesh",
    "action_from_text",
    "action_to_text",
    "build",
    "build_1f1b",
    "check",
    "from_text",
    "graph_from_json",
    "graph_to_json",
    "lower",
    "peak_bytes",
    "peak_live",
    "to_text",
]
