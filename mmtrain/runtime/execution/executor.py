"""The executor: runs one rank's actions, in order.

It knows no model, no tensor shape and no placement: a unit runs its stages, the broker moves what flows between
them, the optimizer reduces and steps. Backwards cross stage borders explicitly, through detached inputs whose
gradients are handed to the broker.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmtrain.models.stage_inputs import UnitInput
from mmtrain.program import (
    Action,
    Backward,
    Compute,
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
from mmtrain.program.ir.segments import direction, expand_all, finished_pass, num_segments, segment_layers, started_pass
from mmtrain.program.trace.step_record import EMPTY_STEP_RECORD, StepRecord
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.unit import MicrobatchState, UnitRunner


@dataclass(frozen=True)
class StepInput:
    """One rank's share of a global batch."""

    inputs: Mapping[Microbatch, UnitInput]
    loads: StepLoads
    loss_scale: Mapping[str, float]  # unit with a loss -> 1 / what it counts in the global batch (target tokens)
    lr: float = 0.0
    number: int = 0  # of the step, from 0


@dataclass
class StepOutcome:
    """What one rank saw in a step; `loss` is its part of the global batch's mean loss, the sum over units with one."""

    loss: float = 0.0
    grad_norm: float | None = None
    stepped: bool = False  # false in evaluation, and where a gradient was not finite
    record: StepRecord = EMPTY_STEP_RECORD
    loads: StepLoads | None = None  # that the step had


class Executor:
    """Runs the actions of one rank over its units; `activity` is told of each, `faults` may spoil it."""

    def __init__(
        self,
        graph: StageGraph,
        actions: Sequence[Action],
        units: Mapping[str, UnitRunner],
        broker: Broker,
        optimizer: Optimizer | None,
        activity: Activity | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        self._graph, self._actions, self._units = graph, expand_all(graph, actions), units
        self._cuts = _cuts(graph, self._actions)
        self._broker, self._optimizer = broker, optimizer
        self._activity, self._faults = activity or Activity(), faults or FaultPoints()

    def run(self, step: StepInput) -> StepOutcome:
        """Run one step; without an optimizer, only what the program computes (validation)."""
        self._step, self._outcome = step, StepOutcome(loads=step.loads)
        self._passages: dict[tuple[StageId, Microbatch], MicrobatchState] = {}
        self._loss = torch.zeros((), dtype=torch.float64)
        self._broker.start_step(step.loads)
        if self._optimizer:
            self._optimizer.zero_grad()
        self._activity.recorder.start_step()
        for action in self._actions:
            self._activity.start(action)
            self._faults.before_action(step.number, action)
            self._run(action)
        self._activity.start("waiting for what was sent to leave")
        self._broker.drain()
        self._outcome.record = self._activity.recorder.stop_step()
        self._outcome.loss = float(self._loss)
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
            case _:
                assert self._optimizer is not None, "a program without optimizer holds no optimizer actions"
                self._update(self._optimizer, action)

    def _update(self, optimizer: Optimizer, action: Action) -> None:
        match action:
            case ReduceShared():
                optimizer.reduce_shared()
            case ReduceGrads(unit):
                optimizer.reduce_grads(unit)
            case Step():
                self._outcome.grad_norm, self._outcome.stepped = optimizer.step(self._step.lr)
            case GatherParams(unit):
                optimizer.gather_params(unit)

    def _forward(self, action: Compute) -> None:
        stage, mb, keep = action.stage, action.mb, self._graph.needs_backward(action.stage)
        if started_pass(self._graph, action):
            self._enter(stage, mb)
        passage = self._passages[stage, mb]
        with torch.set_grad_enabled(keep):
            self._units[stage.unit].forward(passage, *self._segments(action))
            if finished_pass(self._graph, action):
                self._leave(passage, mb)
        if not keep and finished_pass(self._graph, action):
            del self._passages[stage, mb]

    def _enter(self, stage: StageId, mb: Microbatch) -> None:
        """Begin a microbatch's way through a stage with what has come for it."""
        received = {edge: self._broker.take(edge, mb, "activation") for edge in self._graph.inputs(stage)}
        if self._graph.needs_backward(stage):
            for edge, tensor in received.items():
                tensor.requires_grad_(self._graph.carries_gradient(edge))
        cuts = self._cuts.get((stage, mb), ())
        segments = segment_layers(self._graph, stage) if cuts else ()
        self._passages[stage, mb] = MicrobatchState(stage, self._step.inputs[mb], received, cuts, segments)

    def _leave(self, passage: MicrobatchState, mb: Microbatch) -> None:
        """Hand on what the stage gives, and count its loss."""
        stage = passage.stage
        outputs = tuple(self._faults.forward_output(self._step.number, Forward(stage, mb), o) for o in passage.left[-1])
        passage.left[-1] = outputs
        if self._graph.has_loss(stage) and self._units[stage.unit].groups.tp_rank == 0:  # TP ranks see the same loss
            # Stays on the device: fetched here, every microbatch would wait until the GPU has caught up.
            self._loss = self._loss + outputs[-1].detach().double() * self._step.loss_scale[stage.unit]
        for edge in self._graph.outputs(stage):
            self._broker.put(edge, mb, "activation", outputs[0].detach())

    def _backward(self, action: Compute) -> None:
        stage, mb = action.stage, action.mb
        passage = self._passages[stage, mb]
        if started_pass(self._graph, action):
            passage.gradients = self._returned(passage, mb)
        self._units[stage.unit].backward(passage, *self._segments(action))
        if not finished_pass(self._graph, action):
            return
        del self._passages[stage, mb]
        for edge, tensor in passage.received.items():
            if self._graph.carries_gradient(edge):
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._broker.put(edge, mb, "gradient", gradient)

    def _returned(self, passage: MicrobatchState, mb: Microbatch) -> list[Tensor | None]:
        """Gradients of what the stage gave: the sum of those that came over its edges, and its loss's own."""
        stage = passage.stage
        found: list[Tensor | None] = []
        returned = [self._broker.take(edge, mb, "gradient") for edge in self._graph.outputs(stage)]
        if returned:
            found.append(sum(returned[1:], start=returned[0]))
        if self._graph.has_loss(stage):
            found.append(torch.full_like(passage.left[-1][-1], self._step.loss_scale[stage.unit]))
        return found

    def _segments(self, action: Compute) -> tuple[int, int]:
        if isinstance(action, Partial):
            return action.lo, action.hi
        return 0, num_segments(self._graph, action.stage)


def _cuts(graph: StageGraph, actions: Sequence[AtomicAction]) -> dict[tuple[StageId, Microbatch], tuple[int, ...]]:
    """Where parts of a stage's forward or backward begin and end, for each microbatch that is run in parts."""
    found: defaultdict[tuple[StageId, Microbatch], set[int]] = defaultdict(set)
    for action in actions:
        if isinstance(action, Partial):
            found[action.stage, action.mb] |= {0, action.lo, action.hi, num_segments(graph, action.stage)}
    return {key: tuple(sorted(cuts)) for key, cuts in found.items()}
