"""Prove that a plan fits into the memory of the devices that are to run it."""

import math
from dataclasses import dataclass

from mmtrain.costs import RankMemory, StateCopies, TokenLoad, costs_for, machine_for, state_bytes
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.layer_arithmetic import loss_sizes
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import LossSizes, ModelShape
from mmtrain.planning.artifact.graph_memory import HOST_REMEDY, GraphMemory, communicator_bytes, schedule_in_flight
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.program.ir.graph import LLM, StageGraph
from mmtrain.program.verify.check import MemoryLimit
from mmtrain.recipe.settings.schema import Recipe

REMEDIES = {  # by kind of memory that needs most
    "parameters": "more tp or pp of the unit",
    "gradients": "more tp or pp of the unit",
    "optimizer": "more dp, tp or pp of the unit",
    "activations": "recompute: all of the unit, more tp, or a smaller data.seq_len",
    "buffers": "more tp of the unit, or a smaller data.seq_len",
    "copies": "more dp, tp or pp of the unit, or train.peer_copies.every: 0",
}


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the smallest device of a run, and the least host memory of a rank."""

    nbytes: float
    described: str  # what has it, like `the GPU of rank 3`
    host_bytes: float = math.inf  # that a rank may fill with activations: of what a container has; inf: no limit known


def prove_memory(recipe: Recipe, plan: Plan, shape: ModelShape, device: DeviceMemory) -> MemoryLimit:
    """Prove that every rank of the plan has room on `device`; return what its activations may take, for the checker.

    The figures are counted anew from the plan's stages, not read from its prediction. Of a plan that `plan --measure`
    found to hold less than what is counted, so much less is counted.

    Raises:
        PlanError: names the rank that needs most, the kind of memory that binds, and what makes room.
    """
    graph = stage_graph(plan, shape)
    counted = _graph_memory(recipe, plan, shape)
    memory = _memory_by_rank(recipe, plan, graph, counted)
    measured = plan.measured
    ratios = {rank: 1.0 if measured is None else measured.memory_ratio_of(rank) for rank in memory}
    rank = max(memory, key=lambda number: memory[number].total * ratios[number])
    ratio = ratios[rank]
    if memory[rank].total * ratio > device.nbytes:
        as_run = "" if ratio == 1 else f" as counted, {ratio:.2f} of it as `plan --measure` found"
        need = f"rank {rank} needs {_need_text(memory[rank])}{as_run}, most of it {memory[rank].binding}"
        raise PlanError(_misfit_text(need, device, remedy(memory[rank].binding, recipe)))
    host_memory_bytes = min(machine_for(recipe, plan.hardware).host_memory_bytes, device.host_bytes)
    fullest = max(memory.values(), key=lambda of_rank: of_rank.on_host)
    if fullest.on_host > host_memory_bytes:
        raise PlanError(
            f"the plan keeps {fullest.on_host / GIB:.4g} GiB of {fullest.on_host_text} of a rank in host memory, and "
            "a rank "
            f"{'here' if device.host_bytes == host_memory_bytes else f'of {plan.hardware}'} may use "
            f"{host_memory_bytes / GIB:.4g} GiB of it; what makes room is {HOST_REMEDY}"
        )
    limits = {rank: device.nbytes / ratio for rank, ratio in ratios.items()}
    return counted.activation_limit(graph, memory, limits, host_memory_bytes)


def plan_memory(recipe: Recipe, plan: Plan, shape: ModelShape) -> dict[int, RankMemory]:
    """Count what every rank of the plan's first replica group holds at its peak."""
    return _memory_by_rank(recipe, plan, stage_graph(plan, shape), _graph_memory(recipe, plan, shape))


def planned_loss(plan: Plan, shape: ModelShape) -> LossSizes:
    """Return the sizes of the loss over the vocabulary in the largest microbatch."""
    largest = TokenLoad(**plan.data.largest_microbatch[LLM].model_dump())
    element_bytes = ELEMENT_BYTES[plan.precision]
    return loss_sizes(shape.unit(LLM).layers[-1], largest, element_bytes, plan.units[LLM].tp)


def _graph_memory(recipe: Recipe, plan: Plan, shape: ModelShape) -> GraphMemory:
    machine, precision, optimizer = machine_for(recipe, plan.hardware), plan.precision, recipe.train.optimizer
    copies = StateCopies.planned(recipe.train.peer_copies.every, plan.world_size, machine)
    return GraphMemory(
        planned_shape(plan, shape),
        costs_for(machine, precision, recipe.cluster.costs),
        precision,
        state_bytes(precision, optimizer.moments, optimizer.kind, copies),
        {unit: TokenLoad(**largest.model_dump()) for unit, largest in plan.data.largest_microbatch.items()},
        frozenset(name for name, unit in plan.units.items() if unit.sp and unit.tp > 1),
    )


def _memory_by_rank(recipe: Recipe, plan: Plan, graph: StageGraph, counted: GraphMemory) -> dict[int, RankMemory]:
    num_in_flight = schedule_in_flight(graph, plan.schedule)
    return counted.by_rank(graph, num_in_flight, communicator_bytes(graph, machine_for(recipe, plan.hardware)))


def _need_text(memory: RankMemory) -> str:
    kinds = ", ".join(f"{kind} {nbytes / GIB:.3g}" for kind, nbytes in memory.by_kind().items() if nbytes)
    return f"{memory.total / GIB:.4g} GiB ({kinds})"


def remedy(binding: str, recipe: Recipe) -> str:
    """Return what makes room of a kind of memory; smaller moments only where the recipe may have them."""
    optimizer = recipe.train.optimizer
    has_large_moments = optimizer.kind == "adamw" and optimizer.moments == "fp32"
    smaller = ", or train.optimizer.moments: bf16" if binding == "optimizer" and has_large_moments else ""
    return REMEDIES[binding] + smaller


def _misfit_text(need: str, device: DeviceMemory, remedy: str) -> str:
    return (
        f"the plan does not fit this device: {need}, and {device.described} has "
        f"{device.nbytes / GIB:.4g} GiB. Make a plan with "
        f"`--set cluster.memory_gib={int(device.nbytes / GIB * 10) / 10:g}`; what makes room is {remedy}"
    )
