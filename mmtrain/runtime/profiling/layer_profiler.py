"""Time a unit's layers as a stage of a run executes them: one after another, each timed alone.

A layer that is run over and over finds its weights, and the memory that it writes, in the cache: on a CPU it is up to
a third faster than in a run. Here other layers come between, several microbatches are in flight, gradients accumulate
in the optimizer's buffers, and the neighbouring cores do the same at the same time.

What passes between two layers is one tensor, or the several of a generator's state. Each layer starts from tensors that
are cut off from the graph of the layers before it, so its backward runs alone.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mmtrain.costs.cost_table import LayerSample, TimedPass, layer_fields, layer_key
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups, set_tp_chunks
from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.models.optim.clip_factors import clip_factors
from mmtrain.models.shapes.model_shape import ModelShape, UnitShape
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.stage_inputs import TextInput, UnitInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.program import LLM, StageId
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_unit_optimizer
from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.profiling.probes import Probe
from mmtrain.runtime.world import World

MAX_EQUAL_LAYERS = 3  # enough that a layer finds nothing of the one before in a cache
MAX_IN_FLIGHT = 3  # microbatches that go forward before the first goes backward
MAX_IN_FLIGHT_BYTES = 2**28  # of their activations together
LAYER_WARM_UP_ROUNDS = 1
MODE_BUDGET_S = 0.4  # for the rounds of one mode, unless the least number of rounds takes longer
MAX_MEDIAN_DEVIATIONS = 3.0  # a repeat further from the median is dropped as an outlier
Mark = Callable[[], Any]  # see `DeviceClock.mark`
Span = tuple[Any, Any]  # marks at the start and the end of one layer's pass


@dataclass(frozen=True)
class _Mode:
    """A mode of running the layers, and under which name its times count."""

    weight_grad: bool = True
    input_grad: bool = True
    recompute: bool = False
    forward: TimedPass | None = None  # None: forwards of this mode do not count
    backward: TimedPass | None = None


LayerTimes = dict[str, tuple[list[float], list[float]]]  # layer key -> seconds of its forwards, of its backwards

_PLAIN_MODE = _Mode(forward="forward", backward="backward")
_OTHER_MODES = (
    _Mode(recompute=True, backward="recompute"),
    _Mode(input_grad=False, backward="backward_weight"),
    _Mode(weight_grad=False, backward="backward_input"),
    _Mode(weight_grad=False, input_grad=False, forward="forward_only"),
)


@dataclass(frozen=True)
class LayerProfiler:
    """Times the distinct layers of a unit on one rank.

    Of equal layers at most `MAX_EQUAL_LAYERS` run, but all of a U-Net.
    """

    stage: StageModule
    optimizer: ZeroAdamW
    world: World
    dtype: torch.dtype
    deviations: list[float] = field(default_factory=list)  # of the repeats of each pass sampled, over their mean

    @property
    def keys(self) -> list[str]:
        """The cost-table key of each layer."""
        return [layer_key(layer_fields(layer)) for layer in self.stage.shape.layers]

    def set_chunks(self, num_chunks: int) -> None:
        """Let blocks run their linears in so many chunks of tokens from now on."""
        set_tp_chunks(self.stage, num_chunks)

    def sample(
        self, probe: Probe, recipe: Recipe, repeats: tuple[int, int], all_modes: bool = True
    ) -> dict[str, LayerSample]:
        """Return the median times of each distinct layer in all modes, or only of plain forwards and backwards.

        repeats: rounds of each mode, at least and at most. Every rank must call this; they measure at the same time.
        """
        load = probe.load
        rng = np.random.default_rng(0)  # ranks of a TP group must shuffle alike

        def fresh() -> UnitInput:
            return probe.shuffled(rng).inputs(recipe, self.world.device, self.dtype)

        saved_bytes = self._saved_bytes(fresh())
        num_in_flight = max(1, min(MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES // max(1, sum(saved_bytes))))
        seconds: defaultdict[str, dict[TimedPass, float]] = defaultdict(dict)
        for mode in (_PLAIN_MODE, *(_OTHER_MODES if all_modes else ())):
            for key, (forward, backward) in self._repeat(mode, fresh, num_in_flight, repeats).items():
                if mode.forward:
                    seconds[key][mode.forward] = median_without_outliers(forward)
                if mode is _PLAIN_MODE:
                    self.deviations.extend(map(relative_deviation, (forward, backward)))
                is_first = key == self.keys[0]  # it has no input that needs a gradient
                if mode.backward and (mode.weight_grad or not is_first):
                    seconds[key][mode.backward] = median_without_outliers(backward)
        samples: dict[str, LayerSample] = {}
        for key, nbytes in zip(self.keys, saved_bytes, strict=True):
            times = seconds[key]
            if "recompute" in times:
                times = times | {"recompute": max(0.0, times["recompute"] - times["backward"])}
            largest = max(nbytes, samples[key].activation_bytes) if key in samples else nbytes
            samples[key] = LayerSample(
                tokens=load.tokens,
                sum_sq=load.sum_sq,
                max_len=load.max_len,
                num_sequences=load.num_sequences,
                seconds={"recompute": 0.0, **times},
                activation_bytes=largest,
            )
        return samples

    def optimizer_seconds(self, repeats: tuple[int, int]) -> tuple[int, float]:
        """Return the number of parameters on this rank, and the seconds of an optimizer step over them."""
        params = [p for p in self.stage.parameters() if p.requires_grad]
        clock = clock_for(self.world.device)
        seconds = []
        for _ in range(LAYER_WARM_UP_ROUNDS + repeats[1]):
            self.optimizer.zero_grad()
            self.world.barrier()
            clock.start()
            start = clock.mark()
            norm = self.optimizer.grad_sq_sum().sqrt()
            self.optimizer.step(0.0, clip_factors(norm, limit=1.0))
            start_s, end_s = clock.seconds([start, clock.mark()])
            seconds.append(end_s - start_s)
        return sum(p.numel() for p in params), median_without_outliers(seconds[LAYER_WARM_UP_ROUNDS:])

    def _repeat(
        self, mode: _Mode, fresh: Callable[[], UnitInput], num_in_flight: int, repeats: tuple[int, int]
    ) -> LayerTimes:
        """Run rounds of a mode, the same number on every rank; `fresh` returns the input of a microbatch."""
        for _ in range(LAYER_WARM_UP_ROUNDS):
            times = self._run_round(mode, [fresh() for _ in range(num_in_flight)])
            round_s = sum(sum(forward) + sum(backward) for forward, backward in times.values())
        min_rounds, max_rounds = repeats
        num_rounds = self.world.broadcast(min(max_rounds, max(min_rounds, round(MODE_BUDGET_S / max(round_s, 1e-6)))))
        assert isinstance(num_rounds, int)
        all_times: LayerTimes = {key: ([], []) for key in self.keys}
        for _ in range(num_rounds):
            times = self._run_round(mode, [fresh() for _ in range(num_in_flight)])
            for key, (forward, backward) in times.items():
                all_times[key][0].extend(forward)
                all_times[key][1].extend(backward)
        return all_times

    def _run_round(self, mode: _Mode, inputs: Sequence[UnitInput]) -> LayerTimes:
        """Run the forwards of all inputs through the layers, then their backwards; return the times by layer."""
        stage = self.stage
        clock = clock_for(self.world.device)
        stage.recompute = frozenset(stage.indices if mode.recompute else ())
        stage.requires_grad_(mode.weight_grad)
        features = [self.features(unit_input, mode.input_grad) for unit_input in inputs]
        self.world.barrier()
        clock.start()
        spans: list[Span] = []
        microbatches: list[list[LayerPass]] = []
        for unit_input, rows in zip(inputs, features, strict=True):
            passes, forward_spans = forward_by_layer(stage, unit_input, rows, mode.input_grad, clock.mark)
            microbatches.append(passes)
            spans += forward_spans
        for passes in microbatches:
            spans += backward_by_layer(passes, clock.mark)
        self.optimizer.zero_grad()
        seconds = clock.seconds([*itertools.chain.from_iterable(spans)])
        return self._times_by_layer([end_s - start_s for start_s, end_s in zip(*[iter(seconds)] * 2, strict=True)])

    def features(self, inputs: UnitInput, input_grad: bool) -> dict[str, Tensor]:
        """Return random features in place of what other units send."""
        first = self.stage.shape.layers[0]
        num_rows: dict[str, int] = {}
        width = first.out * (1 + first.carried_out)
        if isinstance(inputs, GeneratorInput):
            num_rows = {LLM: len(inputs.rows) * first.generator.context}
            width = first.hidden
        elif isinstance(inputs, TextInput):
            num_rows = {name: len(rows) for name, rows in inputs.feature_positions.items()}
        return {
            name: torch.randn(num, width, device=self.world.device, dtype=self.dtype).requires_grad_(input_grad)
            for name, num in num_rows.items()
        }

    def _times_by_layer(self, seconds: list[float]) -> LayerTimes:
        """Return the times of a round's passes by layer: the forwards of all microbatches, then their backwards."""
        keys = self.keys
        times: LayerTimes = {key: ([], []) for key in keys}
        for number, first in enumerate(range(0, len(seconds), len(keys))):
            is_backward = number >= len(seconds) // len(keys) // 2
            layer_s = seconds[first : first + len(keys)]
            for key, value in zip(reversed(keys) if is_backward else keys, layer_s, strict=True):
                times[key][is_backward].append(value)
        return times

    def _saved_bytes(self, inputs: UnitInput) -> list[int]:
        """Return the bytes that each layer's forward saves for its backward beyond earlier layers', without weights."""
        stage = self.stage
        stage.recompute = frozenset()
        stage.requires_grad_(True)
        weights = {param.untyped_storage().data_ptr() for param in stage.parameters()}
        saved: dict[int, tuple[int, Tensor]] = {}  # with the tensor, or its address would be given to another
        totals = [0]

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            context = stage.context(inputs, self.features(inputs, True))
            state = None
            for index in stage.indices:
                state = stage.run_layer(context, state, index)
                totals.append(sum(nbytes for nbytes, _ in saved.values()))
        return [after - before for before, after in itertools.pairwise(totals)]


