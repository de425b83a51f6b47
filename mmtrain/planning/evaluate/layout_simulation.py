"""The simulated step of one layout on the sampled batches."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.costs import Hardware, RankMemory, num_trained_parameters
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.errors import ProgramError
from mmtrain.planning.artifact.graph_memory import peak_in_flight
from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.artifact.plan_graph import split_into_pieces
from mmtrain.planning.layer_costs.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts, StageSeconds
from mmtrain.planning.layer_costs.layer_partition import layout_graph
from mmtrain.planning.space.budget import DEFAULT_BUDGET, EvaluationBudget
from mmtrain.planning.space.candidate import Simulation
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program.ir.actions import Collective, Compute, Direction, Partial, Send
from mmtrain.program.ir.data_dependencies import Bucket
from mmtrain.program.ir.graph import Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction
from mmtrain.program.ir.step_loads import StepLoads
from mmtrain.program.schedules.builder import build_compute
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.rank_equivalence import representative_ranks
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.simulation.timing import ModelTiming, StageLayer, TransferCost
from mmtrain.program.trace.timeline import Timeline

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass
class LoweredPrograms:
    """The last few programs by rule, for layouts that differ only in which layers their stages hold or recompute.

    To write a program and its communication takes longer than to run it on a batch, and what it does depends on
    neither; nor does it depend on how many of the replicas of a sharded unit hold one copy of it.
    """

    max_actions: int
    _programs: RecentlyUsed[tuple[Program, Program]] = field(init=False)

    def __post_init__(self) -> None:
        self._programs = RecentlyUsed(self.max_actions, _num_actions)

    def get(
        self, graph: StageGraph, schedule: SchedulePlan, build: Callable[[], tuple[Program, Program]]
    ) -> tuple[Program, Program]:
        """Return the compute actions and the program of a graph, from `build` if no graph alike was asked about."""
        if schedule.order is not None:  # its lines name layers, and no two layouts share an order
            return build()
        stages = tuple(replace(stage, layers=_layers_of_order(stage), recompute=frozenset()) for stage in graph.stages)
        meshes = tuple(mesh if mesh.shard is None else _with_one_copy_each(mesh) for mesh in graph.meshes)
        return self._programs.get((schedule.kind, replace(graph, meshes=meshes, stages=stages)), build)


def _with_one_copy_each(mesh: UnitMesh) -> UnitMesh:
    """Return the mesh of a sharded unit as if each replica held a copy: its passes are still those of all replicas."""
    return replace(mesh, shard=1, keeps_weights=False)


def _layers_of_order(stage: Stage) -> tuple[int, int]:
    """Return what a stage's part of a program depends on: its number of layers, if any pass is cut between buckets."""
    lo, hi = stage.layers
    return (0, hi - lo if len(stage.bucket_starts) > 1 else 0)


def _num_actions(programs: tuple[Program, Program]) -> int:
    return sum(len(actions) for program in programs for actions in program.actions.values())


def simulate_layout(
    layout: Layout,
    schedule: SchedulePlan,
    layer_costs: LayerCosts,
    machine: Hardware,
    budget: EvaluationBudget = DEFAULT_BUDGET.evaluation,
) -> Simulation:
    """Simulate the program of a layout on every sampled batch; return step time, bubbles and the busiest rank.

    All replica groups are simulated, unless there are very many: then the group with most work in each batch stands for
    them.
    """
    simulation = simulate_unless_slow(layout, schedule, layer_costs, machine, budget)
    assert simulation is not None
    return simulation


def simulate_unless_slow(
    layout: Layout,
    schedule: SchedulePlan,
    layer_costs: LayerCosts,
    machine: Hardware,
    budget: EvaluationBudget,
    programs: LoweredPrograms | None = None,
    max_first_batch_s: float = math.inf,
) -> Simulation | None:
    """Do as `simulate_layout`, unless the first sampled batch shows that the layout is slow.

    Args:
        layout: where every layer is.
        schedule: what makes its program.
        layer_costs: seconds of its stages.
        machine: the hardware.
        budget: how many replica groups are simulated.
        programs: of layouts simulated before; this one's is kept there, too.
        max_first_batch_s: where the first batch takes longer, the others are not simulated, and the result is None.
    """
    graph = scheduled_graph(layout, schedule, layer_costs)
    program = _CandidateProgram.build(graph, schedule, layer_costs, machine, budget, programs)
    first = program.simulate(0)
    if first.step_time_s > max_first_batch_s:
        return None
    timelines = [first, *(program.simulate(batch) for batch in range(1, len(layer_costs.batches.groups)))]
    shares = [timeline.bubble_shares() for timeline in timelines]
    busiest_stages, busiest_s = busiest_rank(graph, program.timings.seconds)
    return Simulation(
        graph=graph,
        step_time_s=sum(timeline.step_time_s for timeline in timelines) / len(timelines),
        first_batch_step_s=first.step_time_s,
        bubbles={kind: sum(share[kind] for share in shares) / len(shares) for kind in shares[0]},
        busiest_stages=busiest_stages,
        busiest_s=busiest_s,
    )


