"""Run the program of a plan on stand-ins: one process of this machine for each rank of a replica group."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from mmtrain.errors import RunError, UserError
from mmtrain.models.stage_inputs import TextInput
from mmtrain.plan.artifact.plan import Plan
from mmtrain.program import (
    Action,
    BubbleKind,
    Compute,
    ModelTiming,
    Program,
    Send,
    build_program,
    simulate,
)
from mmtrain.program.ir.first_group import FirstGroup, first_group
from mmtrain.program.trace.measured_timeline import measured_timeline
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.program.verify.send_window import send_window
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.channel_probe import probe_channels
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.process_groups import build_groups
from mmtrain.runtime.rehearsal.stand_ins import (
    STAND_IN_DTYPE,
    STAND_IN_WIDTH,
    RankClock,
    Rehearsal,
    StandInOptimizer,
    StandInUnit,
    TimedTransport,
)
from mmtrain.runtime.rehearsal.stretched_timing import StretchedTiming
from mmtrain.runtime.resilience.failures import explain_failures, read_failures
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.resilience.watchdog import Watchdog
from mmtrain.runtime.world import Address, World, join, leave

FaultKind = Literal["slow", "dead", "lost"]
FAULT_STEP = 1  # in which a rank dies or a message is lost; counts from 0
# Processor seconds that an action takes here besides its own time, with the messages of four sequential layers of
# Python; `scripts/bench_rehearse.py` measures 0.3 to 0.6 ms.
ACTION_OVERHEAD_S = 0.5e-3
MAX_OVERHEAD_SHARE = 0.05  # of a step, that this machine may need for its actions
HANG_STEPS = 2  # stretched steps without progress after which a rank is said to hang
MIN_HANG_S = 10.0


@dataclass(frozen=True)
class RehearsalFault:
    """Something that goes wrong on one rank, numbered as in the plan."""

    kind: FaultKind
    rank: int
    factor: float = 1.0  # how many times as long a slow rank computes


@dataclass(frozen=True)
class RehearsalRequest:
    """What to rehearse."""

    plan: Plan
    timing: ModelTiming  # of every action of the plan, with the loads of the step that is rehearsed
    num_steps: int
    stretch: float | None = None  # how many times as long as planned everything takes; None to choose it
    fault: RehearsalFault | None = None
    max_processes: int = 64


@dataclass(frozen=True)
class RehearsalResult:
    """What was rehearsed. Seconds and shares are those of the plan: without the stretch."""

    ranks: tuple[int, ...]  # of the plan, one for each process
    stretch: float
    predicted_s: float  # of the step, by the simulator
    predicted_bubbles: Mapping[BubbleKind, float]  # idle time by kind, as shares of the ranks' time
    steps_s: Sequence[float] = ()  # of each rehearsed step; empty if a fault ended the rehearsal
    # The same without what this machine took in addition to the predicted times: differs from the prediction only where
    # the simulator orders actions or messages differently than the runtime does.
    scheduled_s: Sequence[float] = ()
    bubbles: Mapping[BubbleKind, float] = field(default_factory=dict)  # of the last step; empty in that case too
    failure: str | None = None  # what the ranks reported of a fault that ended it

    @property
    def error(self) -> float:
        """The prediction error relative to the mean rehearsed step."""
        return self.predicted_s * len(self.steps_s) / sum(self.steps_s) - 1


def rehearse(request: RehearsalRequest) -> RehearsalResult:
    """Run some steps of replica group 0 on stand-ins, and simulate the same.

    Raises:
        UserError: the group has more ranks than processes are allowed here, or the fault names no rank of it.
        RunError: the rehearsal failed without a fault.
    """
    group = first_group(request.timing.graph)
    num_ranks = len(group.ranks)
    if num_ranks > request.max_processes:
        raise UserError(
            f"rehearse: a replica group of this plan has {num_ranks} ranks, and --ranks-here allows "
            f"{request.max_processes} processes; a process takes about 60 MB of memory, so raise it where that fits"
        )
    if request.fault is not None and request.fault.rank not in group.ranks:
        raise UserError(
            f"--fault: rank {request.fault.rank} found; allowed: a rank of the first replica group, "
            f"{', '.join(map(str, group.ranks))}"
        )
    program = _build(request, group)
    stretch = request.stretch or _choose_stretch(program, request.timing, group)
    timing = _stretched(request, group, stretch)
    predicted = simulate(program, timing)
    result = RehearsalResult(group.ranks, stretch, predicted.step_time_s / stretch, predicted.bubble_shares())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        hang_s = max(MIN_HANG_S, HANG_STEPS * predicted.step_time_s)
        try:
            launch_local(num_ranks, partial(_run_rank, request, group, stretch, hang_s, out))
        except RunError as error:
            if request.fault is None:
                raise
            return replace(result, failure=_describe(error, out.parent, num_ranks))
        rehearsed = json.loads(out.read_text(encoding="utf-8"))
    steps_s, scheduled_s = ([seconds / stretch for seconds in rehearsed[key]] for key in ("steps_s", "scheduled_s"))
    return replace(result, steps_s=steps_s, scheduled_s=scheduled_s, bubbles=rehearsed["bubbles"])


def _describe(error: RunError, folder: Path, num_ranks: int) -> str:
    """Return what the ranks reported of a hang, else what the launcher saw."""
    failures = read_failures(folder)
    is_hang = any(failure.kind == "hang" for failure in failures)
    return explain_failures(failures, num_ranks) if is_hang else str(error)


def _build(request: RehearsalRequest, group: FirstGroup) -> Program:
    schedule = request.plan.schedule
    order = None if schedule.order is None else group.renumber(schedule.order)
    return build_program(group.graph, kind=schedule.kind, order=order)


def _stretched(request: RehearsalRequest, group: FirstGroup, stretch: float) -> StretchedTiming:
    fault = request.fault
    slow_ranks = {}
    if fault is not None and fault.kind == "slow":
        slow_ranks[group.ranks.index(fault.rank)] = fault.factor
    return StretchedTiming(request.timing, request.timing.graph, group, stretch, slow_ranks)


def _choose_stretch(program: Program, timing: ModelTiming, group: FirstGroup) -> float:
    """Return a stretch with which the actions themselves take a small share of this machine's time."""
    plain = StretchedTiming(timing, timing.graph, group, 1.0, {})
    step_s = simulate(program, plain).step_time_s
    num_actions = sum(len(actions) for actions in program.actions.values())
    overhead_s = num_actions * ACTION_OVERHEAD_S / (os.cpu_count() or 1)
    return max(1.0, overhead_s / MAX_OVERHEAD_SHARE / step_s)


