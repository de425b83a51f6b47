"""Derive step targets from a plan: what the loader balances and orders the samples of a step for, as integers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from mmtrain.balance import BalancedLoad, PipelineRank, SampleLengths, SequenceCost, StepTargets
from mmtrain.balance.columns import Lengths, row_blocks
from mmtrain.costs import CostModel, TokenLoad, TokenSplit, costs_for, input_grad_needed, machine_with_spread
from mmtrain.costs.cost_model import LayerWork
from mmtrain.models.shapes.model_shape import LayerShape, ModelShape, build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.planning.artifact.schedule_table import build_schedule_table, is_single_chain
from mmtrain.program.ir.graph import LLM, Stage, StageGraph, StageId
from mmtrain.recipe.settings.schema import Recipe

TYPICAL_FILL_RATIO = 0.98  # tokens of a typical LLM microbatch over `data.seq_len`
# Integer cost of a typical microbatch on the busiest rank: sums over a step stay below 2^53, so they are exact.
MICROBATCH_COST_UNITS = 2.0**36
MAX_TIME_SHARE_APART = 0.1  # share of their time that two ranks spend on different work and still count as alike
_MIN_SECONDS = 1e-15  # of a rank's microbatch; avoids division by zero for a model without work


@dataclass(frozen=True)
class MarginalCost:
    """Seconds linear * n + quadratic * s of n tokens in sequences with s = sum of squared lengths."""

    linear: float = 0.0  # seconds per token
    quadratic: float = 0.0  # seconds per pair of tokens in one sequence

    def __add__(self, other: "MarginalCost") -> "MarginalCost":
        return MarginalCost(self.linear + other.linear, self.quadratic + other.quadratic)

    def times(self, share: float) -> "MarginalCost":
        """Return the cost of a share of the tokens."""
        return MarginalCost(self.linear * share, self.quadratic * share)


UnitCosts = dict[str, MarginalCost]  # by unit
WorkSeconds = dict[tuple[str, str], float]  # by unit and by what the seconds grow with: tokens, or pairs of tokens


@dataclass(frozen=True)
class _RankWork:
    """What one rank computes for one microbatch of every unit that it holds."""

    forward: UnitCosts = field(default_factory=dict)
    backward: UnitCosts = field(default_factory=dict)

    def add(self, unit: str, forward: MarginalCost, backward: MarginalCost) -> None:
        self.forward[unit] = self.forward.get(unit, MarginalCost()) + forward
        self.backward[unit] = self.backward.get(unit, MarginalCost()) + backward

    def total(self, units: frozenset[str]) -> UnitCosts:
        """Return forward and backward together, of these units."""
        return {
            unit: sum((costs[unit] for costs in (self.forward, self.backward) if unit in costs), MarginalCost())
            for unit in self.forward
            if unit in units
        }


@dataclass(frozen=True)
class _StageCosts:
    """Marginal costs of a graph's stages at typical loads."""

    graph: StageGraph
    shape: ModelShape
    costs: CostModel
    typical: Mapping[str, TokenLoad]  # by unit, a typical microbatch
    is_unified: bool

    def of(self, stage: Stage) -> tuple[MarginalCost, MarginalCost]:
        """Return a stage's forward and its backward, with what is computed again in the latter."""
        unit = stage.id.unit
        mesh, typical = self.graph.mesh(unit), self.typical[unit]
        tp, split = mesh.tp, TokenSplit(stage.sp, mesh.tp_chunks)

        @cache
        def of_layer(layer: LayerShape, input_grad: bool, recomputed: bool) -> tuple[MarginalCost, MarginalCost]:
            def forward(load: TokenLoad) -> float:
                return self.costs.seconds(LayerWork(layer, tp, load, "forward", split=split))

            def backward(load: TokenLoad) -> float:
                backward_s = self.costs.seconds(LayerWork(layer, tp, load, "backward", input_grad, split))
                if not recomputed:
                    return backward_s
                return backward_s + self.costs.seconds(LayerWork(layer, tp, load, "recompute", split=split))

            return marginal_cost(forward, typical), marginal_cost(backward, typical)

        layers, input_grad = self.shape.unit(unit).layers, input_grad_needed(self.shape)[unit]
        by_layer = []
        for i in range(*stage.layers):
            has_backward = layers[i].trainable or input_grad[i]
            by_layer.append(of_layer(layers[i], input_grad[i], i in stage.recompute and has_backward))
        total_forward = sum((forward for forward, _ in by_layer), MarginalCost())
        total_backward = sum((backward for _, backward in by_layer), MarginalCost())
        if self.graph.reruns_forward(stage.id):
            total_backward += total_forward
        share = self._share_of_items(unit)
        return total_forward.times(share), total_backward.times(share)

    def _share_of_items(self, unit: str) -> float:
        """Return which share of a sample's items a rank computes, where a TP group of the LLM holds several replicas.

        Where replicas of the LLM share sequences, costs are those of the whole sequence in all units.
        """
        if not self.is_unified:
            return 1.0
        return self.graph.mesh(LLM).num_replicas / self.graph.mesh(unit).num_replicas


