"""From the chosen candidate to the plan: its prediction, and the losers beside it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby

import numpy as np

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, mean_off_node_volumes, off_node_volumes
from mmtrain.balance.grouping.imbalance import dist_ratio
from mmtrain.costs import AnalyticCosts, RankMemory, num_parameters
from mmtrain.costs.framework import OWN_RUNTIME
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.published_errors import expected_error, layout_kind
from mmtrain.models.shapes.model_shape import UnitShape, unit_offload
from mmtrain.planning.advise.expert_prediction import predict_experts
from mmtrain.planning.advise.why_slower import explain_measured_slower, explain_slower
from mmtrain.planning.artifact.plan import (
    AS_FAST_TEXT,
    Alternative,
    CopyPrediction,
    MeasuredPlan,
    Plan,
    Prediction,
    SchedulePlan,
    SharedSequences,
    SpreadChoice,
    StageBalance,
    UnitPlan,
)
from mmtrain.planning.artifact.plan_change import summarize_data
from mmtrain.planning.colocated.encoder_order import scheduling_efficiency
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import scheduled_graph
from mmtrain.planning.layer_costs.layer_costs import FloatArray, LayerCosts
from mmtrain.planning.space.candidate import (
    COMPLEXITY_LEVELS,
    EQUAL_STEP_TIME_RATIO,
    Candidate,
    CandidateStage,
    Rejected,
)
from mmtrain.planning.space.sample_batches import BatchSplit, batch_split_of
from mmtrain.program.ir.context_loads import split_microbatches
from mmtrain.program.ir.graph import LLM, Edge, Stage, StageGraph, StageId
from mmtrain.program.simulation.muon_timing import muon_seconds

SECONDS_PER_DAY = 86_400
PipelineRanks = Mapping[tuple[Stage, ...], RankMemory]  # stages that some ranks hold together -> what one of them holds


def finish_plan(
    chosen: Candidate,
    evaluator: Evaluator,
    alternatives: Sequence[Alternative] = (),
    other_choices: tuple[SpreadChoice, ...] = (),
) -> Plan:
    """Return the saved artefact of a simulated candidate.

    alternatives: that lost. other_choices: that would win if ranks were less or more unevenly fast.
    """
    problem = evaluator.problem
    return Plan(
        recipe_sha256=problem.recipe_sha256,
        settings=dict(problem.settings),
        hardware=problem.hardware.name,
        world_size=chosen.graph.world_size,
        precision=problem.precision,
        placement=chosen.placement,
        units={name: _with_activations(unit, problem.shape.unit(name)) for name, unit in chosen.layout.units.items()},
        schedule=chosen.schedule,
        data=summarize_data(
            problem.batches.lengths,
            evaluator.layer_costs.graph_memory(chosen.graph).largest_load,
            problem.seq_len,
            problem.batches.samples_per_batch,
        ),
        predicted=predict(chosen, evaluator).model_copy(
            update={"other_choices": other_choices, "experts": predict_experts(chosen, evaluator)}
        ),
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
    if fits_as_counted:
        return MeasuredPlan(step_time_s=chosen.measured_step_s)
    return MeasuredPlan(
        step_time_s=chosen.measured_step_s,
        memory_ratio=chosen.memory_ratio,
        ratio_by_rank=dict(chosen.ratio_by_rank),
    )


def predict(chosen: Candidate, evaluator: Evaluator) -> Prediction:
    """Return what a run of the candidate will see, if the costs are right."""
    layer_costs, machine = evaluator.layer_costs, evaluator.problem.hardware
    memory = _memory_by_ranks(chosen)
    rank_seconds = chosen.step_time_s * chosen.graph.world_size
    flops = layer_costs.model_flops(batch_split_of(chosen.graph))
    efficiency = coarse_efficiency = None
    if chosen.placement == "colocated":
        efficiency = scheduling_efficiency(chosen.graph, chosen.schedule, layer_costs, machine)
        coarse = SchedulePlan(kind="coarse", num_microbatches=chosen.schedule.num_microbatches)
        coarse_graph = scheduled_graph(chosen.layout, coarse, layer_costs)
        coarse_efficiency = scheduling_efficiency(coarse_graph, coarse, layer_costs, machine)
    kinds_gib = {
        ranks: {kind: round(nbytes / GIB, 4) for kind, nbytes in held.by_kind().items()}
        for ranks, held in memory.items()
    }
    return Prediction(
        step_time_s=chosen.step_time_s,
        mfu=flops / (rank_seconds * machine.peak_flops(layer_costs.precision)),
        tokens_per_s_per_gpu=layer_costs.loads.tokens() / rank_seconds,
        peak_memory_gib={ranks: round(held.total / GIB, 4) for ranks, held in memory.items()},
        memory_kinds_gib=kinds_gib,
        host_gib={
            ranks: round(held.host_activations / GIB, 4) for ranks, held in memory.items() if held.host_activations
        },
        bubbles=dict(chosen.bubbles),
        cost_source=_cost_source(chosen, evaluator),
        scheduling_efficiency=efficiency,
        coarse_scheduling_efficiency=coarse_efficiency,
        memory_gib=round(machine.memory_bytes / GIB, 4),
        balance=stage_balance(chosen, evaluator),
        muon_s=_muon_seconds(chosen, evaluator),
        copies=_copies(memory.values(), evaluator),
    )


def _copies(memory: Iterable[RankMemory], evaluator: Evaluator) -> CopyPrediction | None:
    """Return what copies of the state take on the rank that holds most; None if the run takes none.

    A copy comes from the device, is read once for its sum, and goes to the peer, where it is read once more. Where
    ranks compute in host memory, they read and write it themselves.
    """
    machine, copies = evaluator.problem.hardware, evaluator.problem.state_bytes.copies
    if not copies.number:
        return None
    most_bytes = max(held.copies + held.host_copies for held in memory)
    one_bytes = most_bytes / copies.number
    if machine.host_bytes_per_s is None:
        copy_s = 3 * one_bytes / machine.moved_bytes_per_s
    else:
        copy_s = one_bytes / machine.host_bytes_per_s
    send_s = machine.inter_node.seconds(one_bytes) if copies.has_peers else 0.0
    return CopyPrediction(gib=round(most_bytes / GIB, 4), seconds=copy_s + send_s)


def _muon_seconds(chosen: Candidate, evaluator: Evaluator) -> float | None:
    layer_costs, ranks_per_node = evaluator.layer_costs, evaluator.problem.hardware.ranks_per_node
    if not layer_costs.orthogonalizes:
        return None
    seconds = muon_seconds(chosen.graph, layer_costs.shape, layer_costs.costs, layer_costs.precision, ranks_per_node)
    return max(seconds.values())


def _cost_source(chosen: Candidate, evaluator: Evaluator) -> str:
    """Say where costs come from, and if they are modelled as mmtrain runs, how far such predictions were off."""
    costs, problem = evaluator.layer_costs.costs, evaluator.problem
    if not isinstance(costs, AnalyticCosts) or costs.execution != OWN_RUNTIME:
        return costs.source
    assignment, llm = chosen.assignment, chosen.assignment.meshes[LLM]
    stages = 2 if chosen.placement == "disaggregated" else llm.pp  # units on ranks of their own wait for each other
    layout = layout_kind(is_sharded=assignment.shard is not None, pp=stages, cp=llm.cp)
    is_multimodal, has_experts = len(problem.shape.units) > 1, problem.recipe.model.llm.moe is not None
    error = expected_error(problem.hardware, layout, is_multimodal=is_multimodal, has_experts=has_experts)
    return f"{costs.source}, {error}"


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


def stage_balance(candidate: Candidate, evaluator: Evaluator) -> StageBalance:
    """Return the variances over a simulated candidate's pipeline ranks, what they send, and the memory they have left.

    Forwards are the mean over the sampled batches; recomputation and backwards are not among them.
    """
    graph, layer_costs = candidate.fitted_graph, evaluator.layer_costs
    seconds = layer_costs.stage_seconds(graph)
    num_llm = graph.mesh(LLM).num_microbatches
    parameters, num_layers, forward_s = [], [], []
    pipeline_ranks = _pipeline_ranks(candidate)
    for stages in pipeline_ranks:
        parameters.append(sum(_stage_parameters(stage, graph, layer_costs) for stage in stages))
        num_layers.append(sum(stage.layers[1] - stage.layers[0] for stage in stages))
        of_stages = (seconds[s.id].forward.mean() * graph.mesh(s.id.unit).num_microbatches for s in stages)
        forward_s.append(sum(of_stages) / num_llm)
    left_gib = {
        " ".join(str(stage.id) for stage in stages): round((evaluator.memory_bytes - held.total) / GIB, 4)
        for stages, held in pipeline_ranks.items()
    }
    dispatches = graph.mesh(LLM).dispatch is not None
    gpu_seconds = candidate.step_time_s * graph.world_size / evaluator.problem.batches.samples_per_batch
    return StageBalance(
        parameter_variance=_variance(np.asarray(parameters) / 1e9),
        layer_variance=_variance(np.asarray(num_layers, dtype=np.float64)),
        forward_variance=_variance(np.asarray(forward_s) * 1e3),
        sent_gib=round(_sent_bytes(graph, layer_costs) / GIB, 6),
        memory_left_gib=left_gib,
        gpu_days_per_million_samples=round(gpu_seconds * 1e6 / SECONDS_PER_DAY, 4),
        phases=layer_costs.loads.of_phases(batch_split_of(graph)) if dispatches else None,
        dispatch_s=candidate.bubbles["dispatch"] * candidate.step_time_s if dispatches else None,
        off_node=_off_node_volumes(graph, evaluator),
        shared=_shared_sequences(candidate, layer_costs),
    )


def _pipeline_ranks(candidate: Candidate) -> PipelineRanks:
    """Return the sets of stages that ranks of the first replica group hold, with what a rank of each set holds."""
    graph = candidate.fitted_graph
    held: dict[int, tuple[Stage, ...]] = {}
    for stage in graph.stages:
        for tp_group in stage.tp_groups:
            for rank in tp_group:
                held[rank] = (*held.get(rank, ()), stage)
    pipeline_ranks: dict[tuple[Stage, ...], RankMemory] = {}
    for rank, memory in candidate.memory.items():
        pipeline_ranks.setdefault(held[rank], memory)
    return pipeline_ranks


def _stage_parameters(stage: Stage, graph: StageGraph, layer_costs: LayerCosts) -> int:
    """Return the parameters of a stage on one rank, frozen ones too."""
    layers = layer_costs.shape.unit(stage.id.unit).layers[slice(*stage.layers)]
    return sum(num_parameters(layer, graph.mesh(stage.id.unit).tp) for layer in layers)


def _sent_bytes(graph: StageGraph, layer_costs: LayerCosts) -> float:
    """Return the bytes that forwards send between different ranks in a step, of all replicas, mean over the batches.

    An encoder's features count once for each stage that they enter, also those that a `colocated` rank keeps.
    """
    split = batch_split_of(graph)
    num_batches = len(layer_costs.batches.groups)
    elements = 0
    for edge in graph.edges:
        sender, receiver = graph.stage(edge.src), graph.stage(edge.dst)
        if sender.tp_groups == receiver.tp_groups:
            continue
        if edge.crosses_units:
            elements += _feature_elements(edge, split, layer_costs)
        else:
            entered = layer_costs.shape.unit(edge.dst.unit).layers[receiver.layers[0]]
            totals = (layer_costs.loads.of_unit(edge.src.unit, split).total(batch) for batch in range(num_batches))
            elements += sum(entered.input_elements(total.tokens, total.num_sequences) for total in totals)
    return elements / num_batches * ELEMENT_BYTES[layer_costs.precision]


def _off_node_volumes(graph: StageGraph, evaluator: Evaluator) -> dict[str, OffNodeVolume]:
    """Return the bytes of features that dispatches send to other nodes in a step, by unit, mean over the batches."""
    mesh, machine, layer_costs = graph.mesh(LLM), evaluator.problem.hardware, evaluator.layer_costs
    if not graph.dispatches_items or mesh.exchange != "all_to_all" or graph.world_size <= machine.ranks_per_node:
        return {}
    row_bytes = {
        unit: width * ELEMENT_BYTES[layer_costs.precision] for unit, width in layer_costs.shape.feature_widths.items()
    }
    batches = layer_costs.loads.lay_out(batch_split_of(graph))
    return mean_off_node_volumes(
        [off_node_volumes(batch, machine.ranks_per_node, row_bytes, mesh.tp) for batch in batches]
    )


def _shared_sequences(candidate: Candidate, layer_costs: LayerCosts) -> SharedSequences | None:
    """Return which share of the sampled sequences is cut; None where no ranks share them."""
    graph = candidate.fitted_graph
    mesh = graph.mesh(LLM)
    if mesh.cp == 1:
        return None
    batches = layer_costs.loads.lay_out(batch_split_of(graph))
    splits = [split for batch in batches for split in split_microbatches(mesh, batch).values()]
    num_cut, num_sequences, cut_tokens, num_tokens = np.array(
        [(len(split.cut), len(split.lengths), sum(split.num_cut_tokens), sum(split.num_tokens)) for split in splits]
    ).sum(axis=0)
    return SharedSequences(
        sequences=round(float(num_cut / num_sequences), 4),
        tokens=round(float(cut_tokens / num_tokens), 4),
        work_over_mean=round(float(np.mean([split.work_over_mean for split in splits])), 4),
        sp_ratio={
            unit: sp_ratio(graph, unit, layer_costs)
            for unit in candidate.layout.units
            if unit == LLM or candidate.placement in ("unified", "replicated")
        },
    )


def sp_ratio(graph: StageGraph, unit: str, layer_costs: LayerCosts) -> float:
    """Return OmniBal's dist ratio (eq. 2) over the replicas of a unit that share the microbatches of an LLM replica."""
    num_llm_replicas = graph.mesh(LLM).dp
    tokens = layer_costs.loads.of_unit(unit, batch_split_of(graph)).tokens
    num_batches, _, num_microbatches = tokens.shape
    by_group = tokens.reshape(num_batches, num_llm_replicas, -1, num_microbatches).swapaxes(2, 3)
    microbatches = by_group.reshape(-1, by_group.shape[-1], 1)
    return round(float(dist_ratio(microbatches)[0]), 4)


def _feature_elements(edge: Edge, split: BatchSplit, layer_costs: LayerCosts) -> int:
    """Return the elements of the features that flow along an edge between units in all sampled batches."""
    src, dst = edge.src.unit, edge.dst.unit
    unit = dst if src == LLM else src
    rows = sum(int(batch.items[unit].features.sum()) for batch in layer_costs.loads.lay_out(split))
    return rows * layer_costs.shape.edge(src, dst).width


def _variance(values: FloatArray) -> float:
    return float(f"{values.var():.6g}")
