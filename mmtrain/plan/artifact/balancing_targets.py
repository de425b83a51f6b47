"""What a plan wants the loader to even out and to order, as the numbers that `balance` applies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mmtrain.balance import BalancedLoad, PipelineRank, SampleLengths, SequenceCost, StepTargets
from mmtrain.costs import CostModel, TokenLoad, costs_for, input_grad_needed, machine_for
from mmtrain.models.model_shape import LayerShape, ModelShape, build_model_shape
from mmtrain.plan.artifact.marginal_cost import MarginalCost, marginal_cost
from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.artifact.plan_graph import stage_graph
from mmtrain.plan.artifact.plan_precision import plan_precision
from mmtrain.plan.artifact.schedule_table import build_schedule_table, is_single_chain
from mmtrain.program.ir.graph import LLM, Stage, StageGraph, StageId
from mmtrain.recipe.schema import Recipe

TYPICAL_FILL_RATIO = 0.98  # of `data.seq_len`, in a typical microbatch
# Integer cost of a typical microbatch on the busiest rank: sums over a step stay below 2^53, so they are exact.
MICROBATCH_COST_UNITS = 2.0**36
MAX_TIME_SHARE_APART = 0.1  # of two ranks' time spent on different things, up to which one of them stands for both


UnitCosts = dict[str, MarginalCost]  # by unit


@dataclass(frozen=True)
class _RankWork:
    """What one rank computes of every unit."""

    forward: UnitCosts
    backward: UnitCosts

    def busy(self, units: frozenset[str]) -> UnitCosts:
        both = [self.forward, self.backward]
        return {u: sum((lines[u] for lines in both if u in lines), MarginalCost()) for u in self.forward if u in units}


def derive_step_targets(recipe: Recipe, plan: Plan, lengths: SampleLengths) -> StepTargets:
    """What to arrange the samples of a step for, under this plan and its costs.

    Units that share ranks are summed, units on ranks of their own evened apart. Prices are the slopes of the cost model
    at a typical microbatch: what a sample adds to one. An encoder that serves all LLM replicas at once asks nothing of
    them, since its items go to any of its replicas. Order in time matters to pipelines over several ranks: plain 1F1B
    along one chain of ranks is known by its places alone, all else by its timetable.
    """
    model, machine = build_model_shape(recipe), machine_for(recipe, plan.hardware)
    graph = stage_graph(plan, model)
    costs = costs_for(machine, plan_precision(plan, recipe), recipe.cluster.costs)
    typical = typical_loads(graph, lengths, recipe.data.seq_len)
    ranks = _work_of_ranks(graph, model, costs, typical)
    totals = [sum(_seconds(work.busy(frozenset(typical)), typical).values()) for work in ranks]
    scale = MICROBATCH_COST_UNITS / max(max(totals), 1e-15)
    encoders = [mesh.unit for mesh in graph.meshes if mesh.unit != LLM]
    in_time = bool(encoders) and len(ranks) > 1
    plain = plan.schedule.kind == "1f1b" and is_single_chain(graph)
    return StepTargets(
        loads=_loads(ranks, graph, typical, scale),
        pipeline=tuple(PipelineRank(_prices(work.forward, scale), _prices(work.backward, scale)) for work in ranks)
        if in_time and plain
        else (),
        schedule_table=build_schedule_table(
            graph, plan.schedule, _prices_of_stages(graph, model, costs, typical, scale)
        )
        if in_time and not plain
        else None,
        item_costs={u: _prices(_together(ranks, u), scale)[u] for u in encoders},
        replica_nodes={mesh.unit: _nodes(graph, mesh.unit, machine.ranks_per_node) for mesh in graph.meshes},
    )


def typical_loads(graph: StageGraph, lengths: SampleLengths, seq_len: int) -> dict[str, TokenLoad]:
    """The mean microbatch of every unit, when the LLM's are as full as grouping makes them."""
    tokens, llm = max(int(TYPICAL_FILL_RATIO * seq_len), 1), graph.mesh(LLM)
    groups = max(float(lengths.tokens.sum()) / tokens, 1e-9)  # in the whole dataset
    found = {LLM: _mean_load(lengths.tokens, groups)}
    for unit, items in lengths.items.items():
        mesh = graph.mesh(unit)
        share = mesh.dp * mesh.num_microbatches / (llm.dp * llm.num_microbatches)
        found[unit] = _mean_load(items.tokens, groups * share)
    return found


def _mean_load(lengths: np.ndarray, microbatches: float) -> TokenLoad:
    if not len(lengths):
        return TokenLoad(0, 0, 0, 0)
    sums = (float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum()), float(len(lengths)))
    tokens, sum_sq, num = (max(round(value / microbatches), 1) for value in sums)
    return TokenLoad(tokens, sum_sq, int(lengths.max()), num)


def _work_of_ranks(
    graph: StageGraph, model: ModelShape, costs: CostModel, typical: Mapping[str, TokenLoad]
) -> list[_RankWork]:
    """Of the ranks that the first LLM replica's microbatches pass, in the order of passing, one of each TP group."""
    home = {rank: s.tp_groups[0][0] for s in graph.stages if s.id.unit == LLM for rank in s.tp_groups[0]}
    others = {rank for s in graph.stages if s.id.unit == LLM for tp_group in s.tp_groups[1:] for rank in tp_group}
    needs = input_grad_needed(model)
    found: dict[int, _RankWork] = {}
    for stage in (graph.stage(sid) for sid in graph.order):
        unit = stage.id.unit
        mesh, layers = graph.mesh(unit), model.unit(unit).layers
        lines = _stage_slopes(stage, layers, needs[unit], mesh.tp, costs, typical[unit])
        own = 1 if unit == LLM else mesh.dp // graph.num_groups
        at = [home.get(tp_group[0], tp_group[0]) for tp_group in stage.tp_groups[:own] if tp_group[0] not in others]
        shared = [rank for rank in dict.fromkeys(at) if rank in home.values()]
        for rank in shared or at[:1]:
            work = found.setdefault(rank, _RankWork({}, {}))
            for kept, line in zip((work.forward, work.backward), lines, strict=True):
                kept[unit] = kept.get(unit, MarginalCost()) + line
    return list(found.values())


