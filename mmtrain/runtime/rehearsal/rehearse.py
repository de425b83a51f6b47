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
from statistics import mean
from typing import Any, Literal

import torch
import torch.distributed as dist

from mmtrain.errors import RunError, UserError
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.planning.artifact.plan import Plan
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
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.activity import BUILDING, Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.channel_probe import probe_channels
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.process_groups import build_groups
from mmtrain.runtime.rehearsal.checkpoint_traffic import (
    HOST_COPY_BYTES_PER_S,
    CheckpointSpeed,
    CheckpointTraffic,
    RehearsedSave,
    checkpoint_bytes,
    prepare_save,
)
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

FaultKind = Literal["slow", "dead", "dead_node", "lost"]
SAVE_AFTER_STEP = 1  # a checkpoint is rehearsed beside the steps after this one, counted from 1
MIN_STEPS_WITH_SAVE = 2  # one without and one with a save beside it
FAULT_STEP = 1  # in which a rank dies or a message is lost; counts from 0
# Processor seconds that an action takes here besides its own time, with the messages of four sequential layers of
# Python; `scripts/bench_rehearse.py` measures 0.3 to 0.6 ms.
ACTION_OVERHEAD_S = 0.5e-3
MAX_OVERHEAD_SHARE = 0.05  # of a step, that this machine may need for its actions
HANG_STEPS = 2  # stretched steps without progress after which a rank is said to hang
HANG_SHARDS = 2  # the same for a save: a shard is all that it writes between two signs of life
MIN_HANG_S = 10.0


