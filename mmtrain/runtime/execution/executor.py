"""The executor: run one rank's actions, in order.

It knows no model, no tensor shape and no placement: a unit runs its stages, the broker moves what flows between
them, the optimizer reduces and steps. Backwards cross stage borders explicitly, through detached inputs whose
gradients go to the broker.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.program import (
    Action,
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
from mmtrain.program.ir.actions import AtomicAction
from mmtrain.program.ir.data_dependencies import Bucket, parameter_gathers
from mmtrain.program.ir.segments import direction, expand_all, finished_pass, num_segments, segment_layers, started_pass
from mmtrain.program.trace.step_record import EMPTY_STEP_RECORD, StepRecord
from mmtrain.runtime.execution.activity import DRAINING, Activity
from mmtrain.runtime.execution.broker import Broker, RouteRows
from mmtrain.runtime.execution.dispatch_exchange import DispatchExchange, RoutePair
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.unit import MicrobatchState


@dataclass(frozen=True)
class StepInput:
    """One rank's share of a global batch."""

    inputs: Mapping[Microbatch, UnitInput]
    loads: StepLoads
    loss_scale: Mapping[str, float]  # unit with a loss -> 1 / number of target tokens in the global batch
    lr: float = 0.0
    step: int = 0  # from 0
    route_rows: Mapping[RoutePair, RouteRows] | None = None  # `Broker.host_rows`, on the device
    exchanges: Mapping[Dispatch, DispatchExchange] | None = None  # `Broker.host_exchanges`


@dataclass
class StepOutcome:
    """What one rank computed in a step."""

    unit_losses: dict[str, float] = field(default_factory=dict)  # this rank's part of each unit's loss in the step
    source_losses: tuple[float, ...] = ()  # its parts by source, where the input names sources and this rank has a loss
    grad_norm: float | None = None
    stepped: bool = False  # false in validation, and where a gradient was not finite
    record: StepRecord = EMPTY_STEP_RECORD
    loads: StepLoads | None = None  # of the step

    @property
    def loss(self) -> float:
        """This rank's part of the loss of the step: the sum over units with a loss."""
        return sum(self.unit_losses.values())


class StageRunner(Protocol):
    """Runs forwards and backwards of one unit's stages on this rank: `UnitRunner`, or a stand-in without weights."""

    groups: ParallelGroups

    def forward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """Run segments [lo, hi); after the last, `microbatch.part_outputs[-1]` are the stage's outputs and loss."""

    def backward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """Run the backward of segments [lo, hi); leave the gradients of what the stage received in its `.grad`."""

    def prefetch(self, microbatch: MicrobatchState) -> None:
        """Start to bring back from host memory what the next backward of the microbatch reads first."""


class StepOptimizer(Protocol):
    """Reduces gradients and updates weights: `Optimizer`, or a stand-in without weights."""

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""

    def reduce_shared(self) -> None:
        """Sum the gradient of the matrix that two stages share."""

    def reduce_grads(self, unit: str, chunk: int, bucket: int) -> None:
        """Start to sum the gradients of a bucket of a model chunk of the unit over its replicas."""

    def finish_reductions(self) -> None:
        """Wait until the gradients of all units are summed."""

    def step(self, lr: float) -> None:
        """Update the weights, unless a gradient is not finite."""

    def finish_step(self) -> tuple[float, bool]:
        """Return (gradient norm, whether the update was made); waits for the device."""

    def start_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """Start to gather the parameters of a bucket, which the step before has updated, on every replica."""

    def finish_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """Wait until the parameters of a bucket are gathered."""