def build_layer_profiler(
    recipe: Recipe, model: ModelShape, unit: UnitShape, groups: ParallelGroups, world: World, dtype: torch.dtype
) -> LayerProfiler:
    """Build a few of each of the unit's distinct layers, all of them trained, and their optimizer."""
    num_equal: Counter[str] = Counter()
    layers = []
    for layer in unit.layers:
        key = layer_key(layer_fields(layer))
        num_equal[key] += 1
        # Skip connections join all of a U-Net, and what travels beside the hidden states all blocks that read of it.
        if num_equal[key] <= MAX_EQUAL_LAYERS or not unit.is_splittable or unit.layers[0].side_out:
            layers.append(replace(layer, lora=None))  # the cost of adapters is modelled
    short = replace(unit, layers=tuple(layers))
    stage = build_stage(
        recipe.model,
        replace(model, units=tuple(short if u.name == unit.name else u for u in model.units)),
        StageSpec(unit.name, (0, len(layers))),
        groups,
        StageOptions(dtype, world.device, recipe.train.seed, recipe.train.attention, kernels=recipe.train.kernels),
    ).requires_grad_(True)
    # Muon's part beside AdamW is modelled: it grows with the sides of matrices, not with their number of weights.
    runner = UnitRunner(unit.name, {StageId(unit.name, 0): stage}, groups)
    optimizer = build_unit_optimizer(_with_adamw(recipe), runner, world)
    return LayerProfiler(stage, optimizer, world, dtype)


def median_without_outliers(seconds: Sequence[float]) -> float:
    """Return the median of repeats without outliers."""
    return statistics.median(_without_outliers(seconds))


def relative_deviation(seconds: Sequence[float]) -> float:
    """Return the standard deviation of repeats over their mean, without outliers; 0 if they took no time."""
    usual = _without_outliers(seconds)
    mean = statistics.fmean(usual)
    return statistics.pstdev(usual) / mean if mean > 0 else 0.0


def _without_outliers(seconds: Sequence[float]) -> Sequence[float]:
    median = statistics.median(seconds)
    deviation = statistics.median([abs(s - median) for s in seconds])
    if deviation == 0:
        return [median]
    return [s for s in seconds if abs(s - median) <= MAX_MEDIAN_DEVIATIONS * deviation]


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


def _with_adamw(recipe: Recipe) -> Recipe:
    optimizer = recipe.train.optimizer.model_copy(update={"kind": "adamw"})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"optimizer": optimizer})})
