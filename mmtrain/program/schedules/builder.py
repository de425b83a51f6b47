"""Builders write the order of compute actions; `lower` adds the communication, `check` proves that the result runs.

The order is 1F1B (one forward, one backward; PipeDream-Flush, Megatron-LM) over a stage graph, position by position
from its end. A rank runs the forwards of a wave (mostly one microbatch) for all its stages, sources first, and the
backwards in reverse. It starts with as many waves of forwards as must be ahead of the first that comes back, then
alternates one wave of forwards with one of backwards, and ends with the remaining backwards. In a plain pipeline with
equal numbers of microbatches, the number of waves ahead (`num_warmup_waves`) is the number of positions that follow.
The LLM keeps this order whatever feeds it. Units with other numbers of microbatches run when the LLM needs their
outputs or returns their gradients, and hold no more than that requires (see `unit_pacing`). Where the path visits the
same ranks several times (vpp model chunks), the chunks interleave: see `PipelinePosition.passes`.

No deadlock: let B(w) be a position's backward of wave w, and let `need` be how many waves beyond w the forwards must
reach before the gradients of w can come. By its own order a forward F(f) waits for B(f - ahead - 1) and what lies
before. That needs forwards up to F(f - ahead - 1 + need), so none from f on, as need <= ahead. Therefore a position
that is put before others never makes one of their forwards wait for a backward that needs it: it adds no order among
them. One after another from the end, positions thus form no cycle. (Inside a position, several pipeline ranks run
interleaved 1F1B; to other positions they look like one rank whose need is that of its first stage. A unit on the LLM's
ranks that reads from the LLM has a block's forward due w - 1 waves after its backward, w waves being a block, and there
ahead >= w - 1.)
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import Backward, Compute, ComputeTask, Fill, Forward
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction, expand
from mmtrain.program.ir.serialize import action_from_text
from mmtrain.program.ir.symmetry import symmetry
from mmtrain.program.schedules.generator_order import generators_on_llm, order_with_generator, place_apart
from mmtrain.program.schedules.lower import lower
from mmtrain.program.schedules.one_f_one_b import order_1f1b
from mmtrain.program.schedules.pipeline_positions import find_positions
from mmtrain.program.verify.check import MemoryLimit, check_program

ScheduleKind = Literal["1f1b", "coarse", "encoder_first", "explicit"]
_ACCEPTED_LINES = (
    "write forwards and backwards, like `F llm.0 llm:0.3` and `B llm.0 llm:0.3`, or parts of them, like "
    "`PF llm.0 llm:0.3 0:2`; communication is added"
)


def build_compute(
    graph: StageGraph,
    kind: ScheduleKind,
    order: Mapping[int, Sequence[str]] | None = None,
    ranks: Sequence[int] | None = None,
) -> Program:
    """Order compute by the builder of this kind.

    Args:
        order: the lines of each rank for an explicit schedule, see `build_explicit`.
        ranks: the only ranks to build, see `build_1f1b`.

    Raises:
        ProgramError: the graph's parts do not fit together, or a line of the order is no compute action.
    """
    match kind:
        case "1f1b":
            return build_1f1b(graph, ranks)
        case "coarse" | "encoder_first":  # one order of compute; the graph says what stages keep in between
            return build_coarse(graph, ranks)
        case "explicit":
            lines = order or {}
            return build_explicit(graph, lines if ranks is None else {rank: lines[rank] for rank in ranks})


def build_1f1b(graph: StageGraph, ranks: Sequence[int] | None = None) -> Program:
    """Order the compute actions of every rank of replica group 0 as (interleaved) 1F1B; communication is missing.

    Args:
        ranks: the only ranks to build; a few are enough to simulate a program (see `representative_ranks`).

    Raises:
        ProgramError: the graph's parts do not fit together.
    """
    ranks = sorted(symmetry(graph).mirrors[0]) if ranks is None else ranks
    order = order_1f1b(graph, ranks)
    return Program(graph, {rank: tuple(action for action in order[rank] if _exists(graph, action)) for rank in ranks})


def build_coarse(graph: StageGraph, ranks: Sequence[int] | None = None) -> Program:
    """Order compute for units on the same ranks: encoder forwards, LLM and generator, encoder backwards.

    This is the coarse schedule of Optimus (arXiv 2408.03505, section 4.2): encoders keep no rank waiting inside the
    LLM's pipeline, but they hold all their activations and fill only the bubbles at its ends. Each half of an encoder's
    work is ordered as in 1F1B of that encoder alone, one encoder after another: on the same rank two may have different
    pipeline stages. A generator on the LLM's ranks runs between the LLM's passes (`generator_order`). `ranks` are as
    for `build_1f1b`.

    No deadlock: within each phase the order is one that has none; data never flows to an earlier phase, and
    every rank runs the phases in the same order.

    Raises:
        ProgramError: the graph's parts do not fit together.
    """
    ranks = sorted(symmetry(graph).mirrors[0]) if ranks is None else ranks
    encoders = graph.encoders
    of_encoders = [order_1f1b(graph.only({unit}), ranks) for unit in encoders]
    of_others = order_with_generator(graph.only({m.unit for m in graph.meshes}.difference(encoders)), ranks)
    compute: dict[int, tuple[ComputeTask, ...]] = {}
    for rank in ranks:
        of_rank = [action for order in of_encoders for action in order[rank]]
        forwards = [action for action in of_rank if isinstance(action, Forward)]
        others = [action for action in of_others[rank] if _exists(graph, action)]
        backwards = [action for action in of_rank if isinstance(action, Backward) and _exists(graph, action)]
        compute[rank] = (*forwards, *others, *backwards)
    return Program(graph, compute)


def build_explicit(graph: StageGraph, order: Mapping[int, Sequence[str]]) -> Program:
    """Order compute as written in `order`, for each rank of replica group 0: lines like `F llm.0 llm:0.3`.

    Lines may also be parts of forwards and backwards, `PF vision.0 vision:0.3 0:2`, and parts inside the gap of
    another action: see `actions`. Backwards of stages that have none are skipped, so that one order serves training
    and validation.

    Raises:
        ProgramError: a line is no compute action, or names a stage, microbatch or gap that does not exist. It is
            `check_program` that finds out whether the order is complete and runs to its end.
    """
    compute: dict[int, tuple[ComputeTask, ...]] = {}
    for rank, lines in order.items():
        tasks = [_task_from_text(graph, rank, index, line) for index, line in enumerate(lines)]
        compute[rank] = tuple(part for task in tasks for part in _without_needless_backwards(graph, task))
    return Program(graph, compute)


def in_flight_microbatches(graph: StageGraph) -> dict[StageId, int]:
    """Return for each stage the most microbatches that 1F1B holds between forward and backward.

    In a plain pipeline with equal numbers of microbatches this is one, plus one for each position after the stage on
    the longest path to the end. It is never more than the step has. A generator on the LLM's ranks and the LLM hold
    what they hold on ranks of their own.
    """
    apart, _ = place_apart(graph, generators_on_llm(graph))
    return {stage: count for position in find_positions(apart) for stage, count in position.in_flight().items()}


def _task_from_text(graph: StageGraph, rank: int, index: int, line: str) -> ComputeTask:
    where = f"order of rank {rank}, line {index}: {line!r}"
    try:
        task = action_from_text(line)
    except ValueError as error:
        raise ProgramError(f"{where}: {error}; {_ACCEPTED_LINES}") from error
    if not isinstance(task, ComputeTask):
        raise ProgramError(f"{where} is no compute; {_ACCEPTED_LINES}")
    for part in (task.host, *task.partials) if isinstance(task, Fill) else (task,):
        if problem := _unknown(graph, part):
            raise ProgramError(f"{where}: {problem}")
    try:
        expand(graph, task)
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from error
    return task


def _unknown(graph: StageGraph, part: Compute) -> str | None:
    """Describe the stage or microbatch of a forward or backward that the graph does not have."""
    mb = part.mb
    if not graph.has_stage(part.stage):
        stages = ", ".join(str(stage.id) for stage in graph.stages)
        return f"there is no stage {part.stage}; stages are {stages}"
    mesh = graph.mesh(part.stage.unit)
    if mb.unit != mesh.unit or mb.replica >= mesh.num_replicas or mb.index >= mesh.num_microbatches:
        last = Microbatch(mesh.unit, mesh.num_replicas - 1, mesh.num_microbatches - 1)
        return f"{mb} is no microbatch of {part.stage}; they go from {mesh.unit}:0.0 to {last}"
    return None


def _without_needless_backwards(graph: StageGraph, task: ComputeTask) -> tuple[ComputeTask, ...]:
    """Return the task without backwards that its stages do not have; what remains of a `Fill` keeps its order."""
    parts = expand(graph, task)
    existing = tuple(part for part in parts if _exists(graph, part))
    return (task,) if len(existing) == len(parts) else existing


def _exists(graph: StageGraph, action: Compute) -> bool:
    """Return whether the action is a forward, or a backward of a stage that has one."""
    return direction(action) == "F" or graph.needs_backward(action.stage)


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
