"""Whether activations wait for their backward in host memory, where a recipe leaves that to the planner."""

from collections.abc import Iterator
from dataclasses import replace

from mmtrain.models.shapes.model_shape import OffloadMode, unit_offload, with_offload
from mmtrain.planning.space.problem import PlanningProblem

OFFLOAD_MODES: tuple[OffloadMode, ...] = ("inputs", "all")


def with_activations_on_host(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """Yield the problem with each way to keep activations in host memory, in all units for which the recipe asks.

    None on hardware whose memory is the host's.
    """
    if problem.hardware.host_bytes_per_s is None:
        return
    units = [unit for unit in problem.shape.units if unit.kind != "generator"]
    open_units = [unit.name for unit in units if problem.recipe.parallel.of(unit.name).offload == "auto"]
    fixed = {unit.name: unit_offload(unit) for unit in units}
    for mode in OFFLOAD_MODES if open_units else ():
        yield replace(problem, shape=with_offload(problem.shape, {**fixed, **dict.fromkeys(open_units, mode)}))