class _RankFault(FaultPoints):
    """Kills this rank's process, where the fault asks for that."""

    def __init__(self, fault: RehearsalFault | None, plan_rank: int) -> None:
        self._dies = fault is not None and fault.kind == "dead" and fault.rank == plan_rank
        self._loses = fault is not None and fault.kind == "lost" and fault.rank == plan_rank
        self._step = 0

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        self._step = step
        if self._dies and step == FAULT_STEP and isinstance(action, Compute):
            os.kill(os.getpid(), signal.SIGKILL)

    def loses(self, message: Send) -> bool:
        """Return whether this message is the one that is lost: the first of the step."""
        is_lost = self._loses and self._step == FAULT_STEP
        self._loses = self._loses and not is_lost
        return is_lost


def _run_rank(
    request: RehearsalRequest, group: FirstGroup, stretch: float, hang_s: float, out: Path, address: Address
) -> None:
    """Rehearse as one rank; rank 0 writes the result to `out`, beside which ranks report that they hang."""
    world = join(address)
    torch.set_num_threads(1)
    activity = Activity()
    program = _build(request, group)
    clock = RankClock()
    timing = _stretched(request, group, stretch)
    rehearsal = Rehearsal(group.graph, timing, request.timing.loads, world.rank, clock)
    executor = _build_executor(request, program, rehearsal, world, activity)
    inputs = {mb: TextInput(()) for mb in request.timing.loads.loads}
    loss_scale = dict.fromkeys(request.plan.units, 1.0)
    steps_s: list[float] = []
    scheduled_s: list[float] = []
    record: StepRecord | None = None
    with Watchdog(activity, hang_s, out.parent, world):
        for step in range(request.num_steps):
            activity.step = step + 1
            activity.start("waiting for all ranks to start the step")
            start_s = _latest(time.perf_counter())
            clock.start_step(start_s)
            record = executor.run(StepInput(inputs, request.timing.loads, loss_scale, step=step)).record
            activity.start("gathering the step time")
            steps_s.append(_latest(record.end_s) - start_s)
            scheduled_s.append(_latest(clock.now_s) - start_s)
    records = world.gather_to_first(record)
    if world.is_first:
        by_rank = {rank: item for rank, item in enumerate(records) if isinstance(item, StepRecord)}
        timeline = measured_timeline(group.graph, by_rank, lambda rank, action: 0)
        result = {"steps_s": steps_s, "scheduled_s": scheduled_s, "bubbles": timeline.bubble_shares()}
        out.write_text(json.dumps(result), encoding="utf-8")
    leave()


def _build_executor(
    request: RehearsalRequest, program: Program, rehearsal: Rehearsal, world: World, activity: Activity
) -> Executor:
    graph, rank = rehearsal.graph, world.rank
    groups = build_groups(graph, world)
    actions = program.for_rank(rank)
    probe_channels(actions, groups, world)
    token_shards = {name: unit.tp for name, unit in request.plan.units.items() if unit.sp}
    faults = _RankFault(request.fault, rehearsal.timing.group.ranks[rank])
    transport = TimedTransport(
        rank,
        groups,
        dict.fromkeys(graph.edges, STAND_IN_WIDTH),
        token_shards,
        world.device,
        STAND_IN_DTYPE,
        rehearsal,
        faults.loses,
    )
    units = {
        unit: StandInUnit(rehearsal, unit_groups, token_shards.get(unit, 1))
        for unit, unit_groups in groups.units.items()
    }
    broker = Broker(graph, actions, transport, send_window(program), activity)
    optimizer = StandInOptimizer(rehearsal, groups)
    return Executor(graph, actions, units, broker, optimizer, activity, faults)


def _latest(moment_s: float) -> float:
    """Return the latest of all ranks' moments; all ranks call this together."""
    latest = torch.tensor(moment_s, dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    return float(latest)