def _prices_of_stages(
    graph: StageGraph, model: ModelShape, costs: CostModel, typical: Mapping[str, TokenLoad], scale: float
) -> dict[StageId, tuple[SequenceCost, SequenceCost]]:
    """What each stage's forward and backward cost."""
    needs, found = input_grad_needed(model), {}
    for stage in graph.stages:
        unit = stage.id.unit
        tp, layers = graph.mesh(unit).tp, model.unit(unit).layers
        forward, backward = _stage_slopes(stage, layers, needs[unit], tp, costs, typical[unit])
        found[stage.id] = _price(forward, scale), _price(backward, scale)
    return found


def _stage_slopes(
    stage: Stage, layers: Sequence[LayerShape], needs: Sequence[bool], tp: int, costs: CostModel, typical: TokenLoad
) -> tuple[MarginalCost, MarginalCost]:
    """Forward and backward (recompute included) of a stage near a typical load."""

    @cache
    def lines(layer: LayerShape, input_grad: bool, again: bool) -> tuple[MarginalCost, MarginalCost]:
        def backward(load: TokenLoad) -> float:
            seconds = costs.seconds(layer, tp, load, "backward", input_grad=input_grad)
            return seconds + (costs.seconds(layer, tp, load, "recompute") if again else 0.0)

        forward = marginal_cost(lambda load: costs.seconds(layer, tp, load, "forward"), typical)
        return forward, marginal_cost(backward, typical)

    each = [
        lines(layers[i], needs[i], i in stage.recompute and (layers[i].trainable or needs[i]))
        for i in range(*stage.layers)
    ]
    total_forward = sum((forward for forward, _ in each), MarginalCost())
    total_backward = sum((backward for _, backward in each), MarginalCost())
    return total_forward, total_backward


def _loads(
    ranks: list[_RankWork], graph: StageGraph, typical: Mapping[str, TokenLoad], scale: float
) -> tuple[BalancedLoad, ...]:
    """The different kinds of work that ranks do, each once, the coarsest (most of encoders) first."""
    if graph.mesh(LLM).dp == 1:
        return ()
    counted = frozenset(typical) if graph.num_groups > 1 else frozenset({LLM})
    busy = [(lines, _seconds(lines, typical)) for lines in (work.busy(counted) for work in ranks)]
    busy = sorted((entry for entry in busy if sum(entry[1].values()) > 0), key=lambda e: -sum(e[1].values()))
    kept: list[tuple[UnitCosts, dict[tuple[str, str], float]]] = []
    for lines, seconds in busy:
        if all(_apart(seconds, other) > MAX_TIME_SHARE_APART for _, other in kept):
            kept.append((lines, seconds))
    whole = sum(sum(seconds.values()) for _, seconds in kept)
    kept.sort(key=lambda e: -sum(s for (unit, _), s in e[1].items() if unit != LLM) / sum(e[1].values()))
    return tuple(BalancedLoad(_prices(lines, scale), round(sum(s.values()) / whole, 6)) for lines, s in kept)


def _seconds(lines: UnitCosts, typical: Mapping[str, TokenLoad]) -> dict[tuple[str, str], float]:
    """Seconds of a typical microbatch, by unit and by what they grow with."""
    found: dict[tuple[str, str], float] = {}
    for unit, line in lines.items():
        found[unit, "tokens"] = line.linear * typical[unit].tokens
        found[unit, "pairs"] = line.quadratic * typical[unit].sum_sq
    return found


def _apart(one: Mapping[tuple[str, str], float], other: Mapping[tuple[str, str], float]) -> float:
    """How much of their time two ranks spend on different things, 0 to 1."""
    shares = [{key: s / sum(seconds.values()) for key, s in seconds.items()} for seconds in (one, other)]
    keys = shares[0].keys() | shares[1].keys()
    return sum(abs(shares[0].get(key, 0.0) - shares[1].get(key, 0.0)) for key in sorted(keys)) / 2


def _together(ranks: list[_RankWork], unit: str) -> UnitCosts:
    """All of a unit's stages, both ways."""
    lines = (work.busy(frozenset({unit})).get(unit, MarginalCost()) for work in ranks)
    return {unit: sum(lines, MarginalCost())}


def _prices(lines: UnitCosts, scale: float) -> dict[str, SequenceCost]:
    return {u: _price(line, scale) for u, line in sorted(lines.items())}


def _price(line: MarginalCost, scale: float) -> SequenceCost:
    return SequenceCost(round(line.linear * scale), round(line.quadratic * scale))


def _nodes(graph: StageGraph, unit: str, ranks_per_node: int) -> tuple[int, ...]:
    """Node of each replica's end at which features leave (an encoder's last stage) or arrive (the LLM's first)."""
    stages = [s for s in graph.stages if s.id.unit == unit]
    end = min(stages, key=lambda s: s.id.index) if unit == LLM else max(stages, key=lambda s: s.id.index)
    return tuple(tp_group[0] // ranks_per_node for tp_group in end.tp_groups)