def simulate_first_batch(
    graph: StageGraph,
    schedule: SchedulePlan,
    layer_costs: LayerCosts,
    machine: Hardware,
    budget: EvaluationBudget = DEFAULT_BUDGET.evaluation,
) -> Timeline:
    """Simulate a step on the first sampled batch."""
    program = _CandidateProgram.build(graph, schedule, layer_costs, machine, budget)
    return program.simulate(0)


def scheduled_graph(layout: Layout, schedule: SchedulePlan, layer_costs: LayerCosts) -> StageGraph:
    """Return the layout's stage graph, with blocks in pieces where the schedule's segments are pieces."""
    graph: StageGraph = layout_graph(layout, layer_costs)
    if not schedule.pieces:
        return graph
    with_sp = [mesh.unit for mesh in graph.meshes if layer_costs.has_sp(mesh.unit, mesh.tp)]
    return split_into_pieces(graph, layer_costs.shape, with_sp)


def runs_alike(graph: StageGraph, schedule: SchedulePlan, other: SchedulePlan, machine: Hardware) -> bool:
    """Return whether two schedules of a graph give all ranks the same order of compute, so that their steps are equal.

    To write both orders takes a small part of simulating one of them.
    """
    ranks = _followed_ranks(graph, machine)
    first, second = (build_compute(graph, of_one.kind, of_one.order, ranks).actions for of_one in (schedule, other))
    return first == second


def _followed_ranks(graph: StageGraph, machine: Hardware) -> tuple[int, ...]:
    """Return the ranks whose actions are enough to know a step."""
    return representative_ranks(graph, partial(GroupLayout.of_ranks, ranks_per_node=machine.ranks_per_node))


def schedule_memory(graph: StageGraph, schedule: SchedulePlan, layer_costs: LayerCosts) -> dict[int, RankMemory]:
    """Return what the ranks of the first replica group hold at their peak under a schedule."""
    ranks: set[int] = set()
    for stage in graph.stages:
        replicas_per_group = graph.mesh(stage.id.unit).num_replicas // graph.num_groups
        ranks.update(tp_group[0] for tp_group in stage.tp_groups[:replicas_per_group])
    compute = build_compute(graph, schedule.kind, schedule.order, sorted(ranks))
    return layer_costs.memory(graph, peak_in_flight(compute))


@dataclass(frozen=True)
class _CandidateProgram:
    """The program of the ranks that stand for all, and what it takes in every sampled batch."""

    schedule: SchedulePlan
    compute: Program
    program: Program  # `compute` with the communication that `program.build` would add
    timings: "_BatchTimings"
    num_groups: int  # replica groups that are simulated

    @classmethod
    def build(
        cls,
        graph: StageGraph,
        schedule: SchedulePlan,
        layer_costs: LayerCosts,
        machine: Hardware,
        budget: EvaluationBudget,
        programs: LoweredPrograms | None = None,
    ) -> "_CandidateProgram":
        timings = _BatchTimings(graph, layer_costs, machine, budget)

        def build() -> tuple[Program, Program]:
            compute = build_compute(graph, schedule.kind, schedule.order, _followed_ranks(graph, machine))
            return compute, lower(compute)

        compute, program = build() if programs is None else programs.get(graph, schedule, build)
        return cls(schedule, compute, program, timings, 1 if _stands_for_all(graph, budget) else graph.num_groups)

    def simulate(self, batch: int) -> Timeline:
        """Simulate the step on one batch.

        The program is not verified: `planner.plan` does that for the chosen one.
        """
        timing = self.timings.of_batch(batch)
        try:
            return simulate(self.program, timing, self.num_groups, timing.model.waits)
        except ProgramError:  # ranks wait for each other's reductions of shared weights
            if self.schedule.kind != "explicit":
                raise
            return simulate(self._reducing_last, timing, self.num_groups, timing.model.waits)

    @cached_property
    def _reducing_last(self) -> Program:
        return lower(self.compute, reduce_last=True)