class Executor:
    """Runs the actions of one rank over its units. It reports each to `activity`; `faults` may break it."""

    def __init__(
        self,
        graph: StageGraph,
        actions: Sequence[Action],
        units: Mapping[str, StageRunner],
        broker: Broker,
        optimizer: StepOptimizer | None,
        activity: Activity | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        self._graph, self._units, self._broker, self._optimizer = graph, units, broker, optimizer
        self._actions = expand_all(graph, actions)
        self._has_update = Step() in self._actions
        self._part_bounds = _part_bounds(graph, self._actions)
        self._next_backwards = _next_backwards(graph, self._actions)
        self._gathered = parameter_gathers(graph, broker.rank)
        self._activity = activity or Activity()
        self._faults = faults or FaultPoints()

    def host_rows(self, loads: StepLoads) -> Mapping[RoutePair, RouteRows]:
        """Return `StepInput.route_rows` for a step with these loads, with tensors on the host."""
        return self._broker.host_rows(loads)

    def host_exchanges(self, loads: StepLoads) -> Mapping[Dispatch, DispatchExchange]:
        """Return `StepInput.exchanges` for a step with these loads."""
        return self._broker.host_exchanges(loads)

    def run(self, step: StepInput) -> StepOutcome:
        """Run one step; without an optimizer, only what the program computes (validation)."""
        self._step = step
        self._outcome = StepOutcome(loads=step.loads)
        self._microbatches: dict[tuple[StageId, Microbatch], MicrobatchState] = {}
        self._gathering: dict[GatherParams, Bucket] = {}  # those that nothing has waited for yet
        self._losses: dict[str, Tensor] = {}  # by unit with a loss on this rank
        self._broker.start_step(step.loads, step.route_rows, step.exchanges)
        if self._optimizer:
            self._optimizer.zero_grad()
        self._activity.recorder.start_step()
        for action, next_backward in zip(self._actions, self._next_backwards, strict=True):
            if next_backward is not None and (microbatch := self._microbatches.get(next_backward)) is not None:
                self._units[microbatch.stage.unit].prefetch(microbatch)
            self._activity.start(action)
            self._faults.before_action(step.step, action)
            self._run(action)
        self._activity.start(DRAINING)
        self._broker.drain()
        self._outcome.record = self._activity.recorder.stop_step()
        # Here alone the host asks the device for numbers.
        if self._optimizer and self._has_update:
            self._outcome.grad_norm, self._outcome.stepped = self._optimizer.finish_step()
        for unit, loss in self._losses.items():
            parts = loss.reshape(-1).tolist()
            self._outcome.unit_losses[unit] = sum(parts)
            if loss.dim():  # the LLM's, by source
                self._outcome.source_losses = tuple(parts)
        return self._outcome

    def _run(self, action: Action) -> None:
        match action:
            case Forward() | Backward() | Partial():
                if direction(action) == "F":
                    self._forward(action)
                else:
                    self._backward(action)
            case Send():
                self._broker.send(action)
            case Recv():
                self._broker.receive(action)
            case Share():
                self._broker.share(action)
            case Dispatch():
                self._broker.dispatch(action)
            case _:
                assert self._optimizer is not None, "a program without optimizer holds no optimizer actions"
                self._update(self._optimizer, action)

    def _update(self, optimizer: StepOptimizer, action: Action) -> None:
        match action:
            case ReduceShared():
                optimizer.reduce_shared()
            case ReduceGrads(unit, chunk, bucket):
                optimizer.reduce_grads(unit, chunk, bucket)
            case Step():
                self._activity.wait_for_collectives()
                optimizer.finish_reductions()
                self._activity.arrived()
                optimizer.step(self._step.lr)
            case GatherParams(unit, chunk, bucket):
                optimizer.start_gather(unit, chunk, bucket)
                self._gathering[action] = self._gathered[action]

    def _forward(self, action: Compute) -> None:
        stage, mb = action.stage, action.mb
        needs_backward = self._graph.needs_backward(stage)
        for gather in [g for g, bucket in self._gathering.items() if bucket.holds_any(self._graph, action)]:
            del self._gathering[gather]
            self._finish_gather(gather)
        if started_pass(self._graph, action):
            self._start_forward(stage, mb)
        microbatch = self._microbatches[stage, mb]
        with torch.set_grad_enabled(needs_backward and not microbatch.reruns_forward):
            self._units[stage.unit].forward(microbatch, *self._segments(action))
            if finished_pass(self._graph, action):
                self._finish_forward(microbatch, mb)
        if not finished_pass(self._graph, action):
            return
        if not needs_backward:
            del self._microbatches[stage, mb]
        elif microbatch.reruns_forward:
            microbatch.forget_forward()

    def _finish_gather(self, gather: GatherParams) -> None:
        """Wait for the parameters of some layers before their first forward."""
        assert self._optimizer is not None, "a program without optimizer gathers nothing"
        self._activity.wait_for_collectives()
        self._optimizer.finish_gather(gather.unit, gather.chunk, gather.bucket)
        self._activity.arrived()

    def _start_forward(self, stage: StageId, mb: Microbatch) -> None:
        """Take what the stage receives for a microbatch."""
        received = {edge: self._broker.take(edge, mb, "activation") for edge in self._graph.inputs(stage)}
        if self._graph.needs_backward(stage):
            for edge, tensor in received.items():
                tensor.requires_grad_(self._graph.carries_gradient(edge))
        bounds = self._part_bounds.get((stage, mb), ())
        segments = segment_layers(self._graph, stage) if bounds else ()
        reruns_forward = self._graph.reruns_forward(stage)
        self._microbatches[stage, mb] = MicrobatchState(
            stage, mb, self._step.inputs[mb], received, bounds, segments, reruns_forward
        )

    def _finish_forward(self, microbatch: MicrobatchState, mb: Microbatch) -> None:
        """Give the stage's outputs to the broker, and add its loss."""
        stage = microbatch.stage
        outputs = tuple(
            self._faults.forward_output(self._step.step, Forward(stage, mb), output)
            for output in microbatch.part_outputs[-1]
        )
        microbatch.part_outputs[-1] = outputs
        if self._graph.has_loss(stage) and self._units[stage.unit].groups.tp_rank == 0:  # TP ranks see the same loss
            # Stays on the device: fetched here, every microbatch would wait until the GPU has caught up.
            part = outputs[-1].detach().double() * self._step.loss_scale[stage.unit]
            self._losses[stage.unit] = self._losses[stage.unit] + part if stage.unit in self._losses else part
        edges = self._graph.outputs(stage)
        for edge in edges:
            self._broker.put(edge, mb, "activation", outputs[0].detach())
        if edges:
            microbatch.release_output()

    def _backward(self, action: Compute) -> None:
        stage, mb = action.stage, action.mb
        microbatch = self._microbatches[stage, mb]
        if started_pass(self._graph, action):
            microbatch.output_gradients = self._output_gradients(microbatch, mb)
        self._units[stage.unit].backward(microbatch, *self._segments(action))
        if not finished_pass(self._graph, action):
            return
        del self._microbatches[stage, mb]
        for edge, tensor in microbatch.received.items():
            if self._graph.carries_gradient(edge):
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._broker.put(edge, mb, "gradient", gradient)

    def _output_gradients(self, microbatch: MicrobatchState, mb: Microbatch) -> list[Tensor | None]:
        """Return the gradients of the stage's outputs: the sum of what came over its edges, and its loss's own."""
        stage = microbatch.stage
        gradients: list[Tensor | None] = []
        received = [self._broker.take(edge, mb, "gradient") for edge in self._graph.outputs(stage)]
        if received:
            gradients.append(sum(received[1:], start=received[0]))
        if self._graph.has_loss(stage):
            loss = microbatch.part_outputs[-1][-1]
            gradients.append(torch.full_like(loss, self._step.loss_scale[stage.unit]))
        return gradients

    def _segments(self, action: Compute) -> tuple[int, int]:
        if isinstance(action, Partial):
            return action.lo, action.hi
        return 0, num_segments(self._graph, action.stage)


def _next_backwards(graph: StageGraph, actions: Sequence[AtomicAction]) -> list[tuple[StageId, Microbatch] | None]:
    """Return for each action that computes which backward starts as the next one to compute, if one does."""
    upcoming: list[tuple[StageId, Microbatch] | None] = []
    following: tuple[StageId, Microbatch] | None = None
    for action in reversed(actions):
        if not isinstance(action, Compute):
            upcoming.append(None)
            continue
        upcoming.append(following)
        is_backward = isinstance(started_pass(graph, action), Backward)
        following = (action.stage, action.mb) if is_backward else None
    return upcoming[::-1]


def _part_bounds(
    graph: StageGraph, actions: Sequence[AtomicAction]
) -> dict[tuple[StageId, Microbatch], tuple[int, ...]]:
    """Return the segments at which forward or backward parts start, for each microbatch that runs in parts."""
    bounds: defaultdict[tuple[StageId, Microbatch], set[int]] = defaultdict(set)
    for action in actions:
        if isinstance(action, Partial):
            bounds[action.stage, action.mb] |= {0, action.lo, action.hi, num_segments(graph, action.stage)}
    return {key: tuple(sorted(segments)) for key, segments in bounds.items()}
