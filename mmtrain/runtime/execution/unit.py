"""A unit on one rank: its stage modules and the groups they run in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups, start_tp_communication, tp_group_scope
from mmtrain.models.stage_inputs import UnitInput
from mmtrain.models.stage_module import StageContext, StageModule
from mmtrain.program import Edge, StageId


@dataclass
class MicrobatchState:
    """One microbatch's way through a stage: up run by run, and down again.

    A run are the segments between two `cuts`, and starts from detached tensors, so that its backward runs by itself; a
    passage without cuts is one run. Only what a backward will need is kept.
    """

    stage: StageId
    inputs: UnitInput
    received: Mapping[Edge, Tensor]  # hidden states over the edge inside the unit, features over edges from others
    cuts: Sequence[int] = ()  # segments at which some part begins, in either direction, and the number of segments
    segments: Sequence[tuple[int, int]] = ()  # see `program.segments.segments_of`; needed with cuts
    context: StageContext | None = None
    entered: list[tuple[Tensor, ...]] = field(default_factory=list)  # what each run so far started from
    left: list[tuple[Tensor, ...]] = field(default_factory=list)  # and what it gave
    handed_on: tuple[Tensor, ...] = ()  # what the next run starts from: what the last gave, exchanged where need be
    gradients: list[Tensor | None] = field(default_factory=list)  # of what the last of these gave
    under_way: dist.Work | None = None  # the exchange of what is handed on, or of the gradients

    def wait(self) -> None:
        """Have what the last part left under way."""
        if self.under_way is not None:
            with torch.no_grad():  # gloo copies into what it gathers
                self.under_way.wait()
            self.under_way = None


class UnitRunner:
    """Runs forwards and backwards of the stages of one unit that lie on this rank."""

    def __init__(self, name: str, stages: Mapping[StageId, StageModule], groups: ParallelGroups) -> None:
        self.name, self.stages, self.groups = name, stages, groups

    def forward(self, passage: MicrobatchState, lo: int, hi: int) -> None:
        """Run segments [lo, hi), all of them if the passage has no cuts.

        What the stage gives is then the passage's last `left`: what goes over its outgoing edges, if there are any,
        and the sum of its losses, if it has one.
        """
        module = self.stages[passage.stage]
        with tp_group_scope(self.groups):
            if passage.context is None:
                features = {e.src.unit: tensor for e, tensor in passage.received.items() if e.crosses_units}
                passage.context = module.context(passage.inputs, features)
                passage.handed_on = _entering(passage)
            for first, last in _runs(passage, lo, hi):
                passage.wait()
                state = passage.handed_on
                if first > 0:
                    given = zip(state, passage.left[-1], strict=True)
                    state = tuple(tensor.requires_grad_(before.requires_grad) for tensor, before in given)
                output = _through(module, passage, state, first, last)
                if not torch.is_grad_enabled():
                    passage.entered.clear()
                    passage.left.clear()
                passage.entered.append(state)
                passage.left.append(output)
                if passage.cuts and last < passage.cuts[-1]:
                    passage.handed_on = self._handed_on(passage, last)

    def backward(self, passage: MicrobatchState, lo: int, hi: int) -> None:
        """Run the backward of segments [lo, hi), the last first; `gradients` of what they gave lie in the passage.

        Gradients of parameters accumulate, those of what the stage received are left in its `.grad`.
        """
        with tp_group_scope(self.groups):
            for first, _ in reversed(_runs(passage, lo, hi)):
                passage.wait()
                state, outputs = passage.entered.pop(), passage.left.pop()
                pairs = [(o, g) for o, g in zip(outputs, passage.gradients, strict=False) if o.requires_grad]
                given = [(output, gradient) for output, gradient in pairs if gradient is not None]
                if given:
                    torch.autograd.backward([output for output, _ in given], [gradient for _, gradient in given])
                passage.gradients = [tensor.grad for tensor in state]
                if first > 0:
                    passage.gradients = self._exchanged(passage, passage.gradients, first, backward=True)

    def _handed_on(self, passage: MicrobatchState, last: int) -> tuple[Tensor, ...]:
        """What the run behind segment `last` - 1 starts from: what this one gave, cut off and exchanged."""
        state = self._exchanged(passage, [tensor.detach() for tensor in passage.left[-1]], last)
        return tuple(tensor for tensor in state if tensor is not None)

    def _exchanged(
        self, passage: MicrobatchState, state: list[Tensor | None], before: int, backward: bool = False
    ) -> list[Tensor | None]:
        """The state with its second tensor as a TP group's ranks exchange it before a segment; begun, not awaited."""
        if len(state) < 2 or state[1] is None:
            return state
        sliced = self.stages[passage.stage].factory.sequence_parallel
        piece = passage.segments[before][1]
        tensor, passage.under_way = start_tp_communication(state[1], piece, self.groups, sliced, backward)
        return [state[0], tensor, *state[2:]]


def _runs(passage: MicrobatchState, lo: int, hi: int) -> list[tuple[int, int]]:
    """Runs [first, last) of the segments [lo, hi)."""
    if not passage.cuts:
        return [(0, 0)]
    return list(pairwise(cut for cut in passage.cuts if lo <= cut <= hi))


def _entering(passage: MicrobatchState) -> tuple[Tensor, ...]:
    """What the stage starts from: hidden states from the stage before, if there is one."""
    return tuple(tensor for edge, tensor in passage.received.items() if not edge.crosses_units)


def _through(
    module: StageModule, passage: MicrobatchState, state: tuple[Tensor, ...], first: int, last: int
) -> tuple[Tensor, ...]:
    """Run segments [first, last) of the stage, all of them if the passage has no cuts."""
    context = passage.context
    assert context is not None
    if not passage.cuts:
        return _tensors(module.run(context, state[0] if state else None, module.indices))
    sizes = Counter(layer for layer, _ in passage.segments)
    for layer, run in groupby(passage.segments[first:last], key=lambda segment: segment[0]):
        pieces, index = [piece for _, piece in run], module.indices[layer]
        if len(pieces) == sizes[layer]:
            state = _tensors(module.run(context, state[0] if state else None, range(index, index + 1)))
        else:
            state = module.run_pieces(context, state, index, range(pieces[0], pieces[-1] + 1))
    return state


def _tensors(output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A stage that has a loss and feeds another unit gives both."""
    return output if isinstance(output, tuple) else (output,)
