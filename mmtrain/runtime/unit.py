"""A unit on one rank: its stage modules and the groups they run in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmtrain.models.build import Context, StageModule
from mmtrain.models.inputs import UnitInput
from mmtrain.models.megatron import ParallelGroups, unit_scope
from mmtrain.program import Edge, StageId


@dataclass
class Passage:
    """One microbatch's way through a stage: up segment by segment, and down again.

    A segment is a layer, and starts from a detached tensor, so that its backward runs by itself; a passage that is
    not `in_parts` is one segment. Only what a backward will need is kept.
    """

    stage: StageId
    inputs: UnitInput
    received: Mapping[Edge, Tensor]  # hidden states over the edge inside the unit, features over edges from others
    in_parts: bool
    context: Context | None = None
    entered: list[Tensor | None] = field(default_factory=list)  # what each segment so far started from
    left: list[tuple[Tensor, ...]] = field(default_factory=list)  # and what it gave
    gradients: Sequence[Tensor] = ()  # of what the last of these gave


class UnitRunner:
    """Runs forwards and backwards of the stages of one unit that lie on this rank."""

    def __init__(self, name: str, stages: Mapping[StageId, StageModule], groups: ParallelGroups) -> None:
        self.name, self.stages, self.groups = name, stages, groups

    def forward(self, passage: Passage, lo: int, hi: int) -> None:
        """Run segments [lo, hi), all of them if the passage is not in parts.

        What the stage gives is then the passage's last `left`: what goes over its outgoing edges, if there are any,
        and the sum of its losses, if it has one.
        """
        module = self.stages[passage.stage]
        with unit_scope(self.groups):
            if passage.context is None:
                features = {e.src.unit: tensor for e, tensor in passage.received.items() if e.crosses_units}
                passage.context = module.context(passage.inputs, features)
            for layers in [range(i, i + 1) for i in module.indices[lo:hi]] if passage.in_parts else [module.indices]:
                hidden = _entering(passage)
                output = module.run(passage.context, hidden, layers)
                if not torch.is_grad_enabled():
                    passage.entered.clear()
                    passage.left.clear()
                passage.entered.append(hidden)
                passage.left.append(_tensors(output))

    def backward(self, passage: Passage, lo: int, hi: int) -> None:
        """Run the backward of segments [lo, hi), the last first; `gradients` of what they gave lie in the passage.

        Gradients of parameters accumulate, those of what the stage received are left in its `.grad`.
        """
        with unit_scope(self.groups):
            for _ in range(hi - lo if passage.in_parts else 1):
                hidden, outputs = passage.entered.pop(), passage.left.pop()
                pairs = [(o, g) for o, g in zip(outputs, passage.gradients, strict=False) if o.requires_grad]
                if pairs:
                    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
                passage.gradients = () if hidden is None or hidden.grad is None else (hidden.grad,)


def _entering(passage: Passage) -> Tensor | None:
    """What the next segment starts from: hidden states from the stage before, or what the last one gave, cut off."""
    if passage.left:
        [output] = passage.left[-1]
        return output.detach().requires_grad_(output.requires_grad)
    return next((tensor for edge, tensor in passage.received.items() if not edge.crosses_units), None)


def _tensors(output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A stage that has a loss and feeds another unit gives both."""
    return output if isinstance(output, tuple) else (output,)
