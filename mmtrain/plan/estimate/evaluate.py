"""What one layout costs on the drawn batches, by the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmtrain.costs import Hardware, RankMemory, num_parameters
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.errors import ProgramError
from mmtrain.plan.artifact.layout import Layout
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.plan.artifact.plan_graph import split_into_pieces
from mmtrain.plan.estimate.layer_costs import LayerCosts, StageSeconds, batch_split_of
from mmtrain.plan.search.layer_partition import layout_graph
from mmtrain.program.ir.actions import Collective, Compute, Forward, Partial, Send
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.step_loads import Route, StepLoads
from mmtrain.program.schedules.builder import build_compute
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.rank_equivalence import representative_ranks
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.simulation.timing import ModelTiming, TransferCost
from mmtrain.program.trace.timeline import Timeline
from mmtrain.program.verify.live_activations import peak_in_flight_by_stage

IntArray = npt.NDArray[np.int64]

MAX_PASSES_OF_ALL_GROUPS = 2_000  # forwards and backwards of a step up to which every replica group is simulated


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what the simulator says of it on the drawn batches (means)."""

    layout: Layout
    graph: StageGraph
    step_time_s: float
    bubbles: Mapping[str, float]  # kind -> share of all rank-seconds
    memory: Mapping[int, RankMemory]  # ranks of the first replica group
    busiest_stages: tuple[StageId, ...]  # the stages of the rank that computes most
    busiest_s: float  # what it computes in a step
    schedule: SchedulePlan

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(m.total for m in self.memory.values())


def evaluate_layout(
    layout: Layout,
    layer_costs: LayerCosts,
    machine: Hardware,
    schedule: SchedulePlan | None = None,
    memory: Mapping[int, RankMemory] | None = None,
) -> Candidate:
    """Simulate the layout's program, by default that of 1F1B, on every drawn batch.

    All replica groups are, unless there are very many: then the one with most work in each batch stands for them.
    memory: what ranks hold, where that is known.
    """
    schedule = schedule or SchedulePlan(num_microbatches=dict(layout.num_microbatches))
    graph = layout_graph(layout, layer_costs)
    if schedule.pieces:
        graph = split_into_pieces(
            graph, layer_costs.shape, [m.unit for m in graph.meshes if layer_costs.has_sp(m.unit, m.tp)]
        )
    compute, timings, num_groups = _program(graph, schedule, layer_costs, machine)
    program, lines = _simulated(compute, schedule, timings, num_groups)
    seconds = timings[0].seconds
    step_time = sum(t.step_time_s for t in lines) / len(lines)
    shares = [t.bubble_shares() for t in lines]
    return Candidate(
        layout,
        graph,
        step_time,
        {kind: sum(s[kind] for s in shares) / len(shares) for kind in shares[0]},
        memory or layer_costs.memory(graph, None if schedule.kind == "1f1b" else peak_in_flight(program)),
        *_busiest(graph, seconds),
        schedule,
    )


def _busiest(graph: StageGraph, seconds: Mapping[StageId, StageSeconds]) -> tuple[tuple[StageId, ...], float]:
    """The stages of the rank that computes most, and for how long, mean over the batches."""
    busy: dict[int, float] = {}
    held: dict[int, tuple[StageId, ...]] = {}
    for stage in graph.stages:
        own = seconds[stage.id]
        for tp_group, spent in zip(stage.tp_groups, (own.forward + own.backward).sum(axis=2).mean(axis=0), strict=True):
            busy[tp_group[0]] = busy.get(tp_group[0], 0.0) + float(spent)
            held[tp_group[0]] = (*held.get(tp_group[0], ()), stage.id)
    rank = max(busy, key=lambda rank: busy[rank])
    return held[rank], busy[rank]


def simulate_first_batch(judged: Candidate, layer_costs: LayerCosts, machine: Hardware) -> Timeline:
    """The layout's step on the first drawn batch."""
    compute, timings, num_groups = _program(judged.graph, judged.schedule, layer_costs, machine)
    return _simulated(compute, judged.schedule, timings[:1], num_groups)[1][0]


def _simulated(
    compute: Program, schedule: SchedulePlan, timings: "Sequence[SampledBatchTiming]", num_groups: int
) -> tuple[Program, list[Timeline]]:
    """The program with its communication, lowered as `program.build` would, and its step on each batch.

    It is not checked; that of the chosen plan is, see `story`.
    """
    program = lower(compute)
    try:
        return program, [simulate(program, timing, num_groups) for timing in timings]
    except ProgramError:  # ranks wait for each other's reductions
        if schedule.kind != "explicit":
            raise
        program = lower(compute, reduce_last=True)
        return program, [simulate(program, timing, num_groups) for timing in timings]


