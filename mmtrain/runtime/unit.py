"""A unit on one rank: its stage modules and the groups they run in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mmtrain.models.build import StageModule
from mmtrain.models.inputs import UnitInput
from mmtrain.models.megatron import ParallelGroups, unit_scope
from mmtrain.program import Edge, StageId


class UnitRunner:
    """Runs forwards and backwards of the stages of one unit that lie on this rank."""

    def __init__(self, name: str, stages: Mapping[StageId, StageModule], groups: ParallelGroups) -> None:
        self.name, self.stages, self.groups = name, stages, groups

    def forward(self, stage: StageId, inputs: UnitInput, received: Mapping[Edge, Tensor]) -> Tensor:
        """Run a stage: hidden states come over the edge inside the unit, features over edges from other units."""
        hidden = next((tensor for edge, tensor in received.items() if not edge.crosses_units), None)
        features = {edge.src.unit: tensor for edge, tensor in received.items() if edge.crosses_units}
        with unit_scope(self.groups):
            output: Tensor = self.stages[stage](hidden, inputs, features)
        return output

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """Run a backward; gradients of parameters accumulate, those of inputs are left in their `.grad`."""
        with unit_scope(self.groups):
            torch.autograd.backward(output, gradient)
