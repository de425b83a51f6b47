"""Which units run their linears in chunks of tokens, which hide the communication of tensor parallelism."""

from collections import Counter

from mmtrain.costs import ComputeKind, TokenSplit
from mmtrain.planning.layer_costs.layer_costs import LayerCosts, TpChunks
from mmtrain.planning.layer_costs.sequence_parallel import choose_sequence_parallelism
from mmtrain.planning.space.batch_split import BatchSplit, UnitSplit
from mmtrain.planning.space.problem import PlanningProblem

# Numbers of chunks that are tried. One of c chunks of a collective stays in the open, so more than 16 hide little more.
CHUNK_COUNTS = (2, 4, 8, 16)
# Of a microbatch's time, that chunks must save to be worth another order of work: as much as two plans may differ and
# still count as equally fast (`plan.AS_FAST_RATIO`).
MIN_SAVED_SHARE = 0.01
_KINDS: tuple[ComputeKind, ComputeKind] = ("forward", "backward")


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
            seconds = {count: _seconds(problem, layer_costs, unit, tp, count) for count in (1, *CHUNK_COUNTS)}
            fastest = min(CHUNK_COUNTS, key=seconds.__getitem__)
            if setting is True or seconds[fastest] <= (1 - MIN_SAVED_SHARE) * seconds[1]:
                chosen.setdefault(unit, {})[tp] = fastest
    return chosen


def _seconds(problem: PlanningProblem, layer_costs: LayerCosts, unit: str, tp: int, num_chunks: int) -> float:
    """Return the seconds of a microbatch of mean size in the unit's forward and backward."""
    unsplit: BatchSplit = tuple(UnitSplit(u.name, 1, problem.batches.global_batch) for u in problem.shape.units)
    load = layer_costs.microbatch_loads(unit, unsplit).mean()
    split = TokenSplit(layer_costs.has_sp(unit, tp), num_chunks)
    layers = zip(problem.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    return sum(
        count * layer_costs.costs.seconds(layer, tp, load, kind, input_grad=input_grad, split=split)
        for (layer, input_grad), count in Counter(layers).items()
        for kind in _KINDS
    )


def with_token_splits(problem: PlanningProblem, layer_costs: LayerCosts, *, sp_at_any_cost: bool = False) -> LayerCosts:
    """Return the costs with the sequence parallelism and the chunks of tokens that are chosen for the problem."""
    sharded = layer_costs.with_settings(
        sp=choose_sequence_parallelism(problem, layer_costs, at_any_cost=sp_at_any_cost), chunks={}
    )
    return sharded.with_settings(chunks=choose_tp_chunks(problem, sharded))
