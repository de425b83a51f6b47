"""Time what a pass loses when it stops inside a layer for other work and goes on later (`CostModel.cut`).

Plans that fill tensor-parallel bubbles stop the LLM's passes where a collective leaves the core free, and run a part of
an encoder's pass there. Each of the two then finds less in its caches than it left, and autograd starts once more. Here
one pass of the LLM and one of an encoder run first one after the other, then by turns, with nothing hidden: what that
takes longer is due to the stops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest

import torch

from mmtrain.costs.block_pieces import collective_kinds
from mmtrain.costs.cost_model import PassDirection
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import num_pieces
from mmtrain.program import Edge, Microbatch, StageId
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.execution.unit import MicrobatchState, UnitRunner
from mmtrain.runtime.profiling.layer_profiler import LayerProfiler, median_without_outliers
from mmtrain.runtime.profiling.probes import Probe

_DIRECTIONS: tuple[PassDirection, ...] = ("forward", "backward")
_WARM_UP_ROUNDS = 2

_Ranges = Sequence[tuple[int, int]]  # of segments


@dataclass(frozen=True)
class ProfiledUnit:
    """A unit whose passes are run by turns with those of another."""

    profiler: LayerProfiler
    groups: ParallelGroups
    probe: Probe  # the load of its microbatches


def seconds_of_a_stop(llm: ProfiledUnit, encoder: ProfiledUnit, recipe: Recipe, rounds: int) -> float:
    """Return the seconds, at least 0, that one stop costs. All ranks of the world must call this together."""
    passes = [_Passes(llm), _Passes(encoder)]
    num_stops = 0
    for direction in _DIRECTIONS:
        bounds = passes[0].bounds_at_collectives(direction)
        for of_unit, of_direction in zip(passes, (bounds, passes[1].even_bounds(len(bounds) - 1)), strict=True):
            of_unit.ranges[direction] = [*pairwise(of_direction)]
            num_stops += len(of_direction) - 2
    longer_s = []
    # Only gradients of weights hide a collective. What a stop keeps from being hidden is a cost of its own.
    _train_blocks(llm.profiler, enabled=False)
    for number in range(_WARM_UP_ROUNDS + rounds):
        apart_s, by_turns_s = (_round_s(passes, recipe, by_turns=by_turns) for by_turns in (False, True))
        if number >= _WARM_UP_ROUNDS:
            longer_s.append(by_turns_s - apart_s)
    _train_blocks(llm.profiler, enabled=True)
    return max(0.0, median_without_outliers(longer_s) / num_stops)


class _Passes:
    """The passes of a stage that holds a whole unit, and the parts in which they run."""

    def __init__(self, unit: ProfiledUnit) -> None:
        self.profiler, self._probe = unit.profiler, unit.probe
        stage = unit.profiler.stage
        self._id = StageId(stage.shape.name, 0)
        self._runner = UnitRunner(self._id.unit, {self._id: stage}, unit.groups)
        counts = [num_pieces(stage.shape.layers[index].kind) for index in stage.indices]
        self._segments = [(layer, piece) for layer, count in enumerate(counts) for piece in range(count)]
        self._block_segments = [i for i, (layer, _) in enumerate(self._segments) if counts[layer] > 1]
        self.ranges: dict[PassDirection, _Ranges] = {}

    def bounds_at_collectives(self, direction: PassDirection) -> list[int]:
        """Return the bounds of parts that end where the tensor-parallel group communicates."""
        kinds = collective_kinds(direction, sp=self.profiler.stage.factory.sequence_parallel)
        followed = [i for i in self._block_segments if self._segments[i][1] in kinds]
        # A forward stops behind such a piece, a backward in front of it.
        return [0, *(i + 1 if direction == "forward" else i for i in followed), len(self._segments)]

    def even_bounds(self, num_parts: int) -> list[int]:
        """Return the bounds of so many parts, or of as many as there are segments, with about as many segments each."""
        num_parts = min(num_parts, len(self._segments))
        return [part * len(self._segments) // num_parts for part in range(num_parts + 1)]

    def start(self, recipe: Recipe, *, in_parts: bool) -> MicrobatchState:
        """Return a new microbatch."""
        profiler = self.profiler
        inputs = self._probe.inputs(recipe, profiler.world.device, profiler.dtype)
        features = profiler.features(inputs, input_grad=True)
        received = {Edge(StageId(unit, 0), self._id): rows for unit, rows in features.items()}
        bounds = sorted({bound for ranges in self.ranges.values() for bound in chain(*ranges)}) if in_parts else ()
        return MicrobatchState(self._id, Microbatch(self._id.unit, 0, 0), inputs, received, bounds, self._segments)

    def run(self, direction: PassDirection, microbatch: MicrobatchState) -> Iterator[None]:
        """Run a pass, and stop behind each of its parts once its collective is over."""
        if direction == "backward":
            microbatch.output_gradients = [torch.ones_like(microbatch.part_outputs[-1][-1])]
        run = self._runner.forward if direction == "forward" else self._runner.backward
        ranges = self.ranges[direction] if microbatch.part_bounds else [(0, len(self._segments))]
        for lo, hi in ranges if direction == "forward" else reversed(ranges):
            run(microbatch, lo, hi)
            microbatch.wait()
            yield


def _round_s(passes: Sequence[_Passes], recipe: Recipe, *, by_turns: bool) -> float:
    """Run a forward and a backward of each unit; return the seconds."""
    profiler = passes[0].profiler
    clock = clock_for(profiler.world.device)
    microbatches = [unit.start(recipe, in_parts=by_turns) for unit in passes]
    profiler.world.barrier()
    clock.start()
    start = clock.mark()
    for direction in _DIRECTIONS:
        running = [unit.run(direction, microbatch) for unit, microbatch in zip(passes, microbatches, strict=True)]
        for _ in zip_longest(*running) if by_turns else chain(*running):
            pass  # a step of an iterator runs a part
    start_s, end_s = clock.seconds([start, clock.mark()])
    for unit in passes:
        unit.profiler.optimizer.zero_grad()
    return end_s - start_s


def _train_blocks(profiler: LayerProfiler, *, enabled: bool) -> None:
    """Let the weights of a unit's blocks have gradients, or not."""
    stage = profiler.stage
    for index in stage.indices:
        if num_pieces(stage.shape.layers[index].kind) > 1:
            stage.layers[str(index)].requires_grad_(enabled)
