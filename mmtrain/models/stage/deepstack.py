"""What travels beside the hidden states: outputs of encoder blocks, on their way to the LLM's first blocks.

DeepStack (arXiv 2406.04334): an encoder keeps the outputs of some blocks until its projector, which maps each to the
LLM's width; the LLM's embedding sends these on, and each of the first blocks adds one of them to its output. Inside a
stage they are tensors of their own. Between stages they lie in the rows of the hidden states, behind these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmtrain.models.shapes.layer_shape import LayerShape


def split_rows(rows: Tensor, width: int) -> list[Tensor]:
    """Split rows (T, n * width) into the hidden states and what travels beside them, each (T, width)."""
    return [rows] if rows.shape[1] == width else list(torch.split(rows, width, dim=1))


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Lay the hidden states and what travels beside them side by side, for the next stage."""
    return torch.cat(tuple(tensors), dim=1) if len(tensors) > 1 else tensors[0]


def carry_on(layer: LayerShape, output: Tensor, carried: Sequence[Tensor]) -> list[Tensor]:
    """Return what leaves a block with this `output`: hidden states, and what travels beside them."""
    if layer.adds_carried:
        return [output + carried[0], *carried[1:]]
    if layer.keeps_output:
        return [output, *carried, output]
    return [output, *carried]
