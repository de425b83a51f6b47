"""Run the forwards and backwards of a unit's stages on one rank."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mmtrain.models.megatron import ParallelGroups, start_tp_communication
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.fully_sharded import UnitSharding, reduce_between_copies
from mmtrain.models.stage.host_offload import OffloadedBlocks
from mmtrain.models.stage.piecewise import run_block_pieces
from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.models.stage.stage_module import StageContext, StageModule
from mmtrain.program import Edge, Microbatch, StageId


@dataclass
class MicrobatchState:
    """What a stage keeps of one microbatch between its forward and its backward.

    The forward runs in parts: the segments between two neighbouring `part_bounds`, or the whole stage if there are
    none. Each part starts from detached tensors, so that its backward can run by itself. Forward appends the inputs
    and outputs of its parts; backward removes them. What the stage has passed on is held by whoever reads it.
    """

    stage: StageId
    mb: Microbatch
    inputs: UnitInput
    received: Mapping[Edge, Tensor]  # hidden states over the edge inside the unit, features over edges between units
    part_bounds: Sequence[int] = ()  # segments at which a forward or backward part starts, and the number of segments
    segments: Sequence[tuple[int, int]] = ()  # (layer, piece) of each; see `program.ir.segments.segment_layers`
    reruns_forward: bool = False  # the backward begins with another forward, and nothing is kept until then
    context: StageContext | None = None
    part_inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    part_outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    passed_on: GradientEdge | None = None  # where the gradient of what went over the stage's edges enters
    next_inputs: tuple[Tensor, ...] = ()  # of the next part: the last one's outputs, after the TP group's communication
    output_gradients: list[Tensor | None] = field(default_factory=list)  # of the last part that is left
    pending: dist.Work | None = None  # communication of `next_inputs` or `output_gradients`

    def wait(self) -> None:
        """Wait for the communication that the last part started."""
        if self.pending is not None:
            with torch.no_grad():  # gloo copies into what it gathers
                self.pending.wait()
            self.pending = None

    def release_output(self) -> None:
        """Drop what went over the stage's edges; of the last outputs a loss stays."""
        output, *loss = self.part_outputs[-1]
        if output.requires_grad:
            self.passed_on = get_gradient_edge(output)
            self.part_outputs[-1] = tuple(loss)

    def forget_forward(self) -> None:
        """Drop what the forward computed; another one starts from the inputs."""
        self.context = self.passed_on = None
        self.part_inputs.clear()
        self.part_outputs.clear()
        self.next_inputs = ()

    def parts(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Return the parts [first, last) of the segments [lo, hi); one without bounds is the whole stage."""
        if not self.part_bounds:
            return [(0, 0)]
        return list(pairwise(bound for bound in self.part_bounds if lo <= bound <= hi))


class UnitRunner:
    """Runs forwards and backwards of the stages of one unit that lie on this rank."""

    def __init__(self, name: str, stages: Mapping[StageId, StageModule], groups: ParallelGroups) -> None:
        self.name, self.stages, self.groups = name, stages, groups

    def forward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """Run segments [lo, hi) of the stage, or all of them if the microbatch has no part bounds.

        The last `part_outputs` are then what goes over the stage's outgoing edges, if it has any, and the sum of its
        losses, if it has one.
        """
        module = self.stages[microbatch.stage]
        if microbatch.context is None:
            features = {e.src.unit: tensor for e, tensor in microbatch.received.items() if e.crosses_units}
            microbatch.context = module.context(microbatch.inputs, features)
            microbatch.next_inputs = _hidden_states(microbatch)
        for first, last in microbatch.parts(lo, hi):
            microbatch.wait()
            inputs = microbatch.next_inputs
            if first > 0:
                outputs_before = microbatch.part_outputs[-1]
                inputs = tuple(
                    tensor.requires_grad_(before.requires_grad)
                    for tensor, before in zip(inputs, outputs_before, strict=True)
                )
            if microbatch.part_bounds:
                outputs = _run_segments(module, microbatch, inputs, first, last)
            else:
                run = _way_to_run(module, module.indices)
                outputs = _as_tuple(run(microbatch.context, inputs[0] if inputs else None, module.indices))
            if not torch.is_grad_enabled():  # no backward will come
                microbatch.part_inputs.clear()
                microbatch.part_outputs.clear()
            microbatch.part_inputs.append(inputs)
            microbatch.part_outputs.append(outputs)
            if microbatch.part_bounds and last < microbatch.part_bounds[-1]:
                microbatch.next_inputs = self._start_next(microbatch, last)

    def backward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """Run the backward of segments [lo, hi), the last part first, from the microbatch's `output_gradients`.

        Gradients of parameters accumulate; gradients of what the stage received are left in its `.grad`. Where the
        microbatch `reruns_forward`, the forward of all segments comes first, and computes what that of before did:
        nothing in a stage is random.
        """
        if microbatch.reruns_forward and not microbatch.part_outputs:
            self.forward(microbatch, 0, len(microbatch.segments))
        for first, _ in reversed(microbatch.parts(lo, hi)):
            microbatch.wait()
            inputs = microbatch.part_inputs.pop()
            entries = [get_gradient_edge(x) if x.requires_grad else None for x in microbatch.part_outputs.pop()]
            if microbatch.passed_on is not None:
                entries.insert(0, microbatch.passed_on)
                microbatch.passed_on = None
            pairs = zip(entries, microbatch.output_gradients, strict=False)
            known = [(entry, grad) for entry, grad in pairs if entry is not None and grad is not None]
            if known:
                torch.autograd.backward([entry for entry, _ in known], [grad for _, grad in known])
            microbatch.output_gradients = [tensor.grad for tensor in inputs]
            if first > 0:
                microbatch.output_gradients = self._start_communication(
                    microbatch, microbatch.output_gradients, first, backward=True
                )

    def prefetch(self, microbatch: MicrobatchState) -> None:
        """Start to bring back from host memory what the next backward of the microbatch reads first."""
        offloaded: OffloadedBlocks | None = getattr(microbatch.context, "offloaded", None)  # a generator has none
        if offloaded is not None:
            offloaded.fetch_last()

    def _start_next(self, microbatch: MicrobatchState, segment: int) -> tuple[Tensor, ...]:
        """Return the inputs of the part that starts at `segment`: the last part's outputs, detached."""
        detached: list[Tensor | None] = [tensor.detach() for tensor in microbatch.part_outputs[-1]]
        tensors = self._start_communication(microbatch, detached, segment)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def _start_communication(
        self, microbatch: MicrobatchState, tensors: list[Tensor | None], segment: int, backward: bool = False
    ) -> list[Tensor | None]:
        """Start the TP group's communication of the second tensor before `segment`; `microbatch.wait` ends it."""
        if len(tensors) < 2 or tensors[1] is None:
            return tensors
        sequence_parallel = self.stages[microbatch.stage].factory.sequence_parallel
        piece = microbatch.segments[segment][1]
        tensor, microbatch.pending = start_tp_communication(tensors[1], piece, self.groups, sequence_parallel, backward)
        return [tensors[0], tensor, *tensors[2:]]


class ShardedUnitRunner(UnitRunner):
    """Runs a unit whose replicas hold shards: its passes gather weights and reduce gradients.

    Args:
        num_microbatches: of a replica in a step.
        keeps_weights: whether they stay gathered between the passes of a step.
        sharding: the meshes over which the stages are sharded.
        param_specs: of every parameter of each stage, by its name in the stage, from before it was sharded.
    """

    def __init__(
        self,
        name: str,
        stages: Mapping[StageId, StageModule],
        groups: ParallelGroups,
        num_microbatches: int,
        keeps_weights: bool,
        sharding: UnitSharding,
        param_specs: Mapping[StageId, Mapping[str, ParamSpec]],
    ) -> None:
        super().__init__(name, stages, groups)
        self.sharding, self._param_specs = sharding, param_specs
        self._num_microbatches = num_microbatches
        self.keeps_weights = keeps_weights

    def parameter_specs(self) -> dict[nn.Parameter, ParamSpec]:
        """Return what every parameter was before it was sharded."""
        return {
            param: self._param_specs[stage_id][name]
            for stage_id, stage in self.stages.items()
            for name, param in stage.named_parameters()
        }

    def backward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        """Run the backward as `UnitRunner` does; the last one of a step sums gradients over the copies, too."""
        is_last = microbatch.mb.index == self._num_microbatches - 1
        reduce_between_copies(self.stages[microbatch.stage], is_last, self.keeps_weights)
        super().backward(microbatch, lo, hi)


def _hidden_states(microbatch: MicrobatchState) -> tuple[Tensor, ...]:
    """Return what came from the stage before in the same unit, if there is one."""
    return tuple(tensor for edge, tensor in microbatch.received.items() if not edge.crosses_units)


def _run_segments(
    module: StageModule, microbatch: MicrobatchState, inputs: tuple[Tensor, ...], first: int, last: int
) -> tuple[Tensor, ...]:
    """Run segments [first, last) of the stage: whole layers that follow each other at once, others in pieces."""
    context = microbatch.context
    assert context is not None
    num_pieces = Counter(layer for layer, _ in microbatch.segments)
    held = Counter(layer for layer, _ in microbatch.segments[first:last])
    tensors = inputs
    for is_whole, group in groupby(held, key=lambda layer: held[layer] == num_pieces[layer]):
        of_group = list(group)
        index = module.indices[of_group[0]]
        if is_whole:
            layers = range(index, index + len(of_group))
            run = _way_to_run(module, layers)
            tensors = _as_tuple(run(context, tensors[0] if tensors else None, layers))
            continue
        for layer in of_group:  # the last layers of a part, or its first
            pieces = [piece for of_layer, piece in microbatch.segments[first:last] if of_layer == layer]
            index = module.indices[layer]
            tensors = run_block_pieces(module, context, tensors, index, range(pieces[0], pieces[-1] + 1))
    return tensors


def _way_to_run(
    module: StageModule, layers: range
) -> Callable[[StageContext, Tensor | None, range], Tensor | tuple[Tensor, ...]]:
    """Return what runs whole layers: the end of an LLM that feeds a generator also returns its outputs at queries."""
    ends_llm = module.feeds_generator and layers.stop == len(module.shape.layers)
    return module.run_to_queries if ends_llm else module.run


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
