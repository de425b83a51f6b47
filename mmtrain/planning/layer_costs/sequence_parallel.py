"""Which units use sequence parallelism, and at which tensor-parallel sizes."""

from collections import Counter

from mmtrain.costs.sequence_parallel_costs import sequence_parallel_seconds
from mmtrain.planning.layer_costs.layer_costs import LayerCosts, SpSizes
from mmtrain.planning.space.batch_split import BatchSplit, UnitSplit
from mmtrain.planning.space.problem import PlanningProblem


def choose_sequence_parallelism(
    problem: PlanningProblem, layer_costs: LayerCosts, *, at_any_cost: bool = False
) -> SpSizes:
    """Return where the recipe asks for sequence parallelism, or leaves it open and it costs no time.

    It always saves memory. Whether it costs time is decided on a microbatch of mean size, for a whole unit at each
    tensor-parallel size; seconds that it would save are not counted on. at_any_cost: use it wherever it is left open.
    """
    chosen = {}
    for unit, setting in problem.constraints.sequence_parallel.items():
        is_possible = setting and problem.shape.unit(unit).kind != "generator"
        sizes = [tp for tp in problem.choices[unit].tp if tp > 1 and is_possible]
        if setting == "auto" and not at_any_cost:
            sizes = [tp for tp in sizes if _added_seconds(problem, layer_costs, unit, tp) <= 0]
        chosen[unit] = frozenset(sizes)
    return chosen


def _added_seconds(problem: PlanningProblem, layer_costs: LayerCosts, unit: str, tp: int) -> float:
    """Return how much longer a microbatch of mean size takes in the unit's forward and backward."""
    unsplit: BatchSplit = tuple(UnitSplit(u.name, 1, problem.batches.global_batch) for u in problem.shape.units)
    load = layer_costs.microbatch_loads(unit, unsplit).mean()
    layers = zip(problem.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    costs, hardware, precision = problem.costs, problem.hardware, problem.precision
    return sum(
        count * sequence_parallel_seconds(layer, tp, load, costs, hardware, precision, input_grad=input_grad)
        for (layer, input_grad), count in Counter(layers).items()
    )
