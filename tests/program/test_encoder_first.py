"""Encoders that run before and after the LLM of a whole step, and forward twice where they train."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.errors import ProgramError
from mmtrain.models.shapes.model_shape import ModelEdge
from mmtrain.program import (
    Backward,
    Edge,
    Forward,
    MemoryLimit,
    Microbatch,
    ModelTiming,
    StageGraph,
    StageId,
    build_program,
    peak_activation_bytes,
    peak_in_flight_by_stage,
    program_to_text,
    step_loads,
)
from mmtrain.program.ir.program import Program
from tests.program.graphs import Unit, chain
from tests.program.test_timeline import SHAPE, LayerCosts

VISION, LLM = StageId("vision", 0), StageId("llm", 0)
NUM_REPLICAS = 2
BYTES = {VISION: 100, LLM: 60}
STEP_OF_RANK_1 = """
F vision.0 vision:1.0
DA vision.0>llm.0 0 0
F llm.0 llm:1.0
B llm.0 llm:1.0
DA vision.0>llm.0 0 1
F llm.0 llm:1.1
B llm.0 llm:1.1
DG vision.0>llm.0 0 0
DG vision.0>llm.0 0 1
B vision.0 vision:1.0
STEP"""


def encoder_first(vision_n: int = 1, trains: bool = True, reruns: bool = True) -> StageGraph:
    """Return a graph of units that every replica runs, with two microbatches of the LLM."""
    ranks = tuple(range(NUM_REPLICAS))
    vision = Unit("vision", dp=NUM_REPLICAS, ranks=ranks, n=vision_n, trainable=(trains,))
    graph = chain(vision, Unit("llm", dp=NUM_REPLICAS, ranks=ranks), n=2)
    stages = tuple(replace(stage, reruns_forward=reruns and stage.id == VISION) for stage in graph.stages)
    meshes = tuple(replace(mesh, shard=1, dispatch="all") for mesh in graph.meshes)
    return replace(graph, meshes=meshes, stages=stages, encoder_first=True)


def bytes_of(stage: StageId, mb: Microbatch) -> int:
    return BYTES[stage]


def test_encoders_run_around_the_llm_of_the_whole_step() -> None:
    program = build_program(encoder_first(), kind="encoder_first")
    text = program_to_text(Program(program.graph, {1: program.for_rank(1)}))
    assert text.splitlines()[1:] == STEP_OF_RANK_1.split("\n")[1:]


def test_activations_that_are_computed_again_live_in_the_backward_alone() -> None:
    program = build_program(encoder_first(vision_n=2), kind="encoder_first")
    actions = program.actions[0]
    assert peak_in_flight_by_stage(program.graph, actions) == {VISION: 1, LLM: 1}
    assert peak_activation_bytes(program.graph, actions, bytes_of)[0] == 100
    kept = encoder_first(vision_n=2, reruns=False)
    actions = build_program(kept, kind="encoder_first").actions[0]
    assert peak_in_flight_by_stage(kept, actions) == {VISION: 2, LLM: 1}
    assert peak_activation_bytes(kept, actions, bytes_of)[0] == 260


def test_the_checker_counts_them_when_they_live() -> None:
    limit = MemoryLimit(bytes_of, {0: 100})
    build_program(encoder_first(vision_n=2), limit, kind="encoder_first")
    with pytest.raises(ProgramError, match=r"activations are alive on the device at `F llm.0 llm:0.0`"):
        build_program(encoder_first(reruns=False), limit, kind="encoder_first")
    with pytest.raises(ProgramError, match=r"activations are alive on the device at `B vision.0 vision:0.0`"):
        build_program(encoder_first(), MemoryLimit(bytes_of, {0: 99}), kind="encoder_first")


def test_an_encoder_that_does_not_train_runs_once() -> None:
    graph = encoder_first(trains=False)
    assert not graph.reruns_forward(VISION)
    program = build_program(graph, kind="encoder_first")
    assert [type(action).__name__ for action in program.actions[0]][:3] == ["Forward", "Dispatch", "Forward"]
    assert peak_in_flight_by_stage(graph, program.actions[0]) == {VISION: 1, LLM: 1}


def test_a_backward_takes_the_time_of_the_second_forward_too() -> None:
    seconds = {reruns: _seconds(encoder_first(reruns=reruns)) for reruns in (False, True)}
    assert seconds[True]["F"] == seconds[False]["F"] > 0
    assert seconds[True]["B"] == pytest.approx(seconds[False]["B"] + seconds[False]["F"])


def _seconds(graph: StageGraph) -> dict[str, float]:
    numbers, zeros = np.arange(4), np.zeros(4, dtype=np.int64)
    items = ItemTable(numbers, zeros, zeros, zeros, numbers + 4, numbers + 1, numbers % 2, zeros)
    meta = BatchMeta(0, 0, numbers, numbers + 5, zeros + 1, numbers // 2, numbers % 2, {"vision": items})
    timing = ModelTiming(
        graph,
        replace(SHAPE, edges=(ModelEdge("vision", "llm", 0, 4),)),
        LayerCosts(),
        step_loads(graph, meta),
        input_grad={"vision": (False, True), "llm": (True, True)},
        trained_parameters=lambda layer, tp: 0,
        element_bytes=2,
        ranks_per_node=2,
    )
    mb = Microbatch("vision", 0, 0)
    return {"F": timing.compute(Forward(VISION, mb)), "B": timing.compute(Backward(VISION, mb))}


def test_the_encoder_feeds_the_llm() -> None:
    assert encoder_first().outputs(VISION) == (Edge(VISION, LLM),)
