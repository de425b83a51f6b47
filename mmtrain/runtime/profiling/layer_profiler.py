"""A unit as the profiler runs it: its layers one after another, as a stage of a run has them, timed one by one.

A layer that is run over and over finds its weights, and the memory that it writes, in the cache: on a CPU it is up to
a third faster than in a run. Here other layers come between, several microbatches are held before the first goes back,
gradients are added up in the optimizer's buffers, and the neighbouring cores do the same at the same time.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.costs.cost_table import LayerSample, TimedPass, layer_fields, layer_key
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups, tp_group_scope
from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.models.model_shape import ModelShape, UnitShape
from mmtrain.models.stage_inputs import TextInput, UnitInput
from mmtrain.models.stage_module import StageModule, StageSpec
from mmtrain.program import StageId
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_unit_optimizer
from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.profiling.probes import Probe
from mmtrain.runtime.world import World

MAX_EQUAL_LAYERS = 3  # at most, of layers that are alike: enough to find nothing of the one before in a cache
IN_FLIGHT, IN_FLIGHT_BYTES = 3, 2**28  # microbatches that go forward before the first goes back, if they are no larger
LAYER_WARM_UP_ROUNDS = 1  # rounds
MODE_BUDGET_S = 0.4  # for the rounds of one way, as far as their least number allows
MAX_MEDIAN_DEVIATIONS = 3.0  # median deviations beyond which a repeat is dropped


@dataclass(frozen=True)
class _Mode:
    """A way to run the stack, and what of it counts as what."""

    weights: bool = True  # their gradients are computed
    input_grad: bool = True
    again: bool = False  # activations are recomputed
    forward: TimedPass | None = None
    backward: TimedPass | None = None


_PLAIN_MODE = _Mode(forward="forward", backward="backward")
_OTHER_MODES = (
    _Mode(again=True, backward="recompute"),
    _Mode(input_grad=False, backward="backward_weight"),
    _Mode(weights=False, backward="backward_input"),
    _Mode(weights=False, input_grad=False, forward="forward_only"),
)


@dataclass(frozen=True)
class LayerProfiler:
    """A unit's layers on one rank; of layers that are alike at most `MAX_EQUAL_LAYERS`."""

    stage: StageModule
    optimizer: ZeroAdamW
    groups: ParallelGroups
    world: World
    dtype: torch.dtype

    @property
    def keys(self) -> list[str]:
        """Of each layer, what its costs go by."""
        return [layer_key(layer_fields(layer)) for layer in self.stage.shape.layers]

    def sample(
        self, probe: Probe, recipe: Recipe, repeats: tuple[int, int], every_way: bool = True
    ) -> dict[str, LayerSample]:
        """Medians for each distinct layer of all it can be timed for, or only of plain forwards and backwards.

        repeats: rounds of each way, at least and at most. Every rank must call this, and they measure at once.
        """
        load, rng = probe.load, np.random.default_rng(0)  # ranks of a TP group must shuffle alike

        def fresh() -> UnitInput:
            return probe.shuffled(rng).inputs(recipe, self.world.device, self.dtype)

        kept = self._saved_bytes(fresh())
        held = max(1, min(IN_FLIGHT, IN_FLIGHT_BYTES // max(1, sum(kept))))
        seconds: defaultdict[str, dict[TimedPass, float]] = defaultdict(dict)
        for way in (_PLAIN_MODE, *(_OTHER_MODES if every_way else ())):
            for key, (forward, backward) in self._repeat(way, fresh, held, repeats).items():
                if way.forward:
                    seconds[key][way.forward] = median_without_outliers(forward)
                if way.backward and (key != self.keys[0] or way.weights):  # the first layer has no input to go back to
                    seconds[key][way.backward] = median_without_outliers(backward)
        found: dict[str, LayerSample] = {}
        for key, nbytes in zip(self.keys, kept, strict=True):
            times = seconds[key]
            if "recompute" in times:
                times = times | {"recompute": max(0.0, times["recompute"] - times["backward"])}
            largest = max(nbytes, found[key].activation_bytes) if key in found else nbytes
            found[key] = LayerSample(
                tokens=load.tokens,
                sum_sq=load.sum_sq,
                max_len=load.max_len,
                num_sequences=load.num_sequences,
                seconds={"recompute": 0.0, **times},
                activation_bytes=largest,
            )
        return found

    def optimizer_seconds(self, repeats: tuple[int, int]) -> tuple[int, float]:
        """Parameters of the stack on this rank, and seconds of an optimizer step over them."""
        params = [p for p in self.stage.parameters() if p.requires_grad]
        clock, found = clock_for(self.world.device), []
        for _ in range(LAYER_WARM_UP_ROUNDS + repeats[1]):
            self.optimizer.zero_grad()
            self.world.barrier()
            clock.start()
            begin = clock.mark()
            float(self.optimizer.grad_sq_sum())
            self.optimizer.step(0.0, 0.5)
            begin_s, end_s = clock.seconds([begin, clock.mark()])
            found.append(end_s - begin_s)
        return sum(p.numel() for p in params), median_without_outliers(found[LAYER_WARM_UP_ROUNDS:])

    def _repeat(
        self, way: _Mode, fresh: Callable[[], UnitInput], held: int, repeats: tuple[int, int]
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds of forwards and backwards by layer, of as many rounds on every rank."""
        for _ in range(LAYER_WARM_UP_ROUNDS):
            took = sum(sum(f) + sum(b) for f, b in self._round(way, [fresh() for _ in range(held)]).values())
        least, most = repeats
        rounds = self.world.broadcast(min(most, max(least, round(MODE_BUDGET_S / max(took, 1e-6)))))
        assert isinstance(rounds, int)
        found: dict[str, tuple[list[float], list[float]]] = {key: ([], []) for key in self.keys}
        for _ in range(rounds):
            for key, (forward, backward) in self._round(way, [fresh() for _ in range(held)]).items():
                found[key][0].extend(forward)
                found[key][1].extend(backward)
        return found

    def _round(self, way: _Mode, inputs: Sequence[UnitInput]) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds by layer of a forward for each of the inputs through the stack, and then of their backwards."""
        stage, clock = self.stage, clock_for(self.world.device)
        stage.recompute = frozenset(stage.indices if way.again else ())
        stage.requires_grad_(way.weights)
        marks: list[Any] = []
        passages: list[tuple[list[Tensor | None], list[Tensor]]] = []
        features = [self._features(given, way.input_grad) for given in inputs]
        self.world.barrier()
        clock.start()
        with tp_group_scope(self.groups):
            for given, rows in zip(inputs, features, strict=True):
                marks.append(clock.mark())
                context, entered, left = stage.context(given, rows), [], []  # type: ignore[var-annotated]
                for index in stage.indices:
                    entered.append(left[-1].detach().requires_grad_(way.input_grad) if left else None)
                    left.append(stage.run(context, entered[-1], range(index, index + 1)))
                    marks.append(clock.mark())
                passages.append((entered, left))
            for entered, left in passages:
                self._back(entered, left, clock.mark, marks)
        self.optimizer.zero_grad()
        return self._by_layer(clock.seconds(marks), len(inputs))

    def _features(self, inputs: UnitInput, input_grad: bool) -> dict[str, Tensor]:
        """What encoders hand to the LLM."""
        places = inputs.feature_positions if isinstance(inputs, TextInput) else {}
        width, device = self.stage.shape.layers[0].out, self.world.device
        return {
            name: torch.randn(len(at), width, device=device, dtype=self.dtype).requires_grad_(input_grad)
            for name, at in places.items()
        }

    @staticmethod
    def _back(entered: list[Tensor | None], left: list[Tensor], mark: Any, marks: list[Any]) -> None:
        """One microbatch's backward, the last layer first; each gives up what it held."""
        gradient: Tensor | None = None
        marks.append(mark())
        while left:
            out, hidden = left.pop(), entered.pop()
            if out.requires_grad:
                torch.autograd.backward(out, torch.ones_like(out) if gradient is None else gradient)
            gradient = None if hidden is None else hidden.grad
            del out, hidden
            marks.append(mark())

    def _by_layer(self, seconds: list[float], held: int) -> dict[str, tuple[list[float], list[float]]]:
        """Time between the marks of a round, by layer; a layer without a backward has no times of one."""
        keys = self.keys
        found: dict[str, tuple[list[float], list[float]]] = {key: ([], []) for key in keys}
        runs = [seconds[at : at + len(keys) + 1] for at in range(0, len(seconds), len(keys) + 1)]
        for number, run in enumerate(runs):
            took = [end - begin for begin, end in itertools.pairwise(run)]
            backward = number >= held
            for key, value in zip(reversed(keys) if backward else keys, took, strict=True):
                found[key][backward].append(value)
        return found

    def _saved_bytes(self, inputs: UnitInput) -> list[int]:
        """Bytes that each layer's forward keeps for its backward beyond those before it, weights not counted."""
        stage = self.stage
        stage.recompute = frozenset()
        stage.requires_grad_(True)
        held = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        kept: dict[int, tuple[int, Tensor]] = {}  # with the tensor, or its place would be given to another
        sums = [0]

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with tp_group_scope(self.groups), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            context, hidden = stage.context(inputs, self._features(inputs, True)), None
            for index in stage.indices:
                hidden = stage.run(context, hidden, range(index, index + 1))
                sums.append(sum(nbytes for nbytes, _ in kept.values()))
        return [after - before for before, after in itertools.pairwise(sums)]


def build_layer_profiler(
    recipe: Recipe, model: ModelShape, unit: UnitShape, groups: ParallelGroups, world: World, dtype: torch.dtype
) -> LayerProfiler:
    """Build a unit's distinct layers with a few of each, all to be trained, and their optimizer."""
    number: defaultdict[str, int] = defaultdict(int)
    layers = []
    for layer in unit.layers:
        number[layer_key(layer_fields(layer))] += 1
        if number[layer_key(layer_fields(layer))] <= MAX_EQUAL_LAYERS:
            layers.append(layer)
    short = replace(unit, layers=tuple(layers))
    stage = build_stage(
        recipe.model,
        replace(model, units=tuple(short if u.name == unit.name else u for u in model.units)),
        StageSpec(unit.name, (0, len(layers))),
        groups,
        StageOptions(dtype, world.device, recipe.train.seed, recipe.train.attention),
    ).requires_grad_(True)
    optimizer = build_unit_optimizer(recipe, UnitRunner(unit.name, {StageId(unit.name, 0): stage}, groups), world)
    return LayerProfiler(stage, optimizer, groups, world, dtype)


def median_without_outliers(seconds: Sequence[float]) -> float:
    """The median of repeats without outliers."""
    middle = statistics.median(seconds)
    spread = statistics.median([abs(s - middle) for s in seconds])
    return statistics.median([s for s in seconds if abs(s - middle) <= MAX_MEDIAN_DEVIATIONS * spread or spread == 0])
