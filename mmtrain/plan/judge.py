"""What one layout costs on the drawn batches, by the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.costs import Hardware, RankMemory, parameters, upstream_trains
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.plan.bounds import schedule_bound
from mmtrain.plan.cut import graph_for
from mmtrain.plan.layout import Layout
from mmtrain.plan.plan import SchedulePlan
from mmtrain.plan.pricing import Pricing, StageSeconds, sizes_of
from mmtrain.program.actions import Collective, Compute, Forward, GatherParams, Partial, ReduceGrads, Send
from mmtrain.program.builder import build_1f1b, build_coarse, build_explicit
from mmtrain.program.graph import Microbatch, StageGraph, StageId
from mmtrain.program.loads import StepLoads
from mmtrain.program.lower import lower
from mmtrain.program.memory import peak_live
from mmtrain.program.program import Program
from mmtrain.program.simulate import simulate
from mmtrain.program.timeline import Timeline
from mmtrain.program.timing import ModelTiming, Transport
from mmtrain.program.twins import leaders
from mmtrain.program.wiring import members, trained_units


@dataclass(frozen=True)
class Judged:
    """A layout that fits, with what the simulator says of it on the drawn batches (means)."""

    layout: Layout
    graph: StageGraph
    step_time_s: float
    bubbles: Mapping[str, float]  # kind -> share of all rank-seconds
    memory: Mapping[int, RankMemory]  # ranks of the first replica group
    busiest: StageId
    busiest_share: float  # of the step that its ranks work on it
    schedule: SchedulePlan

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(m.total for m in self.memory.values())


def judge(layout: Layout, pricing: Pricing, machine: Hardware, schedule: SchedulePlan | None = None) -> Judged:
    """Simulate the layout's program, by default that of 1F1B, on every drawn batch."""
    schedule = schedule or SchedulePlan(num_microbatches=dict(layout.num_microbatches))
    graph = graph_for(layout, pricing)
    program, timings = _program(graph, schedule, pricing, machine)
    lines = [simulate(program, timing, graph.num_groups) for timing in timings]
    seconds = pricing.stage_seconds(graph)
    step_time = sum(t.step_time_s for t in lines) / len(lines)
    shares = [t.bubble_shares() for t in lines]
    busy = {sid: float(s.busy.max(axis=1).mean()) for sid, s in seconds.items()}
    busiest = max(busy, key=lambda sid: busy[sid])
    return Judged(
        layout,
        graph,
        step_time,
        {kind: sum(s[kind] for s in shares) / len(shares) for kind in shares[0]},
        pricing.memory(graph, None if schedule.kind == "1f1b" else most_alive(program)),
        busiest,
        busy[busiest] / step_time if step_time else 0.0,
        schedule,
    )


def rehearsed(judged: Judged, pricing: Pricing, machine: Hardware) -> Timeline:
    """The layout's step on the first drawn batch."""
    program, timings = _program(judged.graph, judged.schedule, pricing, machine)
    return simulate(program, timings[0], judged.graph.num_groups)


def _program(
    graph: StageGraph, schedule: SchedulePlan, pricing: Pricing, machine: Hardware
) -> tuple[Program, "list[DrawnTiming]"]:
    """What the simulator replays: for the ranks that stand for others, and on every drawn batch."""
    seconds = pricing.stage_seconds(graph)
    timings = [
        DrawnTiming(model_timing(graph, pricing, loads, machine), seconds, batch)
        for batch, loads in enumerate(pricing.loads(sizes_of(graph)))
    ]
    # Not checked; the chosen one is, see `story`.
    return lower(_ordered(graph, schedule, leaders(graph, timings[0].link))), timings


def memory_of(
    graph: StageGraph, schedule: SchedulePlan, pricing: Pricing, machine: Hardware
) -> Mapping[int, RankMemory]:
    """What the ranks of the first replica group hold at most in that order."""
    program, _ = _program(graph, schedule, pricing, machine)
    return pricing.memory(graph, most_alive(program))


def most_alive(program: Program) -> dict[StageId, int]:
    """Microbatches of each stage between forward and backward at most, counted from the program."""
    alive: dict[StageId, int] = {}
    for actions in program.actions.values():
        for stage, count in peak_live(program.graph, actions).items():
            alive[stage] = max(alive.get(stage, 0), count)
    return alive


def _ordered(graph: StageGraph, schedule: SchedulePlan, ranks: Sequence[int]) -> Program:
    """Compute of these ranks in the order that the schedule says."""
    if schedule.order is not None:
        return build_explicit(graph, {rank: schedule.order[rank] for rank in ranks})
    return (build_coarse if schedule.kind == "coarse" else build_1f1b)(graph, ranks)


def tight_bound(graph: StageGraph, pricing: Pricing, machine: Hardware) -> float:
    """Seconds the simulator will not go below: the schedule with free messages, and the collectives that end it."""
    timing = model_timing(graph, pricing, pricing.loads(sizes_of(graph))[0], machine)

    def after(rank: int) -> float:
        units = trained_units(graph, rank)  # the last one's gradients are ready last
        closing: list[Collective] = [*map(ReduceGrads, units[-1:]), *map(GatherParams, units)]
        return sum(timing.collective(rank, c, members(graph, rank, c)).seconds for c in closing)

    return schedule_bound(graph, pricing.stage_seconds(graph), after)


def model_timing(graph: StageGraph, pricing: Pricing, loads: StepLoads, machine: Hardware) -> ModelTiming:
    """What the simulator asks, for one batch."""
    return ModelTiming(
        graph,
        pricing.shape,
        pricing.costs,
        loads,
        upstream_trains(pricing.shape),
        parameters,
        ELEMENT_BYTES[pricing.precision],
        machine.ranks_per_node,
    )


@dataclass(frozen=True)
class DrawnTiming:
    """`ModelTiming` for one of the drawn batches, whose compute was priced before for all candidates at once."""

    model: ModelTiming
    seconds: Mapping[StageId, StageSeconds]
    batch: int

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward; of some of its segments, as `ModelTiming` says."""
        if isinstance(action, Partial):
            return self.model.compute(action)
        stage = self.seconds[action.stage]
        grid = stage.forward if isinstance(action, Forward) else stage.backward
        return float(grid[self.batch, action.mb.replica, action.mb.index])

    def message(self, sender: int, action: Send) -> Transport:
        """As `ModelTiming` says."""
        return self.model.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> Transport:
        """As `ModelTiming` says."""
        return self.model.collective(rank, action, group)

    def link(self, ranks: tuple[int, ...]) -> bool:
        """As `ModelTiming` says."""
        return self.model.link(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Not asked of a candidate: its memory was held against the limit before (`Pricing.memory`)."""
        return 0
