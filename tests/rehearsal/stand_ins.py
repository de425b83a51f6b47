"""What a rehearsal puts in the place of a rank's model, optimizer and network.

Each takes the time that the plan predicts. A rank keeps the moment up to which it has acted; an action ends its own
time after that moment, or after what it waited for. So what this machine needs between two actions does not add up,
as long as it is less than they take.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.program import (
    Backward,
    Compute,
    Dispatch,
    Forward,
    GatherParams,
    Microbatch,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    StageGraph,
    StageId,
    Step,
    StepLoads,
)
from mmtrain.program.ir.actions import Collective, Direction
from mmtrain.program.ir.data_dependencies import EMBEDDINGS
from mmtrain.program.ir.segments import num_segments
from mmtrain.runtime.execution.process_groups import Pending, ProcessGroups, Transport
from mmtrain.runtime.execution.unit import MicrobatchState
from tests.rehearsal.stretched_timing import StretchedTiming

STAND_IN_DTYPE = torch.float64  # holds a moment of the clock to the microsecond
STAND_IN_WIDTH = 1  # features in a row: a message keeps its number of rows and shrinks to this width


class RankClock:
    """The moments up to which this rank and its streams have acted, in seconds of `perf_counter`.

    That clock is the same in all processes of a machine.
    """

    def __init__(self) -> None:
        self.now_s = time.perf_counter()
        self.stream_free_s = self.now_s
        self.async_free_s = self.now_s  # of the stream that carries asynchronous collectives

    def start_step(self, start_s: float) -> None:
        """Start a step at a moment that all ranks agree on."""
        self.now_s = self.stream_free_s = self.async_free_s = start_s

    def advance(self, moment_s: float) -> None:
        """Sleep until a moment, unless the rank has acted beyond it."""
        self.now_s = max(self.now_s, moment_s)
        left_s = self.now_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def depart(self, seconds: float) -> float:
        """Occupy the communication stream as soon as it is free; return when that starts."""
        start_s = max(self.now_s, self.stream_free_s)
        self.stream_free_s = start_s + seconds
        return start_s

    def join(self, group: dist.ProcessGroup | None, seconds: float, uses_stream: bool = True) -> None:
        """Act together with a group of ranks for some seconds, starting when the last of them is ready.

        `uses_stream`: whether this is communication, which also waits for the communication stream. `group`: None for
        all ranks.
        """
        ready_s = max(self.now_s, self.stream_free_s) if uses_stream else self.now_s
        self.advance(_latest(ready_s, group) + seconds)
        if uses_stream:
            self.stream_free_s = self.now_s

    def run_async(self, group: dist.ProcessGroup | None, reached_s: float, seconds: float) -> None:
        """Carry out a collective that this rank reached at a moment; it starts when its whole group has reached it."""
        self.async_free_s = _latest(max(reached_s, self.async_free_s), group) + seconds


def _latest(moment_s: float, group: dist.ProcessGroup | None) -> float:
    if dist.get_world_size(group) == 1:
        return moment_s
    latest = torch.tensor(moment_s, dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    return float(latest)


@dataclass(frozen=True)
class Rehearsal:
    """What the stand-ins of one rank share."""

    graph: StageGraph
    timing: StretchedTiming
    loads: StepLoads
    rank: int
    clock: RankClock


@dataclass
class _TimedSend:
    work: Pending
    rows: Tensor  # must live until they have left

    def wait(self) -> None:
        self.work.wait()


@dataclass
class _TimedReceive:
    work: Pending
    rows: Tensor
    seconds: float
    posted_s: float
    clock: RankClock

    def wait(self) -> None:
        """Wait until the message would have arrived: its time after its sender let it depart."""
        self.work.wait()
        departed_s = max(float(self.rows[0, 0]), self.posted_s)
        self.clock.advance(departed_s + self.seconds)


@dataclass(frozen=True)
class TimedTransport(Transport):
    """Sends the moment of departure instead of features, and delivers it after the predicted time.

    A message waits for its sender's communication stream, as in the simulator.
    """

    rehearsal: Rehearsal = field(kw_only=True)

    def send(self, rows: Tensor, message: Send) -> Pending:
        """See `Transport`."""
        clock = self.rehearsal.clock
        departed_s = clock.depart(self._seconds(self.rank, message))
        stamped = torch.full_like(rows, departed_s)
        return _TimedSend(super().send(stamped, message), stamped)

    def receive(self, rows: Tensor, message: Recv) -> Pending:
        """See `Transport`."""
        clock = self.rehearsal.clock
        sent = Send(message.edge, message.src, message.dst, self.rank, message.payload)
        seconds = self._seconds(message.peer, sent)
        return _TimedReceive(super().receive(rows, message), rows, seconds, clock.now_s, clock)

    def share(self, tensor: Tensor, share: Share, root: int) -> None:
        """See `Transport`."""
        super().share(tensor, share, root)
        unit = (share.edge.dst if share.payload == "activation" else share.edge.src).unit
        _run_collective(self.rehearsal, share, self.groups.units[unit].tp)

    def exchange(
        self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], dispatch: Dispatch
    ) -> Tensor:
        """See `Transport`."""
        received = super().exchange(rows, num_sent, num_received, dispatch)
        _run_collective(self.rehearsal, dispatch, self.groups.units[dispatch.edge.src.unit].dp)
        return received

    def gather_rows(self, rows: Tensor, num_rows: int, dispatch: Dispatch) -> Tensor:
        """See `Transport`."""
        gathered = super().gather_rows(rows, num_rows, dispatch)
        _run_collective(self.rehearsal, dispatch, self.groups.units[dispatch.edge.src.unit].dp)
        return gathered

    def _seconds(self, sender: int, message: Send) -> float:
        return self.rehearsal.timing.message(sender, message).seconds


class StandInUnit:
    """Takes the predicted time of each forward and backward, with its TP and cp group, and computes nothing."""

    def __init__(self, rehearsal: Rehearsal, groups: ParallelGroups, token_shards: int) -> None:
        self.groups = groups
        self._rehearsal, self._token_shards = rehearsal, token_shards
        # When what a part left under way has ended, by what continues it.
        self._under_way_s: dict[tuple[StageId, Microbatch, Direction], float] = {}

    def forward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """See `StageRunner`. The outputs have as many rows as those of the model."""
        self._run(microbatch, "F", lo, hi)
        graph, stage, mb = self._rehearsal.graph, microbatch.stage, microbatch.mb
        outputs = []
        if edges := graph.outputs(stage):
            crosses = any(edge.crosses_units for edge in edges)
            loads = self._rehearsal.loads
            rows = loads.rows_out[mb] if crosses else -(-loads.loads[mb].tokens // self._token_shards)
            outputs.append(torch.zeros(rows, STAND_IN_WIDTH, dtype=STAND_IN_DTYPE))
        if graph.has_loss(stage):
            outputs.append(torch.zeros((), dtype=STAND_IN_DTYPE))
        microbatch.part_outputs[:] = [tuple(outputs)]

    def backward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """See `StageRunner`. The gradients are zeros."""
        self._run(microbatch, "B", lo, hi)

    def prefetch(self, microbatch: MicrobatchState) -> None:
        """See `StageRunner`. Nothing is in host memory."""

    def _run(self, microbatch: MicrobatchState, kind: Direction, lo: int, hi: int) -> None:
        rehearsal, stage, mb = self._rehearsal, microbatch.stage, microbatch.mb
        action: Compute
        if (lo, hi) == (0, num_segments(rehearsal.graph, stage)):
            action = Forward(stage, mb) if kind == "F" else Backward(stage, mb)
        else:
            action = Partial(stage, mb, kind, lo, hi)
        rehearsal.clock.advance(self._under_way_s.pop((stage, mb, kind), 0.0))
        if self.groups.cp is not None:  # then its TP group starts when the last of all their ranks is ready
            rehearsal.clock.join(self.groups.cp, 0.0, uses_stream=False)
        rehearsal.clock.join(self.groups.tp, rehearsal.timing.compute(action), uses_stream=False)
        if isinstance(action, Partial) and rehearsal.graph.stage(stage).pieces:
            under_way_s = rehearsal.timing.left_under_way(action)
            self._under_way_s[stage, mb, kind] = rehearsal.clock.now_s + under_way_s


class StandInOptimizer:
    """Takes the predicted time of reductions, the optimizer step and parameter gathers, and updates nothing."""

    def __init__(self, rehearsal: Rehearsal, groups: ProcessGroups) -> None:
        self._rehearsal, self._groups = rehearsal, groups
        self._gathered_s: dict[tuple[str, int, int], float] = {}  # when parameters are there, by unit, chunk and bucket
        self._reached_s: dict[tuple[str, int, int], float] = {}  # when the rank reached a reduction, by the same

    def zero_grad(self) -> None:
        """See `StepOptimizer`."""

    def reduce_shared(self) -> None:
        """See `StepOptimizer`."""
        assert self._groups.tied_embeddings is not None
        _run_collective(self._rehearsal, ReduceShared(EMBEDDINGS), self._groups.tied_embeddings)

    def reduce_grads(self, unit: str, chunk: int, bucket: int) -> None:
        """See `StepOptimizer`."""
        self._reached_s[unit, chunk, bucket] = self._rehearsal.clock.now_s

    def finish_reductions(self) -> None:
        """See `StepOptimizer`. Only here ranks tell each other when they reached the reductions: none waits before.

        All ranks go through their units in one order, so that they do not wait for each other in a cycle.
        """
        rehearsal = self._rehearsal
        units = [mesh.unit for mesh in rehearsal.graph.meshes]
        for number in sorted(self._reached_s, key=lambda number: (units.index(number[0]), *number[1:]), reverse=True):
            reached_s = self._reached_s[number]
            seconds = rehearsal.timing.collective(rehearsal.rank, ReduceGrads(*number), ()).seconds
            unit = number[0]
            rehearsal.clock.run_async(self._groups.units[unit].dp, reached_s, seconds)
        self._reached_s.clear()
        rehearsal.clock.advance(rehearsal.clock.async_free_s)

    def step(self, lr: float) -> None:
        """See `StepOptimizer`."""
        _run_collective(self._rehearsal, Step(), None)

    def finish_step(self) -> tuple[float, bool]:
        """See `StepOptimizer`."""
        return 0.0, True

    def start_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """See `StepOptimizer`. Ranks tell each other at once when they reached it: none has anything to do before."""
        rehearsal, clock = self._rehearsal, self._rehearsal.clock
        seconds = rehearsal.timing.collective(rehearsal.rank, GatherParams(unit, chunk, bucket), ()).seconds
        clock.run_async(self._groups.units[unit].dp, clock.now_s, seconds)
        self._gathered_s[unit, chunk, bucket] = clock.async_free_s

    def finish_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """See `StepOptimizer`."""
        self._rehearsal.clock.advance(self._gathered_s[unit, chunk, bucket])


def _run_collective(rehearsal: Rehearsal, action: Collective, group: dist.ProcessGroup | None) -> None:
    cost = rehearsal.timing.collective(rehearsal.rank, action, ())
    rehearsal.clock.join(group, cost.seconds)