@dataclass(frozen=True)
class RehearsalFault:
    """Something that goes wrong on a rank or a node, numbered as in the plan."""

    kind: FaultKind
    number: int  # of the rank, or of the node that is dead
    factor: float = 1.0  # how many times as long a slow rank computes

    def hits(self, rank: int, ranks_per_node: int) -> bool:
        """Return whether a rank of the plan is the one, or on the node, that this happens to."""
        return self.number == (rank // ranks_per_node if self.kind == "dead_node" else rank)


@dataclass(frozen=True)
class RehearsalRequest:
    """What to rehearse."""

    recipe: Recipe
    plan: Plan
    timing: ModelTiming  # of every action of the plan, with the loads of the step that is rehearsed
    num_steps: int
    stretch: float | None = None  # how many times as long as planned everything takes; None to choose it
    fault: RehearsalFault | None = None
    disk_bytes_per_s: float | None = None  # at which each rank writes a checkpoint; None to rehearse none
    max_processes: int = 64


@dataclass(frozen=True)
class RehearsalResult:
    """What was rehearsed. Seconds and shares are those of the plan: without the stretch."""

    ranks: tuple[int, ...]  # of the plan, one for each process
    stretch: float
    predicted_s: float  # of the step, by the simulator
    unbroken_s: float  # the same without the fault
    predicted_bubbles: Mapping[BubbleKind, float]  # idle time by kind, as shares of the ranks' time
    steps_s: Sequence[float] = ()  # of each rehearsed step; empty if a fault ended the rehearsal
    # The same without what this machine took in addition to the predicted times: differs from the prediction only where
    # the simulator orders actions or messages differently than the runtime does.
    scheduled_s: Sequence[float] = ()
    bubbles: Mapping[BubbleKind, float] = field(default_factory=dict)  # of the last step; empty in that case too
    failure: str | None = None  # what the ranks reported of a fault that ended it
    checkpoint: CheckpointTraffic | None = None  # if one was rehearsed, and no fault ended it

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
    if request.fault is not None and not _hit_ranks(request, group):
        raise UserError(_explain_no_such_rank(request, group))
    program = _build(request, group)
    stretch = request.stretch or _choose_stretch(program, request.timing, group)
    predicted = simulate(program, _stretched(request, group, stretch))
    unbroken = simulate(program, _stretched(replace(request, fault=None), group, stretch))
    result = RehearsalResult(
        group.ranks,
        stretch,
        predicted.step_time_s / stretch,
        unbroken.step_time_s / stretch,
        predicted.bubble_shares(),
    )
    with tempfile.TemporaryDirectory() as folder:
        hang_s = max(MIN_HANG_S, HANG_STEPS * predicted.step_time_s, HANG_SHARDS * _longest_shard_s(request, stretch))
        shared = _Shared(request, group, stretch, hang_s, Path(folder))
        try:
            launch_local(num_ranks, partial(_run_rank, shared))
        except RunError as error:
            if request.fault is None:
                raise
            return replace(result, failure=_describe(error, shared.folder, num_ranks))
        return _add_measured(result, request, json.loads(shared.result_file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class _Shared:
    """What all ranks of a rehearsal know."""

    request: RehearsalRequest
    group: FirstGroup
    stretch: float
    hang_s: float
    folder: Path  # for the result, the reports of ranks that hang, and the checkpoint

    @property
    def result_file(self) -> Path:
        """What rank 0 writes."""
        return self.folder / "result.json"


def _hit_ranks(request: RehearsalRequest, group: FirstGroup) -> tuple[int, ...]:
    """Return the ranks of the plan, of those that are rehearsed, to which the fault happens."""
    fault, ranks_per_node = request.fault, request.timing.ranks_per_node
    return () if fault is None else tuple(rank for rank in group.ranks if fault.hits(rank, ranks_per_node))


def _explain_no_such_rank(request: RehearsalRequest, group: FirstGroup) -> str:
    assert request.fault is not None
    if request.fault.kind == "dead_node":
        nodes = sorted({rank // request.timing.ranks_per_node for rank in group.ranks})
        what, allowed = "node", f"a node of the first replica group, {', '.join(map(str, nodes))}"
    else:
        what, allowed = "rank", f"a rank of the first replica group, {', '.join(map(str, group.ranks))}"
    return f"--fault: {what} {request.fault.number} found; allowed: {allowed}"


def _longest_shard_s(request: RehearsalRequest, stretch: float) -> float:
    """Return the longest time in which a save makes no progress that the watchdog hears of."""
    if request.disk_bytes_per_s is None:
        return 0.0
    most_bytes = max(_rank_bytes(request))
    return CheckpointSpeed(request.disk_bytes_per_s, stretch).shard_s(most_bytes)


def _add_measured(result: RehearsalResult, request: RehearsalRequest, measured: Mapping[str, Any]) -> RehearsalResult:
    """Return the result with what rank 0 wrote of a rehearsal that came to its end."""
    steps_s, scheduled_s = ([s / result.stretch for s in measured[key]] for key in ("steps_s", "scheduled_s"))
    result = replace(result, steps_s=steps_s, scheduled_s=scheduled_s, bubbles=measured["bubbles"])
    if request.disk_bytes_per_s is None:
        return result
    settings = request.recipe.train.checkpoint
    rank_bytes = _rank_bytes(request)
    copy_s = max(rank_bytes) / HOST_COPY_BYTES_PER_S if settings.async_save else 0.0
    beside = [seconds for seconds, is_beside in zip(steps_s, measured["beside_save"], strict=True) if is_beside]
    alone = [seconds for seconds, is_beside in zip(steps_s, measured["beside_save"], strict=True) if not is_beside]
    traffic = CheckpointTraffic(
        total_bytes=sum(rank_bytes),
        largest_bytes=max(rank_bytes),
        every=settings.every,
        is_async=settings.async_save,
        copy_s=copy_s,
        save_s=copy_s + measured["save_s"] / result.stretch,
        step_s=mean(alone),
        step_beside_save_s=mean(beside) if beside else None,
    )
    return replace(result, checkpoint=traffic)


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
        slow_ranks[group.ranks.index(fault.number)] = fault.factor
    return StretchedTiming(request.timing, request.timing.graph, group, stretch, slow_ranks)


def _choose_stretch(program: Program, timing: ModelTiming, group: FirstGroup) -> float:
    """Return a stretch with which the actions themselves take a small share of this machine's time."""
    plain = StretchedTiming(timing, timing.graph, group, 1.0, {})
    step_s = simulate(program, plain).step_time_s
    num_actions = sum(len(actions) for actions in program.actions.values())
    overhead_s = num_actions * ACTION_OVERHEAD_S / (os.cpu_count() or 1)
    return max(1.0, overhead_s / MAX_OVERHEAD_SHARE / step_s)


class _RankFault(FaultPoints):
    """Kills this rank's process or loses a message, where the fault asks for that."""

    def __init__(self, kind: FaultKind | None) -> None:
        """Break as `kind` says; with None nothing breaks."""
        self._dies = kind in ("dead", "dead_node")
        self._loses = kind == "lost"
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


def _run_rank(shared: _Shared, address: Address) -> None:
    """Rehearse as one rank; rank 0 writes the result."""
    world = join(address)
    torch.set_num_threads(1)
    activity = Activity()
    with Watchdog(activity, shared.hang_s, shared.folder, world):
        _rehearse_steps(shared, world, activity)
    leave()


def _rehearse_steps(shared: _Shared, world: World, activity: Activity) -> None:
    request, loads = shared.request, shared.request.timing.loads
    program = _build(request, shared.group)
    clock = RankClock()
    timing = _stretched(request, shared.group, shared.stretch)
    rehearsal = Rehearsal(shared.group.graph, timing, loads, world.rank, clock)
    executor = _build_executor(request, program, rehearsal, world, activity)
    save = _prepare_save(shared, world, activity)
    inputs = {mb: TextInput(()) for mb in loads.loads}
    loss_scale = dict.fromkeys(request.plan.units, 1.0)
    steps_s: list[float] = []
    scheduled_s: list[float] = []
    beside_save: list[bool] = []
    record: StepRecord | None = None
    num_steps = max(request.num_steps, MIN_STEPS_WITH_SAVE) if save else request.num_steps
    for step in range(num_steps):
        activity.step = step + 1
        activity.start("waiting for all ranks to start the step")
        beside_save.append(save is not None and _latest(float(save.saver.pending and not save.saver.done)) > 0)
        start_s = _latest(time.perf_counter())
        clock.start_step(start_s)
        record = executor.run(StepInput(inputs, loads, loss_scale, step=step)).record
        activity.start("gathering the step time")
        steps_s.append(_latest(record.end_s) - start_s)
        scheduled_s.append(_latest(clock.now_s) - start_s)
        if save and step == SAVE_AFTER_STEP - 1:
            save.start(SAVE_AFTER_STEP)
    if save:
        save.finish()
    records = world.gather_to_first(record)
    if world.is_first:
        by_rank = {rank: item for rank, item in enumerate(records) if isinstance(item, StepRecord)}
        timeline = measured_timeline(shared.group.graph, by_rank, lambda rank, action: 0)
        result = {
            "steps_s": steps_s,
            "scheduled_s": scheduled_s,
            "bubbles": timeline.bubble_shares(),
            "beside_save": beside_save,
            "save_s": save.saver.save_s if save else 0.0,
        }
        shared.result_file.write_text(json.dumps(result), encoding="utf-8")


def _rank_bytes(request: RehearsalRequest) -> list[int]:
    """Return how many bytes each rank of the plan writes at a checkpoint."""
    moments = request.recipe.train.optimizer.moments
    return [checkpoint_bytes(request.timing, rank, moments) for rank in range(request.plan.world_size)]


def _prepare_save(shared: _Shared, world: World, activity: Activity) -> RehearsedSave | None:
    request = shared.request
    if request.disk_bytes_per_s is None:
        return None
    num_bytes = _rank_bytes(request)[shared.group.ranks[world.rank]]
    speed = CheckpointSpeed(request.disk_bytes_per_s, shared.stretch)
    return prepare_save(request.recipe, world, activity, shared.folder / "checkpoints", num_bytes, speed)


def _build_executor(
    request: RehearsalRequest, program: Program, rehearsal: Rehearsal, world: World, activity: Activity
) -> Executor:
    graph, rank = rehearsal.graph, world.rank
    groups = build_groups(graph, world, activity)
    probe_channels(groups, world, activity)
    activity.start(BUILDING)
    actions = program.for_rank(rank)
    token_shards = {name: unit.tp for name, unit in request.plan.units.items() if unit.sp}
    group = rehearsal.timing.group
    is_hit = group.ranks[rank] in _hit_ranks(request, group)
    faults = _RankFault(request.fault.kind if request.fault is not None and is_hit else None)
    transport = TimedTransport(
        rank,
        groups,
        dict.fromkeys(graph.edges, STAND_IN_WIDTH),
        token_shards,
        world.device,
        STAND_IN_DTYPE,
        rehearsal=rehearsal,
        loses=faults.loses,
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