def _program(
    graph: StageGraph, schedule: SchedulePlan, layer_costs: LayerCosts, machine: Hardware
) -> tuple[Program, "list[SampledBatchTiming]", int]:
    """What the ranks that stand for others compute, what that takes in every drawn batch, and how many groups."""
    seconds = layer_costs.stage_seconds(graph)
    alone = _num_passes(graph) > MAX_PASSES_OF_ALL_GROUPS
    chosen = _heaviest(graph, seconds) if alone else np.zeros(len(layer_costs.batches.groups), dtype=np.int64)
    timings = []
    for batch, loads in enumerate(layer_costs.loads(batch_split_of(graph))):
        shift = _shift(graph, int(chosen[batch]))
        model = model_timing(graph, layer_costs, _of_group(graph, loads, shift) if alone else loads, machine)
        timings.append(SampledBatchTiming(model, seconds, batch, shift))
    compute = build_compute(graph, schedule.kind, schedule.order, representative_ranks(graph, timings[0].link_class))
    return compute, timings, 1 if alone else graph.num_groups


def schedule_memory(graph: StageGraph, schedule: SchedulePlan, layer_costs: LayerCosts) -> Mapping[int, RankMemory]:
    """What the ranks of the first replica group hold at most in that order."""
    ranks = {
        tp_group[0] for s in graph.stages for tp_group in s.tp_groups[: graph.mesh(s.id.unit).dp // graph.num_groups]
    }
    return layer_costs.memory(graph, peak_in_flight(build_compute(graph, schedule.kind, schedule.order, sorted(ranks))))


def peak_in_flight(program: Program) -> dict[StageId, int]:
    """Microbatches of each stage between forward and backward at most, counted from the program."""
    alive: dict[StageId, int] = {}
    for actions in program.actions.values():
        for stage, count in peak_in_flight_by_stage(program.graph, actions).items():
            alive[stage] = max(alive.get(stage, 0), count)
    return alive


def model_timing(graph: StageGraph, layer_costs: LayerCosts, loads: StepLoads, machine: Hardware) -> ModelTiming:
    """What the simulator asks, for one batch."""
    return ModelTiming(
        graph,
        layer_costs.shape,
        layer_costs.costs,
        loads,
        layer_costs.input_grad,
        num_parameters,
        ELEMENT_BYTES[layer_costs.precision],
        machine.ranks_per_node,
    )


@dataclass(frozen=True)
class PrecomputedTiming:
    """`ModelTiming` for candidates, whose compute was priced before, in one way or another."""

    model: ModelTiming

    def left_under_way(self, action: Partial) -> float:
        """As `ModelTiming` says."""
        return self.model.left_under_way(action)

    def message(self, sender: int, action: Send) -> TransferCost:
        """As `ModelTiming` says."""
        return self.model.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """As `ModelTiming` says."""
        return self.model.collective(rank, action, group)

    def link_class(self, ranks: tuple[int, ...]) -> bool:
        """As `ModelTiming` says."""
        return self.model.link_class(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Not asked of a candidate: its memory was held against the limit before (`LayerCosts.memory`)."""
        return 0


@dataclass(frozen=True)
class SampledBatchTiming(PrecomputedTiming):
    """One of the drawn batches, priced for all candidates at once.

    `shift`, by unit: replica 0 stands for the replica of this number, the next for the next; the model's loads are
    those of that group already.
    """

    seconds: Mapping[StageId, StageSeconds]
    batch: int
    shift: Mapping[str, int] = field(default_factory=dict)

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward; of some of its segments, as `ModelTiming` says."""
        if isinstance(action, Partial):
            return self.model.compute(action)
        stage, mb = self.seconds[action.stage], action.mb
        grid = stage.forward if isinstance(action, Forward) else stage.backward
        return float(grid[self.batch, mb.replica + self.shift.get(mb.unit, 0), mb.index])


def _num_passes(graph: StageGraph) -> int:
    meshes = {m.unit: m for m in graph.meshes}
    return sum(2 * meshes[s.id.unit].dp * meshes[s.id.unit].num_microbatches for s in graph.stages)


def _shift(graph: StageGraph, group: int) -> dict[str, int]:
    """Where the replicas of a group begin."""
    return {m.unit: group * (m.dp // graph.num_groups) for m in graph.meshes}


def _of_group(graph: StageGraph, loads: StepLoads, shift: Mapping[str, int]) -> StepLoads:
    """Loads and routes of the group that begins at `shift`, under the names of group 0's microbatches."""
    name = {
        Microbatch(m.unit, shift[m.unit] + r, i): Microbatch(m.unit, r, i)
        for m in graph.meshes
        for r in range(m.dp // graph.num_groups)
        for i in range(m.num_microbatches)
    }
    routes = {
        pair: Route({(name[a], name[b]): spans for (a, b), spans in route.spans.items() if a in name and b in name})
        for pair, route in loads.routes.items()
    }
    return StepLoads(
        {own: loads.loads[mb] for mb, own in name.items()},
        routes,
        {own: loads.rows_out[mb] for mb, own in name.items()},
    )


def _heaviest(graph: StageGraph, seconds: Mapping[StageId, StageSeconds]) -> IntArray:
    """(batches,) the replica group that has the rank with most work."""
    by_tp_group: dict[tuple[int, ...], float] = {}
    for stage in graph.stages:
        own = seconds[stage.id]
        total = (own.forward + own.backward).sum(axis=2)
        grouped = total.reshape(len(total), graph.num_groups, -1).max(axis=2)
        by_tp_group[stage.tp_groups[0]] = by_tp_group.get(stage.tp_groups[0], 0.0) + grouped
    return np.asarray(np.max(list(by_tp_group.values()), axis=0).argmax(axis=1))
