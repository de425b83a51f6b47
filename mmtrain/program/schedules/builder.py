"""Builders write the order of compute actions; `lower` adds the communication.

1F1B (one forward, one backward; PipeDream-Flush, Megatron-LM) over a stage graph, position by position from its end. A
rank runs the forwards of a wave (mostly one microbatch) for all its stages, sources first, and the backwards in
reverse. It starts with as many waves of forwards as must be ahead of the first that comes back, then alternates one
wave of forwards with one of backwards, and ends with the backwards that are left. In a plain pipeline of equal numbers
of microbatches, that number (`num_warmup_waves`) counts the positions that follow. The LLM keeps this order whatever
feeds it; units with other numbers of microbatches run when it needs their outputs and returns their gradients, and hold
no more than that (see `pacing`). Where the path goes round the same ranks several times (vpp chunks), they interleave:
see `PipelinePosition.passes`.

No deadlock: let B(w) be a position's backward of wave w, and let need be how far beyond w the forwards reach without
which its gradients cannot come. By its own order a forward F(f) waits for B(f - ahead - 1) and what lies before. That
needs forwards up to F(f - ahead - 1 + need), so none from f on, as need <= ahead. Therefore a position that is put
before others never makes one of their forwards wait for a backward that needs it: it adds no order among them. One
after another from the end, positions thus close no circle. (Inside a position, several places are those of
interleaved 1F1B, to others like one whose need is that of its first stage; a unit on the LLM's ranks that reads from
it has a block's forward due w - 1 waves after its backward, w waves being a block, and there ahead >= w - 1.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import Backward, Compute, ComputeTask, Fill, Forward
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction, expand
from mmtrain.program.ir.serialize import action_from_text
from mmtrain.program.ir.symmetry import symmetry
from mmtrain.program.schedules.pipeline_positions import PipelinePosition, find_positions

ScheduleKind = Literal["1f1b", "coarse", "explicit"]
_WANTED = (
    "write forwards and backwards, like `F llm.0 llm:0.3` and `B llm.0 llm:0.3`, or parts of them, like "
    "`PF llm.0 llm:0.3 0:2`; communication is added"
)


def build_compute(
    graph: StageGraph,
    kind: ScheduleKind,
    order: Mapping[int, Sequence[str]] | None = None,
    ranks: Sequence[int] | None = None,
) -> Program:
    """Order compute by the builder of this kind; `order` is that of an explicit one. `ranks` are as for `build_1f1b`.

    Raises:
        ProgramError: the graph's parts do not fit together, or a line of the order is none.
    """
    match kind:
        case "1f1b":
            return build_1f1b(graph, ranks)
        case "coarse":
            return build_coarse(graph, ranks)
        case "explicit":
            written = order or {}
            return build_explicit(graph, written if ranks is None else {rank: written[rank] for rank in ranks})


def build_1f1b(graph: StageGraph, ranks: Sequence[int] | None = None) -> Program:
    """Order the compute actions of every rank of replica group 0 as (interleaved) 1F1B; communication is missing.

    With `ranks`, of these only: to simulate a program, some are enough (see `twins.leaders`).

    Raises:
        ProgramError: the graph's parts do not fit together.
    """
    ranks = sorted(symmetry(graph).mirrors[0]) if ranks is None else ranks
    order = _one_f_one_b(graph, ranks)
    return Program(
        graph,
        {
            rank: tuple(a for a in order[rank] if isinstance(a, Forward) or graph.needs_backward(a.stage))
            for rank in ranks
        },
    )


def build_coarse(graph: StageGraph, ranks: Sequence[int] | None = None) -> Program:
    """Order compute for units on the same ranks: encoder forwards, the LLM's 1F1B, encoder backwards.

    The coarse schedule of Optimus (arXiv 2408.03505, section 4.2): encoders keep nobody waiting inside the LLM's
    pipeline, at the price of holding all their activations, and fill nothing but its ends. Each half of the encoders'
    work is ordered as in 1F1B of encoders alone. `ranks` are as for `build_1f1b`.

    No deadlock: within each of the three phases the order is one that 1F1B proves, data never flows to an earlier
    phase, and every rank runs the phases in the same order.

    Raises:
        ProgramError: the graph's parts do not fit together.
    """
    ranks = sorted(symmetry(graph).mirrors[0]) if ranks is None else ranks
    encoders = {e.src.unit for e in graph.edges if e.crosses_units and e.dst.unit == LLM}
    around = _one_f_one_b(_only(graph, encoders), ranks)
    between = _one_f_one_b(_only(graph, {m.unit for m in graph.meshes} - encoders), ranks)
    return Program(
        graph,
        {
            rank: (
                *(a for a in around[rank] if isinstance(a, Forward)),
                *(a for a in between[rank] if isinstance(a, Forward) or graph.needs_backward(a.stage)),
                *(a for a in around[rank] if isinstance(a, Backward) and graph.needs_backward(a.stage)),
            )
            for rank in ranks
        },
    )


def build_explicit(graph: StageGraph, order: Mapping[int, Sequence[str]]) -> Program:
    """Order compute as written down, for each rank of replica group 0: lines like `F llm.0 llm:0.3`.

    Lines may also be parts of forwards and backwards, `PF vision.0 vision:0.3 0:2`, and work inside the gap of
    another: see `actions`. Backwards of stages that need none are passed over, so that one order serves training and
    validation.

    Raises:
        ProgramError: a line is no compute, or speaks of a stage, microbatch or gap that there is not. Whether the
            order is complete, and runs, is for `check` to say.
    """
    compute: dict[int, tuple[ComputeTask, ...]] = {}
    for rank, lines in order.items():
        tasks = [_task_from_text(graph, rank, at, line) for at, line in enumerate(lines)]
        compute[rank] = tuple(kept for task in tasks for kept in _needed(graph, task))
    return Program(graph, compute)


def in_flight_microbatches(graph: StageGraph) -> dict[StageId, int]:
    """Count, for each stage, the microbatches that 1F1B holds between forward and backward at most.

    In a plain pipeline of equal numbers of microbatches: one, and one for each position after the stage on the longest
    path to the end, but no more than there are.
    """
    return {stage: count for position in find_positions(graph) for stage, count in position.in_flight().items()}


def _task_from_text(graph: StageGraph, rank: int, at: int, line: str) -> ComputeTask:
    where = f"order of rank {rank}, line {at}: {line!r}"
    try:
        task = action_from_text(line)
    except ValueError as error:
        raise ProgramError(f"{where}: {error}; {_WANTED}") from error
    if not isinstance(task, ComputeTask):
        raise ProgramError(f"{where} is no compute; {_WANTED}")
    for part in (task.host, *task.partials) if isinstance(task, Fill) else (task,):
        if problem := _stranger(graph, part):
            raise ProgramError(f"{where}: {problem}")
    try:
        expand(graph, task)
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from error
    return task


def _stranger(graph: StageGraph, part: Compute) -> str | None:
    """What the graph does not know of a forward or backward."""
    mb, stages = part.mb, [stage.id for stage in graph.stages]
    if part.stage not in stages:
        return f"there is no stage {part.stage}; stages are {', '.join(map(str, stages))}"
    mesh = graph.mesh(part.stage.unit)
    if mb.unit != mesh.unit or mb.replica >= mesh.dp or mb.index >= mesh.num_microbatches:
        last = Microbatch(mesh.unit, mesh.dp - 1, mesh.num_microbatches - 1)
        return f"{mb} is no microbatch of {part.stage}; they go from {mesh.unit}:0.0 to {last}"
    return None


def _needed(graph: StageGraph, task: ComputeTask) -> tuple[ComputeTask, ...]:
    """The task without backwards that nobody needs; what stays of a filled gap stays in its order."""
    found = expand(graph, task)
    kept = tuple(part for part in found if direction(part) == "F" or graph.needs_backward(part.stage))
    return (task,) if len(kept) == len(found) else kept


def _only(graph: StageGraph, units: set[str]) -> StageGraph:
    """The stage graph of some units by themselves."""
    return replace(
        graph,
        meshes=tuple(m for m in graph.meshes if m.unit in units),
        stages=tuple(s for s in graph.stages if s.id.unit in units),
        edges=tuple(e for e in graph.edges if {e.src.unit, e.dst.unit} <= units),
    )


def _one_f_one_b(graph: StageGraph, ranks: Iterable[int]) -> dict[int, list[Compute]]:
    """Compute of each rank in the order of 1F1B, with a backward for every forward."""
    places = {
        stage: (position, k % position.num_pipeline_ranks)
        for position in find_positions(graph)
        for k, part in enumerate(position.virtual_stages)
        for stage in part
    }
    order: dict[int, list[Compute]] = {}
    for rank in ranks:
        held = graph.held_by(rank)
        order[rank] = list(_turn_by_turn(dict(held), *places[held[0][0]])) if held else []
    return order


def _turn_by_turn(replica_of: dict[StageId, int], position: PipelinePosition, place: int) -> Iterable[Compute]:
    chunks = [
        [(stage, replica_of[stage]) for stage in position.stages_at(place, chunk) if stage in replica_of]
        for chunk in range(position.num_chunks)
    ]
    for is_forward, chunk, wave in position.passes(place):
        for stage, replica in chunks[chunk] if is_forward else reversed(chunks[chunk]):
            for index in position.pacing[stage.unit].due(is_forward, wave):
                mb = Microbatch(stage.unit, replica, index)
                yield Forward(stage, mb) if is_forward else Backward(stage, mb)
