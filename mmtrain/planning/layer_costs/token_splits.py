"""How TP groups divide the tokens of a unit: sequence parallelism, and chunks that hide communication."""

from collections import Counter

from mmtrain.costs import ComputeKind, TokenLoad, TokenSplit
from mmtrain.costs.context_parallel_costs import sequence_parallel_seconds
from mmtrain.costs.cost_model import LayerWork
from mmtrain.planning.layer_costs.layer_costs import LayerCosts, SpSizes, TpChunks
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.sample_batches import BatchSplit, UnitSplit

# Numbers of chunks that are tried. One of c chunks of a collective stays in the open, so more than 16 hide little more.
CHUNK_COUNTS = (2, 4, 8, 16)
# Of a microbatch's time, that chunks must save to be worth another order of work: as much as two plans may differ and
# still count as equally fast (`plan.AS_FAST_RATIO`).
MIN_SAVED_SHARE = 0.01
_KINDS: tuple[ComputeKind, ComputeKind] = ("forward", "backward")


def with_token_splits(problem: PlanningProblem, layer_costs: LayerCosts, *, sp_at_any_cost: bool = False) -> LayerCosts:
    """Return the costs with the sequence parallelism and the chunks of tokens that are chosen for the problem."""
    sharded = layer_costs.with_settings(
        sp=choose_sequence_parallelism(problem, layer_costs, at_any_cost=sp_at_any_cost), chunks={}
    )
    return sharded.with_settings(chunks=choose_tp_chunks(problem, sharded))


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
            sizes = [tp for tp in sizes if _sequence_parallel_seconds(problem, layer_costs, unit, tp) <= 0]
        chosen[unit] = frozenset(sizes)
    return chosen


def choose_tp_chunks(problem: PlanningProblem, layer_costs: LayerCosts) -> TpChunks:
    """Return by unit and tensor-parallel size into how many chunks the tokens are divided, where into several.

    The number is the fastest for a microbatch of mean size, with the sequence parallelism of `layer_costs`. Where the
    recipe leaves it open, there are chunks only if they save time.
    """
    chosen: dict[str, dict[int, int]] = {}
    for unit, setting in problem.constraints.tp_overlap.items():
        is_possible = setting and problem.shape.unit(unit).kind != "generator"
        for tp in problem.choices[unit].tp:
            if tp == 1 or not is_possible:
                continue
            seconds = {count: _chunked_seconds(problem, layer_costs, unit, tp, count) for count in (1, *CHUNK_COUNTS)}
            fastest = min(CHUNK_COUNTS, key=seconds.__getitem__)
            if setting is True or seconds[fastest] <= (1 - MIN_SAVED_SHARE) * seconds[1]:
                chosen.setdefault(unit, {})[tp] = fastest
    return chosen


def _sequence_parallel_seconds(problem: PlanningProblem, layer_costs: LayerCosts, unit: str, tp: int) -> float:
    """Return how much longer a microbatch of mean size takes in the unit's forward and backward."""
    load = _mean_load(problem, layer_costs, unit)
    layers = zip(problem.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    costs, hardware, precision = problem.costs, problem.hardware, problem.precision
    return sum(
        count * sequence_parallel_seconds(layer, tp, load, costs, hardware, precision, input_grad=input_grad)
        for (layer, input_grad), count in Counter(layers).items()
    )


def _chunked_seconds(problem: PlanningProblem, layer_costs: LayerCosts, unit: str, tp: int, num_chunks: int) -> float:
    """Return the seconds of a microbatch of mean size in the unit's forward and backward."""
    load = _mean_load(problem, layer_costs, unit)
    split = TokenSplit(layer_costs.has_sp(unit, tp), num_chunks)
    layers = zip(problem.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    return sum(
        count * layer_costs.costs.seconds(LayerWork(layer, tp, load, kind, input_grad=input_grad, split=split))
        for (layer, input_grad), count in Counter(layers).items()
        for kind in _KINDS
    )


def _mean_load(problem: PlanningProblem, layer_costs: LayerCosts, unit: str) -> TokenLoad:
    """Return the mean microbatch of the unit, of one group each."""
    unsplit: BatchSplit = tuple(UnitSplit(u.name, 1, problem.batches.global_batch) for u in problem.shape.units)
    return layer_costs.loads.of_unit(unit, unsplit).mean()
