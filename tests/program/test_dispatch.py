"""Replicas that dispatch: one collective of all of them stands for the messages between each two."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.errors import ProgramError
from mmtrain.models.shapes.model_shape import ModelEdge
from mmtrain.program import (
    Dispatch,
    Edge,
    Exchange,
    ModelTiming,
    Payload,
    Program,
    StageGraph,
    StageId,
    build_program,
    check_program,
    program_from_text,
    program_to_text,
    simulate,
    step_loads,
)
from mmtrain.program.ir.actions import Collective
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.simulation.timing import TransferCost
from tests.program.graphs import Unit, chain
from tests.program.test_timeline import SHAPE, LayerCosts
from tests.program.timings import Seconds

NUM_REPLICAS = 3
EDGE = Edge(StageId("vision", 0), StageId("llm", 0))
STEP_OF_RANK_1 = """
F vision.0 vision:1.0
DA vision.0>llm.0 0 0
F llm.0 llm:1.0
B llm.0 llm:1.0
DG vision.0>llm.0 0 0
B vision.0 vision:1.0
F vision.0 vision:1.1
DA vision.0>llm.0 1 1
F llm.0 llm:1.1
B llm.0 llm:1.1
DG vision.0>llm.0 1 1
B vision.0 vision:1.1
STEP"""


def dispatching(vision_n: int = 0, trainable: bool = True) -> StageGraph:
    """Return a graph of units that every replica runs, with two microbatches of the LLM."""
    ranks = tuple(range(NUM_REPLICAS))
    vision = Unit("vision", dp=NUM_REPLICAS, ranks=ranks, n=vision_n, trainable=(trainable,))
    graph = chain(vision, Unit("llm", dp=NUM_REPLICAS, ranks=ranks), n=2)
    return replace(graph, meshes=tuple(replace(mesh, shard=1, dispatch="all") for mesh in graph.meshes))


def text_of(program: Program, rank: int) -> list[str]:
    return program_to_text(Program(program.graph, {rank: program.for_rank(rank)})).splitlines()[1:]


def test_every_replica_dispatches_before_what_reads_the_rows() -> None:
    program = build_program(dispatching())
    assert text_of(program, 1) == STEP_OF_RANK_1.split("\n")[1:]
    [dispatch, *_] = [action for action in program.for_rank(1) if isinstance(action, Dispatch)]
    assert participants(program.graph, 1, dispatch) == tuple(range(NUM_REPLICAS))


def test_an_encoder_that_does_not_train_takes_no_gradients_back() -> None:
    lines = text_of(build_program(dispatching(trainable=False)), 0)
    assert [line for line in lines if line.startswith("D")] == ["DA vision.0>llm.0 0 0", "DA vision.0>llm.0 1 1"]


def test_what_the_llm_makes_for_a_generator_is_dispatched_and_its_gradient_comes_back() -> None:
    ranks = tuple(range(NUM_REPLICAS))
    units = [Unit(name, dp=NUM_REPLICAS, ranks=ranks) for name in ("vision", "llm", "generator")]
    graph = chain(*units, n=1)
    graph = replace(graph, meshes=tuple(replace(mesh, shard=1, dispatch="all") for mesh in graph.meshes))
    program = build_program(graph)
    check_program(program)
    assert text_of(program, 1) == [
        "F vision.0 vision:1.0",
        "DA vision.0>llm.0 0 0",
        "F llm.0 llm:1.0",
        "DA llm.0>generator.0 0 0",
        "F generator.0 generator:1.0",
        "B generator.0 generator:1.0",
        "DG llm.0>generator.0 0 0",
        "B llm.0 llm:1.0",
        "DG vision.0>llm.0 0 0",
        "B vision.0 vision:1.0",
        "STEP",
    ]
    assert program_from_text(program_to_text(program), graph).actions == program.actions


def test_a_merged_microbatch_is_dispatched_to_each_that_it_serves() -> None:
    lines = text_of(build_program(dispatching(vision_n=1)), 2)
    assert [line.split()[0] for line in lines] == ["F", "DA", "F", "B", "DA", "F", "B", "DG", "DG", "B", "STEP"]
    assert [line for line in lines if line.startswith("DG")] == ["DG vision.0>llm.0 0 0", "DG vision.0>llm.0 0 1"]


def test_programs_are_read_back() -> None:
    program = build_program(dispatching())
    assert program_from_text(program_to_text(program), program.graph).actions == program.actions


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("DA vision.0>llm.0 0 0", "", "`DA vision.0>llm.0 0 0` is missing"),
        ("F vision.0 vision:0.0", "DA vision.0>llm.0 0 0", "comes before `F vision.0 vision:0.0`"),
        ("DG vision.0>llm.0 1 1", "B vision.0 vision:0.1", "comes before `DG vision.0>llm.0 1 1`"),
        ("F llm.0 llm:0.1", "DA vision.0>llm.0 1 1", "does not belong on this rank|comes before `DA vision"),
    ],
)
def test_a_program_without_its_dispatches_in_order_is_rejected(first: str, second: str, message: str) -> None:
    """Remove the first line, or exchange it with the second."""
    program = build_program(dispatching())
    lines = program_to_text(program).splitlines()
    if second:
        places = lines.index(first), lines.index(second)
        lines[places[0]], lines[places[1]] = second, first
    else:
        lines.remove(first)
    with pytest.raises(ProgramError, match=message):
        check_program(program_from_text("\n".join(lines), program.graph))


class _DispatchSeconds(Seconds):
    """Half a second for every dispatch."""

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(0.5, 100) if isinstance(action, Dispatch) else TransferCost(0.0, 0)


@pytest.mark.parametrize(
    ("exchange", "activations", "gradients"),
    [
        ("all_to_all", TransferCost(560.0, 80), TransferCost(560.0, 64)),
        ("all_gather", TransferCost(3.0 * 4 * 80, 4 * 80), TransferCost(3.0 * 4 * 80, 4 * 80)),
    ],
)
def test_a_dispatch_ends_with_the_rank_that_moves_most(
    exchange: Exchange, activations: TransferCost, gradients: TransferCost
) -> None:
    """Two nodes of two ranks; rows of 4 features of 2 bytes, 8 bytes a row; 1 s a byte on a node, 10 s between nodes.

    Items of 3, 5 and 2 rows go from rank 0 to ranks 1, 2 and 3, one of 7 rows stays on rank 1. So rank 0 sends 24 bytes
    on its node (24 s) and 56 to the other one (560 s), at the same time. An all-gather takes 3 s a byte of what it
    gathers, which is four times the rows of the rank that holds most: rank 0 before, rank 1 of gradients.
    """
    ranks = tuple(range(4))
    vision, llm = (Unit(unit, dp=4, ranks=ranks) for unit in ("vision", "llm"))
    graph = chain(vision, llm, n=1)
    graph = replace(
        graph, meshes=tuple(replace(mesh, shard=4, dispatch="all", exchange=exchange) for mesh in graph.meshes)
    )
    numbers, features = np.arange(4), np.array([3, 5, 2, 7])
    zeros = np.zeros(4, dtype=np.int64)
    items = ItemTable(numbers, zeros, zeros, zeros, 4 * features, features, np.array([0, 0, 0, 1]), zeros)
    to_rank = np.array([1, 2, 3, 1])
    meta = BatchMeta(0, 0, numbers, features + 1, zeros + 1, to_rank, zeros, {"vision": items})
    timing = ModelTiming(
        graph,
        replace(SHAPE, edges=(ModelEdge("vision", "llm", 0, 4),)),
        _LinkCosts(),
        step_loads(graph, meta),
        input_grad={"vision": (False, False), "llm": (True, True)},
        trained_parameters=lambda layer, tp: 0,
        element_bytes=2,
        ranks_per_node=2,
    )
    railed = replace(timing, rail_hop_s=3.0)
    hop_s = 0.0 if exchange == "all_gather" else 3.0  # rank 0 also sends to rank 3, which is on another rail
    assert railed.collective(0, Dispatch(EDGE, 0, 0, "activation"), ranks).seconds == activations.seconds + hop_s
    costs: dict[Payload, TransferCost] = {"activation": activations, "gradient": gradients}
    for payload, cost in costs.items():
        dispatch = Dispatch(EDGE, 0, 0, payload)
        assert [timing.collective(rank, dispatch, ranks) for rank in ranks] == [cost] * 4


class _LinkCosts(LayerCosts):
    def transfer(self, nbytes: int, same_node: bool) -> float:
        return nbytes * (1.0 if same_node else 10.0)


@pytest.mark.parametrize("num_groups", [1, NUM_REPLICAS])
def test_a_dispatch_holds_all_replicas(num_groups: int) -> None:
    """Each microbatch takes 1 + 0.5 + 2 s forward and as much again, twice as long for compute, backward."""
    timeline = simulate(build_program(dispatching()), _DispatchSeconds(vision=1.0, llm=2.0), num_groups)
    assert timeline.step_time_s == 2 * ((1 + 2) * 3 + 2 * 0.5)
    assert len(timeline.bubbles) == num_groups
    for bubbles in timeline.bubbles.values():
        assert bubbles["dispatch"] == 4 * 0.5
        assert sum(bubbles.values()) == bubbles["dispatch"]
    spans = [span for span in timeline.spans if isinstance(span.action, Dispatch)]
    assert np.unique([span.nbytes for span in spans]).tolist() == [100]
