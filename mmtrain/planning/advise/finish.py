"""From the chosen candidate to the plan: its prediction, and the losers beside it."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, groupby

from mmtrain.costs import RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.models.shapes.model_shape import UnitShape, unit_offload
from mmtrain.planning.advise.stage_balance import stage_balance
from mmtrain.planning.advise.why_slower import explain_measured_slower, explain_slower
from mmtrain.planning.artifact.data_drift import summarize_data
from mmtrain.planning.artifact.plan import AS_FAST_TEXT, Alternative, MeasuredPlan, Plan, Prediction, UnitPlan
from mmtrain.planning.colocated.encoder_order import scheduling_efficiency
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.space.batch_split import batch_split_of
from mmtrain.planning.space.candidate import (
    COMPLEXITY_LEVELS,
    EQUAL_STEP_TIME_RATIO,
    Candidate,
    CandidateStage,
    Rejected,
)
from mmtrain.program.ir.graph import StageId


def finish_plan(chosen: Candidate, evaluator: Evaluator, alternatives: Sequence[Alternative] = ()) -> Plan:
    """Return the saved artefact of a simulated candidate."""
    problem = evaluator.problem
    return Plan(
        recipe_sha256=problem.recipe_sha256,
        hardware=problem.hardware.name,
        world_size=chosen.graph.world_size,
        precision=problem.precision,
        placement=chosen.placement,
        units={name: _with_activations(unit, problem.shape.unit(name)) for name, unit in chosen.layout.units.items()},
        schedule=chosen.schedule,
        data=summarize_data(problem.batches.lengths, evaluator.layer_costs.graph_memory(chosen.graph).largest_load),
        predicted=predict(chosen, evaluator),
        measured=_as_measured(chosen, evaluator),
        alternatives=tuple(alternatives),
    )


def _with_activations(unit: UnitPlan, shape: UnitShape) -> UnitPlan:
    again = any(layer.recomputes_activation for layer in shape.layers)
    return unit.model_copy(update={"recompute_activation_function": again, "offload": unit_offload(shape)})


def _as_measured(chosen: Candidate, evaluator: Evaluator) -> MeasuredPlan | None:
    if chosen.measured_step_s is None:
        return None
    fits_as_counted = chosen.peak_bytes <= evaluator.memory_bytes
    return MeasuredPlan(
        step_time_s=chosen.measured_step_s, memory_ratio=None if fits_as_counted else chosen.memory_ratio
    )


def predict(chosen: Candidate, evaluator: Evaluator) -> Prediction:
    """Return what a run of the candidate will see, if the costs are right."""
    layer_costs, machine = evaluator.layer_costs, evaluator.problem.hardware
    memory = _memory_by_ranks(chosen)
    rank_seconds = chosen.step_time_s * chosen.graph.world_size
    flops = layer_costs.model_flops(batch_split_of(chosen.graph))
    efficiency = None
    if chosen.placement == "colocated":
        efficiency = scheduling_efficiency(chosen.graph, chosen.schedule, layer_costs, machine)
    kinds_gib = {
        ranks: {kind: round(nbytes / GIB, 4) for kind, nbytes in held.by_kind().items()}
        for ranks, held in memory.items()
    }
    return Prediction(
        step_time_s=chosen.step_time_s,
        mfu=flops / (rank_seconds * machine.peak_flops(layer_costs.precision)),
        tokens_per_s_per_gpu=layer_costs.tokens() / rank_seconds,
        peak_memory_gib={ranks: round(held.total / GIB, 4) for ranks, held in memory.items()},
        memory_kinds_gib=kinds_gib,
        host_gib={
            ranks: round(held.host_activations / GIB, 4) for ranks, held in memory.items() if held.host_activations
        },
        bubbles=dict(chosen.bubbles),
        cost_source=layer_costs.costs.source,
        scheduling_efficiency=efficiency,
        memory_gib=round(machine.memory_bytes / GIB, 4),
        balance=stage_balance(chosen, evaluator),
    )


def reject_slower(loser: Candidate, chosen: Candidate) -> Rejected:
    """Return why a candidate that fits was not chosen."""
    if loser.stage == CandidateStage.MEASURED:
        reason = explain_measured_slower(loser, chosen)
    elif (
        loser.step_time_s <= chosen.step_time_s
        and loser.assignment.complexity_level > chosen.assignment.complexity_level
    ):
        reason = f"{AS_FAST_TEXT}, but with {_added_complexity(loser)}"
    elif loser.step_time_s <= chosen.step_time_s * EQUAL_STEP_TIME_RATIO:
        reason = f"{AS_FAST_TEXT}, but with more pipeline ranks, chunks or tensor parallelism"
    else:
        reason = explain_slower(loser, chosen)
    return Rejected(loser, reason)


def _added_complexity(candidate: Candidate) -> str:
    """Return what the candidate needs that simpler ones do not."""
    return {
        "replicas": "replicas",
        "one pipeline": "a pipeline",
        "sharded replicas": "sharded units that wait for each other in every layer",
        "ranks of their own": "units on ranks of their own",
        "shared ranks": "encoders in the bubbles of the LLM",
    }[COMPLEXITY_LEVELS[candidate.assignment.complexity_level]]


def describe_loser(loser: Rejected, evaluator: Evaluator) -> Alternative:
    """Return the loser's line of the ranking, with how evenly it fills its ranks where it was simulated."""
    if loser.candidate.simulation is None:
        return loser.alternative
    return loser.alternative.model_copy(update={"balance": stage_balance(loser.candidate, evaluator)})


def best_alternatives(
    losers: Sequence[Alternative], num_shown: int, preferred_labels: tuple[str, ...] = ()
) -> tuple[Alternative, ...]:
    """Return the best losers by step time, those never simulated last.

    With the best of each placement if possible, then with those whose summary starts with one of `preferred_labels`.
    """
    ranked = sorted(losers, key=lambda loser: math.inf if loser.step_time_s is None else loser.step_time_s)
    placements = [loser.placement for loser in ranked]
    preferences = [
        (placements.index(loser.placement) == i, loser.summary.startswith(preferred_labels))
        for i, loser in enumerate(ranked)
    ]
    preferred = sorted(range(len(ranked)), key=preferences.__getitem__, reverse=True)
    return tuple(ranked[i] for i in sorted(preferred[:num_shown]))


def _memory_by_ranks(chosen: Candidate) -> dict[str, RankMemory]:
    """Return what is held, by range of ranks that hold the same stages; every rank is in one range."""
    held: defaultdict[int, tuple[StageId, ...]] = defaultdict(tuple)
    for stage in chosen.graph.stages:
        for rank in chain.from_iterable(stage.tp_groups):
            held[rank] += (stage.id,)
    memory_of_stages = {held[rank]: memory for rank, memory in chosen.memory.items()}
    memory_by_ranks = {}
    for stages, group in groupby(sorted(held), key=lambda rank: held[rank]):
        ranks = list(group)
        name = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        memory_by_ranks[name] = memory_of_stages[stages]
    return memory_by_ranks
