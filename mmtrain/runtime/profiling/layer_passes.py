"""Run a stage layer by layer, and time each layer's forward and backward.

What passes between two layers is one tensor, or the several of a generator's state. Each layer starts from tensors that
are cut off from the graph of the layers before it, so its backward runs alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.models.stage.stage_module import StageModule

Mark = Callable[[], Any]  # see `DeviceClock.mark`
Span = tuple[Any, Any]  # marks at the start and the end of one layer's pass


@dataclass(frozen=True)
class LayerPass:
    """The tensors that one layer's forward read and made. Those that it only passes on are in both."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def forward_by_layer(
    stage: StageModule, inputs: UnitInput, features: Mapping[str, Tensor], input_grad: bool, mark: Mark
) -> tuple[list[LayerPass], list[Span]]:
    """Run the forwards of all layers of a stage that holds its whole unit; return them and their times, in order.

    Args:
        stage: the stage to run.
        inputs: one microbatch.
        features: what other units send to the first layer.
        input_grad: whether what passes between layers needs gradients.
        mark: takes a mark of the device's clock.
    """
    passes: list[LayerPass] = []
    spans: list[Span] = []
    state: Any = None
    start = mark()  # what the context is made of counts to the first layer, as in a run
    context = stage.context(inputs, features)
    for index in stage.indices:
        if passes:
            state = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(input_grad), state)
            start = mark()
        layer_inputs = _tensors(state)
        state = stage.run_layer(context, state, index)
        spans.append((start, mark()))
        passes.append(LayerPass(layer_inputs, _tensors(state)))
    return passes, spans


def backward_by_layer(passes: list[LayerPass], mark: Mark) -> list[Span]:
    """Run the backwards of all layers, the last layer first; return their times in this order.

    Empties `passes`, so that each layer's tensors are freed as in a run. A layer behind which nothing has a gradient
    starts from ones.
    """
    spans: list[Span] = []
    gradients: list[Tensor | None] = []
    while passes:
        layer = passes.pop()
        if not gradients:
            gradients = [None] * len(layer.outputs)
        start = mark()
        _run_backward(layer, gradients)
        spans.append((start, mark()))
        gradients = [tensor.grad for tensor in layer.inputs]
        del layer  # or its tensors would outlive its backward
    return spans


def _run_backward(layer: LayerPass, gradients: list[Tensor | None]) -> None:
    """Add to the inputs of a layer, and to its weights, what follows from the gradients of its outputs."""
    computed = []
    passed_on = []
    for output, gradient in zip(layer.outputs, gradients, strict=True):
        if output.is_leaf:
            if output.requires_grad and gradient is not None:
                passed_on.append((output, gradient))
        elif output.requires_grad:
            computed.append((output, torch.ones_like(output) if gradient is None else gradient))
    if computed:
        torch.autograd.backward([output for output, _ in computed], [gradient for _, gradient in computed])
    for tensor, gradient in passed_on:  # autograd would copy the gradient; in a run there is nothing to do
        tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def _tensors(state: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