def derive_step_targets(recipe: Recipe, plan: Plan, lengths: SampleLengths) -> StepTargets:
    """Derive what to arrange the samples of a step for, under this plan and its costs.

    Units that share ranks are balanced by their sum, units on separate ranks each by itself. Costs are the marginal
    costs at a typical microbatch: what a sample adds to it. An encoder that serves all LLM replicas at once is not
    balanced between them, since its items go to any of its replicas. The order of microbatches matters to pipelines
    over several ranks: for plain 1F1B along one chain of ranks the targets list its ranks, for any other schedule they
    hold its table. With `data.reorder: off` only items are balanced, between the replicas of an encoder.

    Sharded units wait for each other in every phase, so the sum of a rank's work matters little: samples are balanced
    by their cost in the LLM, and replicas that dispatch exchange samples for that under any grouping. Items are
    dispatched by their cost in their encoder if the plan says `all`, and stay with their samples otherwise; with `none`
    samples stay where the stream puts them, too. Without `parallel.node_wise` the targets name no nodes.
    """
    shape, machine = planned_shape(plan, build_model_shape(recipe)), machine_with_spread(recipe, plan.hardware)
    machine = machine.at_pace_of(plan.world_size)  # as the planner has it
    graph = stage_graph(plan, shape)
    cost_model = costs_for(machine, plan.precision, recipe.cluster.costs)
    typical = typical_loads(graph, lengths, recipe.data.group_tokens)
    stage_costs = _StageCosts(graph, shape, cost_model, typical, plan.placement == "unified")
    ranks = _first_replica_work(stage_costs)
    busiest_s = max(sum(_seconds(rank.total(frozenset(typical)), typical).values()) for rank in ranks)
    scale = MICROBATCH_COST_UNITS / max(busiest_s, _MIN_SECONDS)
    encoders = [mesh.unit for mesh in graph.meshes if mesh.unit != LLM]
    reorder = recipe.data.reorder and plan.dispatch != "none"
    dispatches_samples = reorder and plan.dispatch is not None
    pipeline: tuple[PipelineRank, ...] = ()
    table = None
    if encoders and len(ranks) > 1 and reorder:
        if plan.schedule.kind == "1f1b" and is_single_chain(graph):
            pipeline = tuple(
                PipelineRank(_to_integers(rank.forward, scale), _to_integers(rank.backward, scale)) for rank in ranks
            )
        else:
            table = build_schedule_table(graph, plan.schedule, _integer_stage_costs(stage_costs, scale))
    return StepTargets(
        loads=_distinct_loads(ranks, graph, typical, scale) if reorder else (),
        pipeline=pipeline,
        schedule_table=table,
        item_costs={unit: _to_integer(_unit_cost(ranks, unit), scale) for unit in encoders},
        replica_nodes=_nodes_by_unit(graph, machine.ranks_per_node) if recipe.parallel.node_wise else {},
        reorder=reorder,
        dispatch=plan.dispatch == "all",
        sample_cost=_to_integer(_unit_cost(ranks, LLM), scale) if dispatches_samples else None,
        balance_as_padded=recipe.parallel.balance_as_padded(),
    )