class _BatchTimings:
    """What every action of a graph's program takes in each sampled batch; a batch is laid out when it is asked for."""

    def __init__(self, graph: StageGraph, layer_costs: LayerCosts, machine: Hardware, budget: EvaluationBudget) -> None:
        self.seconds = layer_costs.stage_seconds(graph)
        self._graph, self._layer_costs, self._machine = graph, layer_costs, machine
        self._waiting_shares = layer_costs.tp_wait_shares(graph)
        self._bucket_seconds = layer_costs.bucket_seconds(graph)
        self._is_one_group = _stands_for_all(graph, budget)
        self._heaviest = np.zeros(len(layer_costs.batches.groups), dtype=np.int64)
        if self._is_one_group and not graph.is_sharded:
            self._heaviest = _heaviest_groups(graph, self.seconds)

    def of_batch(self, batch: int) -> "SampledBatchTiming":
        """Return the timing of one batch."""
        graph, layer_costs, group = self._graph, self._layer_costs, int(self._heaviest[batch])
        split = batch_split_of(graph)
        # Replicas of sharded units wait for each other in every layer, and those that dispatch exchange rows with all
        # others, so there the loads of all of them count.
        is_group_alone = self._is_one_group and not (graph.is_sharded or graph.dispatches_items)
        loads = (
            layer_costs.loads.of_group(split, batch, group)
            if is_group_alone
            else layer_costs.loads.of_step(split, batch)
        )
        model = model_timing(graph, layer_costs, loads, self._machine)
        first_replica = _first_replicas(graph, group)
        return SampledBatchTiming(
            model, self.seconds, batch, layer_costs, self._waiting_shares, first_replica, self._bucket_seconds
        )


def _stands_for_all(graph: StageGraph, budget: EvaluationBudget) -> bool:
    """Return whether one replica group stands for all.

    There are too many to simulate each, and the one with most work does; or units are sharded, and all replicas run
    every pass together. Ranks of sharded units that share sequences send each other features, in each group others, for
    which the next pass of all groups waits.
    """
    shares_sequences = any(mesh.cp > 1 for mesh in graph.meshes)
    sends_features = any(edge.crosses_units and not graph.dispatches(edge) for edge in graph.edges)
    if graph.is_sharded and not (shares_sequences and sends_features):
        return True
    return _num_passes(graph) > budget.max_passes_of_all_groups


def busiest_rank(graph: StageGraph, seconds: Mapping[StageId, StageSeconds]) -> tuple[tuple[StageId, ...], float]:
    """Return the stages of the rank that computes most, and its seconds, mean over the batches."""
    busy_s: dict[int, float] = {}
    held: dict[int, tuple[StageId, ...]] = {}
    for stage in graph.stages:
        pass_seconds = seconds[stage.id].forward + seconds[stage.id].backward
        for tp_group, replica_s in zip(stage.tp_groups, pass_seconds.sum(axis=2).mean(axis=0), strict=True):
            rank = tp_group[0]
            busy_s[rank] = busy_s.get(rank, 0.0) + float(replica_s)
            held[rank] = (*held.get(rank, ()), stage.id)
    busiest = max(busy_s, key=lambda rank: busy_s[rank])
    return held[busiest], busy_s[busiest]


def model_timing(graph: StageGraph, layer_costs: LayerCosts, loads: StepLoads, machine: Hardware) -> ModelTiming:
    """Return the timing of one batch as the cost model gives it."""
    return ModelTiming(
        graph,
        layer_costs.shape,
        layer_costs.costs,
        loads,
        layer_costs.input_grad,
        num_trained_parameters,
        ELEMENT_BYTES[layer_costs.precision],
        machine.ranks_per_node,
        machine.overlap_slowdown,
        machine.rail_hop_s,
        machine.time_spread,
        machine.slowest_rank_ratio,
        layer_costs.grad_reduce,
        layer_costs.orthogonalizes,
    )


