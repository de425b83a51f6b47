"""State how evenly a simulated candidate fills its pipeline ranks: the figures of OmniBal's tables 4 and 5."""

from collections.abc import Mapping

import numpy as np

from mmtrain.costs import RankMemory, num_parameters
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.planning.artifact.plan import SharedSequences, StageBalance
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import FloatArray, LayerCosts
from mmtrain.planning.space.batch_split import BatchSplit, batch_split_of
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.context_loads import split_microbatches
from mmtrain.program.ir.graph import LLM, Edge, Stage, StageGraph

SECONDS_PER_DAY = 86_400
PipelineRanks = Mapping[tuple[Stage, ...], RankMemory]  # stages that some ranks hold together -> what one of them holds


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
        phases=layer_costs.phase_loads(batch_split_of(graph)) if dispatches else None,
        dispatch_s=candidate.bubbles["dispatch"] * candidate.step_time_s if dispatches else None,
        shared=_shared_sequences(graph, layer_costs),
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
            totals = (layer_costs.microbatch_loads(edge.src.unit, split).total(batch) for batch in range(num_batches))
            elements += sum(entered.input_elements(total.tokens, total.num_sequences) for total in totals)
    return elements / num_batches * ELEMENT_BYTES[layer_costs.precision]


def _shared_sequences(graph: StageGraph, layer_costs: LayerCosts) -> SharedSequences | None:
    """Return which share of the sampled sequences is cut; None where no ranks share them."""
    mesh = graph.mesh(LLM)
    if mesh.cp == 1:
        return None
    batches = layer_costs.lay_out(batch_split_of(graph))
    splits = [split for batch in batches for split in split_microbatches(mesh, batch).values()]
    num_cut, num_sequences, cut_tokens, num_tokens = np.array(
        [(len(split.cut), len(split.lengths), sum(split.num_cut_tokens), sum(split.num_tokens)) for split in splits]
    ).sum(axis=0)
    return SharedSequences(
        sequences=round(float(num_cut / num_sequences), 4),
        tokens=round(float(cut_tokens / num_tokens), 4),
        work_over_mean=round(float(np.mean([split.work_over_mean for split in splits])), 4),
    )


def _feature_elements(edge: Edge, split: BatchSplit, layer_costs: LayerCosts) -> int:
    """Return the elements of the features that flow along an edge between units in all sampled batches."""
    src, dst = edge.src.unit, edge.dst.unit
    routes = (loads.routes[src, dst] for loads in layer_costs.step_loads(split))
    rows = sum(int(spans[:, 2].sum()) for route in routes for spans in route.spans.values())
    return rows * layer_costs.shape.edge(src, dst).width


def _variance(values: FloatArray) -> float:
    return float(f"{values.var():.6g}")