def typical_loads(graph: StageGraph, lengths: SampleLengths, seq_len: int) -> dict[str, TokenLoad]:
    """Return the mean microbatch of every unit, when the LLM's are as full as grouping makes them."""
    llm = graph.mesh(LLM)
    tokens = max(int(TYPICAL_FILL_RATIO * seq_len), 1)
    num_groups = max(float(lengths.tokens.sum()) / tokens, 1e-9)  # in the whole dataset
    num_targets = round(float(lengths.targets.sum()) / num_groups)
    loads = {LLM: replace(_mean_load(lengths.tokens, num_groups), targets=num_targets)}
    for unit, items in lengths.items.items():
        mesh = graph.mesh(unit)
        per_llm_microbatch = mesh.dp * mesh.num_microbatches / (llm.dp * llm.num_microbatches)
        loads[unit] = _mean_load(items.tokens, num_groups * per_llm_microbatch)
    return loads


def _mean_load(lengths: Lengths, num_microbatches: float) -> TokenLoad:
    """Return the load of one microbatch if all of them share all sequences equally."""
    if not len(lengths):
        return TokenLoad(0, 0, 0, 0)
    sum_of_squares = sum(float((block.astype(np.float64) ** 2).sum()) for block in row_blocks(lengths))
    sums = (float(lengths.sum()), sum_of_squares, float(len(lengths)))
    tokens, sum_sq, num_sequences = (max(round(value / num_microbatches), 1) for value in sums)
    return TokenLoad(tokens, sum_sq, int(lengths.max()), num_sequences)


def _first_replica_work(stage_costs: _StageCosts) -> list[_RankWork]:
    """Return the work of the ranks that microbatches of the first LLM replica pass, in the order of passing.

    One rank stands for its TP group. Of encoder replicas on separate ranks the first stands for all.
    """
    graph = stage_costs.graph
    llm_stages = [stage for stage in graph.stages if stage.id.unit == LLM]
    first_of_group = {rank: stage.tp_groups[0][0] for stage in llm_stages for rank in stage.tp_groups[0]}
    other_replicas = {rank for stage in llm_stages for tp_group in stage.tp_groups[1:] for rank in tp_group}
    work: dict[int, _RankWork] = {}
    for stage in (graph.stage(stage_id) for stage_id in graph.order):
        unit = stage.id.unit
        num_replicas = 1 if unit == LLM else graph.mesh(unit).num_replicas // graph.num_groups
        first_ranks = [tp_group[0] for tp_group in stage.tp_groups[:num_replicas]]
        ranks = [first_of_group.get(rank, rank) for rank in first_ranks if rank not in other_replicas]
        shared_with_llm = [rank for rank in dict.fromkeys(ranks) if rank in first_of_group.values()]
        forward, backward = stage_costs.of(stage)
        for rank in shared_with_llm or ranks[:1]:
            work.setdefault(rank, _RankWork()).add(unit, forward, backward)
    return list(work.values())


def _integer_stage_costs(stage_costs: _StageCosts, scale: float) -> dict[StageId, tuple[SequenceCost, SequenceCost]]:
    """Return what each stage's forward and backward cost."""
    integer_costs = {}
    for stage in stage_costs.graph.stages:
        forward, backward = stage_costs.of(stage)
        integer_costs[stage.id] = _to_integer(forward, scale), _to_integer(backward, scale)
    return integer_costs


def _distinct_loads(
    ranks: Sequence[_RankWork], graph: StageGraph, typical: Mapping[str, TokenLoad], scale: float
) -> tuple[BalancedLoad, ...]:
    """Return the different kinds of work that ranks do; kinds with the largest share of encoder work come first."""
    if graph.mesh(LLM).dp == 1:
        return ()
    llm_alone = graph.num_groups == 1 or graph.is_sharded or graph.dispatches_items
    balanced_units = frozenset({LLM}) if llm_alone else frozenset(typical)
    with_seconds: list[tuple[UnitCosts, WorkSeconds]] = []
    for rank in ranks:
        costs = rank.total(balanced_units)
        seconds = _seconds(costs, typical)
        if sum(seconds.values()) > 0:
            with_seconds.append((costs, seconds))
    with_seconds.sort(key=lambda entry: -sum(entry[1].values()))
    distinct: list[tuple[UnitCosts, WorkSeconds]] = []
    for costs, seconds in with_seconds:
        if all(_time_share_apart(seconds, other) > MAX_TIME_SHARE_APART for _, other in distinct):
            distinct.append((costs, seconds))
    total_s = sum(sum(seconds.values()) for _, seconds in distinct)
    distinct.sort(key=lambda entry: -_encoder_share(entry[1]))
    return tuple(
        BalancedLoad(_to_integers(costs, scale), round(sum(seconds.values()) / total_s, 6))
        for costs, seconds in distinct
    )