@dataclass(frozen=True)
class PrecomputedTiming:
    """`ModelTiming` for candidates, whose compute seconds are known before the simulation."""

    model: ModelTiming

    def left_under_way(self, action: Partial) -> float:
        """Ask the model, see `ModelTiming`."""
        return self.model.left_under_way(action)

    def tp_wait(self, action: Compute) -> float:
        """Return 0: passes of mean cost, which encoders are ordered by, count waiting inside layers as compute."""
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        """Ask the model, see `ModelTiming`."""
        return self.model.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """Ask the model, see `ModelTiming`."""
        return self.model.collective(rank, action, group)

    def link_class(self, ranks: tuple[int, ...]) -> GroupLayout:
        """Ask the model, see `ModelTiming`."""
        return self.model.link_class(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Return 0: a candidate's memory is compared with the limit before it is simulated (`LayerCosts.memory`)."""
        return 0


@dataclass(frozen=True)
class SampledBatchTiming(PrecomputedTiming):
    """One of the sampled batches.

    waiting_shares: of a stage's forward and backward, see `LayerCosts.tp_wait_shares`.

    first_replica, by unit: simulated replica 0 stands for the replica of this number, replica 1 for the next, and so
    on. The model's loads are those of that replica group already.
    """

    seconds: Mapping[StageId, StageSeconds]
    batch: int
    layer_costs: LayerCosts
    waiting_shares: Mapping[StageId, tuple[float, float]] = field(default_factory=dict)
    first_replica: Mapping[str, int] = field(default_factory=dict)
    bucket_seconds: Mapping[Bucket, StageSeconds] = field(default_factory=dict)

    def compute(self, action: Compute) -> float:
        """Return the seconds of a forward or backward, or of a bucket's layers; the model has those of segments."""
        if isinstance(action, Partial):
            of_bucket = self.bucket_seconds.get(Bucket(action.stage, action.lo, action.hi))
            if of_bucket is None or self.model.graph.stage(action.stage).pieces:
                return self.model.compute(action)
            return self._of_replica(of_bucket, action)[action.mb.index]
        if self._is_sharded:
            return self.model.sharded_pass(action, partial(self._slowest_replica, action.mb))
        key = (action.stage, type(action), action.mb.replica)
        of_replica = self._seconds_of_replicas.get(key)
        if of_replica is None:
            of_replica = self._seconds_of_replicas[key] = self._of_replica(self.seconds[action.stage], action)
        return of_replica[action.mb.index]

    @cached_property
    def _is_sharded(self) -> bool:
        return self.model.graph.is_sharded

    @cached_property
    def _seconds_of_replicas(self) -> dict[tuple[StageId, type[Compute], int], list[float]]:
        """Seconds of whole passes by stage, direction and replica: lists are read faster than arrays."""
        return {}

    def _of_replica(self, stage: StageSeconds, action: Compute) -> list[float]:
        """Return the seconds of an action's pass for every microbatch of its replica."""
        seconds = stage.forward if direction(action) == "F" else stage.backward
        of_replica: list[float] = seconds[
            self.batch, action.mb.replica + self.first_replica.get(action.mb.unit, 0)
        ].tolist()
        return of_replica

    def tp_wait(self, action: Compute) -> float:
        """Return a share of `compute`; the model has the seconds of segments."""
        if isinstance(action, Partial) and Bucket(action.stage, action.lo, action.hi) not in self.bucket_seconds:
            return self.model.tp_wait(action)
        forward, backward = self.waiting_shares.get(action.stage, (0.0, 0.0))
        share = forward if direction(action) == "F" else backward
        if not share:
            return 0.0
        if not self._is_sharded:
            return share * self.compute(action)
        # A pass of all replicas also waits for weights and gradients: of it, the share of the longest replica's layers.
        seconds = self.seconds[action.stage]
        of_replicas = seconds.forward if direction(action) == "F" else seconds.backward
        return share * float(of_replicas[self.batch, :, action.mb.index].max())

    def _slowest_replica(self, mb: Microbatch, kind: Direction, held: StageLayer) -> float:
        """Return what a layer of a sharded unit takes on the replica that computes it longest."""
        layer_costs = self.layer_costs
        graph = self.model.graph
        times = layer_costs.unit_times(mb.unit, graph.mesh(mb.unit).tp, batch_split_of(graph))
        number = layer_costs.number_of_kind(mb.unit, held.layer, held.input_grad)
        of_replicas = times.by_kind[number, :, self.batch, :, mb.index]  # (3, dp)
        seconds = (
            of_replicas[FORWARD] if kind == "F" else of_replicas[BACKWARD] + held.recompute * of_replicas[RECOMPUTE]
        )
        return float(seconds.max())


def _num_passes(graph: StageGraph) -> int:
    """Count the forwards and backwards of a step."""
    per_stage = {mesh.unit: 2 * mesh.num_replicas * mesh.num_microbatches for mesh in graph.meshes}
    return sum(per_stage[stage.id.unit] for stage in graph.stages)


def _first_replicas(graph: StageGraph, group: int) -> dict[str, int]:
    """Return the first replica of each unit in a replica group."""
    return {m.unit: group * (m.num_replicas // graph.num_groups) for m in graph.meshes}


def _heaviest_groups(graph: StageGraph, seconds: Mapping[StageId, StageSeconds]) -> IntArray:
    """Return (batches,) the replica group that has the rank with most work."""
    by_tp_group: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}
    for stage in graph.stages:
        replica_s = (seconds[stage.id].forward + seconds[stage.id].backward).sum(axis=2)
        group_s = replica_s.reshape(len(replica_s), graph.num_groups, -1).max(axis=2)
        tp_group = stage.tp_groups[0]
        by_tp_group[tp_group] = by_tp_group.get(tp_group, np.zeros(1)) + group_s
    return np.asarray(np.max(list(by_tp_group.values()), axis=0).argmax(axis=1))
