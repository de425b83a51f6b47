"""The executor: runs one rank's actions, in order.

It knows no model, no tensor shape and no placement: a unit runs its stages, the broker moves what flows between
them, the optimizer reduces and steps. Backwards cross stage borders explicitly, through detached inputs whose
gradients are handed to the broker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmtrain.models.inputs import UnitInput
from mmtrain.program import (
    Action,
    Backward,
    Edge,
    Forward,
    GatherParams,
    Microbatch,
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
from mmtrain.program.recorded import EMPTY, StepRecord
from mmtrain.runtime.activity import Activity
from mmtrain.runtime.broker import Broker
from mmtrain.runtime.faults import Faults
from mmtrain.runtime.optimizer import Optimizer
from mmtrain.runtime.unit import UnitRunner


@dataclass(frozen=True)
class StepInput:
    """One rank's share of a global batch."""

    inputs: Mapping[Microbatch, UnitInput]
    loads: StepLoads
    loss_scale: float  # 1 / target tokens of the global batch
    lr: float = 0.0
    number: int = 0  # of the step, from 0


@dataclass
class StepOutcome:
    """What one rank saw in a step; `loss` is its part of the global batch's mean loss."""

    loss: float = 0.0
    grad_norm: float | None = None
    stepped: bool = False  # false in evaluation, and where a gradient was not finite
    record: StepRecord = EMPTY


@dataclass(frozen=True)
class _Saved:
    """What a backward needs of its forward."""

    inputs: dict[Edge, Tensor]
    output: Tensor


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
        faults: Faults | None = None,
    ) -> None:
        self._graph, self._actions, self._units = graph, actions, units
        self._broker, self._optimizer = broker, optimizer
        self._activity, self._faults = activity or Activity(), faults or Faults()

    def run(self, step: StepInput) -> StepOutcome:
        """Run one step; without an optimizer, only what the program computes (validation)."""
        self._step, self._outcome = step, StepOutcome()
        self._saved: dict[tuple[StageId, Microbatch], _Saved] = {}
        self._loss = torch.zeros((), dtype=torch.float64)
        self._broker.begin(step.loads)
        if self._optimizer:
            self._optimizer.zero_grad()
        self._activity.recorder.start()
        for action in self._actions:
            self._activity.begin(action)
            self._faults.before(step.number, action)
            self._run(action)
        self._activity.begin("waiting for what was sent to leave")
        self._broker.drain()
        self._outcome.record = self._activity.recorder.stop()
        self._outcome.loss = float(self._loss)
        return self._outcome

    def _run(self, action: Action) -> None:
        match action:
            case Forward(stage, mb):
                self._forward(stage, mb)
            case Backward(stage, mb):
                self._backward(stage, mb)
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

    def _forward(self, stage: StageId, mb: Microbatch) -> None:
        keep = self._graph.needs_backward(stage)
        inputs = {edge: self._broker.take(edge, mb, "activation") for edge in self._graph.inputs(stage)}
        if keep:
            for edge, tensor in inputs.items():
                tensor.requires_grad_(self._graph.carries_gradient(edge))
        with torch.set_grad_enabled(keep):
            output = self._units[stage.unit].forward(stage, self._step.inputs[mb], inputs)
            output = self._faults.computed(self._step.number, Forward(stage, mb), output)
        outputs = self._graph.outputs(stage)
        if not outputs:
            self._loss += output.detach().double().cpu() * self._step.loss_scale
        for edge in outputs:
            self._broker.put(edge, mb, "activation", output.detach())
        if keep:
            self._saved[stage, mb] = _Saved(inputs, output)

    def _backward(self, stage: StageId, mb: Microbatch) -> None:
        saved = self._saved.pop((stage, mb))
        outputs = self._graph.outputs(stage)
        if outputs:
            gradient = self._broker.take(outputs[0], mb, "gradient")
            for edge in outputs[1:]:
                gradient = gradient + self._broker.take(edge, mb, "gradient")
        else:
            gradient = torch.full_like(saved.output, self._step.loss_scale)
        if saved.output.requires_grad:
            self._units[stage.unit].backward(saved.output, gradient)
        for edge, tensor in saved.inputs.items():
            if self._graph.carries_gradient(edge):
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._broker.put(edge, mb, "gradient", gradient)
