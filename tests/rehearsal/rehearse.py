"""Rehearse a plan: run its program without its model, one process of this machine for each rank of a replica group.

Executor, broker, process groups and launcher are those of training. Stand-ins take the predicted time and send small
real messages, so the step must take as long as the simulator predicts.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import ModelTiming, Program, Timeline, build_program, simulate
from mmtrain.program.verify.deadlock import send_window
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.process_groups import build_groups, probe_channels
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, World, join, leave
from tests.rehearsal.first_group import FirstGroup, first_group
from tests.rehearsal.stand_ins import (
    STAND_IN_DTYPE,
    STAND_IN_WIDTH,
    RankClock,
    Rehearsal,
    StandInOptimizer,
    StandInUnit,
    TimedTransport,
)
from tests.rehearsal.stretched_timing import StretchedTiming

# Processor seconds that an action takes here besides its own time, with the messages of four sequential layers of
# Python; 0.3 to 0.6 ms were measured on two x86-64 cores.
ACTION_OVERHEAD_S = 0.5e-3
MAX_OVERHEAD_SHARE = 0.05  # of a step, that this machine may need for its actions


@dataclass(frozen=True)
class RehearsalRequest:
    """What to rehearse."""

    plan: Plan
    timing: ModelTiming  # of every action of the plan, with the loads of the step that is rehearsed
    num_steps: int
    stretch: float | None = None  # how many times as long as planned everything takes; None to choose it


@dataclass(frozen=True)
class RehearsalResult:
    """What was rehearsed. Seconds are those of the plan: without the stretch."""

    ranks: tuple[int, ...]  # of the plan, one for each process
    predicted: Timeline  # of the step, by the simulator, stretched
    stretch: float
    steps_s: Sequence[float]  # of each rehearsed step
    # The same without what this machine took in addition to the predicted times: differs from the prediction only where
    # the simulator orders actions or messages differently than the runtime does.
    scheduled_s: Sequence[float]

    @property
    def predicted_s(self) -> float:
        """Seconds of the step, by the simulator."""
        return self.predicted.step_time_s / self.stretch


def rehearse(request: RehearsalRequest) -> RehearsalResult:
    """Run some steps of replica group 0 on stand-ins, and simulate the same. Raises RunError where a rank fails."""
    group = first_group(request.timing.graph)
    program = _build(request, group)
    stretch = request.stretch or _choose_stretch(program, request.timing, group)
    predicted = simulate(program, StretchedTiming(request.timing, group, stretch))
    with tempfile.TemporaryDirectory() as folder:
        shared = _Shared(request, group, stretch, Path(folder) / "result.json")
        launch_local(len(group.ranks), partial(_run_rank, shared))
        measured = json.loads(shared.result_file.read_text(encoding="utf-8"))
    steps_s, scheduled_s = ([s / stretch for s in measured[key]] for key in ("steps_s", "scheduled_s"))
    return RehearsalResult(group.ranks, predicted, stretch, steps_s, scheduled_s)


@dataclass(frozen=True)
class _Shared:
    """What all ranks of a rehearsal know."""

    request: RehearsalRequest
    group: FirstGroup
    stretch: float
    result_file: Path  # that rank 0 writes


def _build(request: RehearsalRequest, group: FirstGroup) -> Program:
    schedule = request.plan.schedule
    order = None if schedule.order is None else group.renumber(schedule.order)
    return build_program(group.graph, kind=schedule.kind, order=order)


def _choose_stretch(program: Program, timing: ModelTiming, group: FirstGroup) -> float:
    """Return a stretch with which the actions themselves take a small share of this machine's time."""
    step_s = simulate(program, StretchedTiming(timing, group, 1.0)).step_time_s
    num_actions = sum(len(actions) for actions in program.actions.values())
    overhead_s = num_actions * ACTION_OVERHEAD_S / (os.cpu_count() or 1)
    return max(1.0, overhead_s / MAX_OVERHEAD_SHARE / step_s)


def _run_rank(shared: _Shared, address: Address) -> None:
    """Rehearse as one rank; rank 0 writes the result."""
    world = join(address)
    torch.set_num_threads(1)
    request, loads = shared.request, shared.request.timing.loads
    program = _build(request, shared.group)
    clock = RankClock()
    timing = StretchedTiming(request.timing, shared.group, shared.stretch)
    rehearsal = Rehearsal(shared.group.graph, timing, loads, world.rank, clock)
    executor = _build_executor(request, program, rehearsal, world)
    inputs = {mb: TextInput(()) for mb in loads.loads}
    loss_scale = dict.fromkeys(request.plan.units, 1.0)
    steps_s: list[float] = []
    scheduled_s: list[float] = []
    for step in range(request.num_steps):
        start_s = _latest(time.perf_counter())
        clock.start_step(start_s)
        record = executor.run(StepInput(inputs, loads, loss_scale, step=step)).record
        steps_s.append(_latest(record.end_s) - start_s)
        scheduled_s.append(_latest(clock.now_s) - start_s)
    if world.is_first:
        result = {"steps_s": steps_s, "scheduled_s": scheduled_s}
        shared.result_file.write_text(json.dumps(result), encoding="utf-8")
    leave()


def _build_executor(request: RehearsalRequest, program: Program, rehearsal: Rehearsal, world: World) -> Executor:
    graph, rank, activity = rehearsal.graph, world.rank, Activity()
    groups = build_groups(graph, world, activity)
    probe_channels(groups, world, activity)
    actions = program.for_rank(rank)
    token_shards = {name: unit.tp for name, unit in request.plan.units.items() if unit.sp}
    transport = TimedTransport(
        rank,
        groups,
        dict.fromkeys(graph.edges, STAND_IN_WIDTH),
        token_shards,
        world.device,
        STAND_IN_DTYPE,
        rehearsal=rehearsal,
    )
    units = {
        unit: StandInUnit(rehearsal, unit_groups, token_shards.get(unit, 1))
        for unit, unit_groups in groups.units.items()
    }
    broker = Broker(graph, actions, transport, send_window(program), activity)
    optimizer = StandInOptimizer(rehearsal, groups)
    return Executor(graph, actions, units, broker, optimizer, activity)


def _latest(moment_s: float) -> float:
    """Return the latest of all ranks' moments; all ranks call this together."""
    latest = torch.tensor(moment_s, dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    return float(latest)