def _seconds(costs: UnitCosts, typical: Mapping[str, TokenLoad]) -> WorkSeconds:
    """Return the seconds of a typical microbatch."""
    seconds: WorkSeconds = {}
    for unit, cost in costs.items():
        seconds[unit, "tokens"] = cost.linear * typical[unit].tokens
        seconds[unit, "pairs"] = cost.quadratic * typical[unit].sum_sq
    return seconds


def _encoder_share(seconds: WorkSeconds) -> float:
    return sum(s for (unit, _), s in seconds.items() if unit != LLM) / sum(seconds.values())


def _time_share_apart(seconds: WorkSeconds, other: WorkSeconds) -> float:
    """Return the share of their time that two ranks spend on different work, 0 to 1."""
    total, other_total = sum(seconds.values()), sum(other.values())
    keys = sorted(seconds.keys() | other.keys())
    return sum(abs(seconds.get(key, 0.0) / total - other.get(key, 0.0) / other_total) for key in keys) / 2


def _unit_cost(ranks: Sequence[_RankWork], unit: str) -> MarginalCost:
    """Return the cost of all of a unit's stages, forward and backward."""
    return sum((rank.total(frozenset({unit})).get(unit, MarginalCost()) for rank in ranks), MarginalCost())


def _to_integers(costs: UnitCosts, scale: float) -> dict[str, SequenceCost]:
    return {unit: _to_integer(cost, scale) for unit, cost in sorted(costs.items())}


def _to_integer(cost: MarginalCost, scale: float) -> SequenceCost:
    return SequenceCost(round(cost.linear * scale), round(cost.quadratic * scale))


def _nodes_by_unit(graph: StageGraph, ranks_per_node: int) -> dict[str, tuple[int, ...]]:
    return {mesh.unit: _replica_nodes(graph, mesh.unit, ranks_per_node) for mesh in graph.meshes}


def _replica_nodes(graph: StageGraph, unit: str, ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of each replica's stage that features leave (an encoder's last) or enter (the LLM's first)."""
    stages = sorted((stage for stage in graph.stages if stage.id.unit == unit), key=lambda stage: stage.id.index)
    broker_end = stages[0] if unit == LLM else stages[-1]
    return tuple(tp_group[0] // ranks_per_node for tp_group in broker_end.tp_groups)


def marginal_cost(seconds: Callable[[TokenLoad], float], load: TokenLoad) -> MarginalCost:
    """Return what one more token, and one more pair of tokens in a sequence, cost on average near a load.

    Where the time does not grow with tokens, because reading the weights dominates, the mean seconds of a token take
    the place of the marginal ones.
    """
    if load.tokens < 2:
        return MarginalCost()

    def scaled(tokens: float, pairs: float) -> float:
        num_targets = None if load.targets is None else round(load.targets * tokens)
        tokens_and_pairs = round(load.tokens * tokens), round(load.sum_sq * pairs)
        return seconds(TokenLoad(*tokens_and_pairs, load.max_len, load.num_sequences, num_targets))

    linear = (scaled(1.5, 1) - scaled(0.5, 1)) / load.tokens
    quadratic = max((scaled(1, 1.5) - scaled(1, 0.5)) / max(load.sum_sq, 1), 0.0)
    if linear <= 0:
        linear = max(scaled(1, 1) - quadratic * load.sum_sq, 0.0) / load.tokens
    return MarginalCost(linear, quadratic)
