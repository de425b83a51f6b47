"""What one rank must hold at its fullest moment, by kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.cost_model import CostModel, TokenLoad
from mmtrain.costs.hardware import ELEMENT_BYTES, Precision
from mmtrain.models.model_shape import LayerShape

MEMORY_MARGIN = (
    0.12  # on top of what is counted: nine counted runs held up to 5% more, and allocators lose some to fragments
)
LIVE_GRADIENT_SHARE = 0.75  # of a backward, beyond what has been given up: with a half, counted runs came out below


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter. Optimizer state is sharded over the data-parallel replicas (ZeRO-1, arXiv 1910.02054)."""

    parameter: int
    gradient: int  # only if it trains
    optimizer: int  # only if it trains: Adam's two moments, and the fp32 master weight of a bf16 parameter


STATE_BYTES: dict[Precision, StateBytes] = {"fp32": StateBytes(4, 4, 8), "bf16": StateBytes(2, 4, 12)}


@dataclass(frozen=True)
class HeldLayers:
    """Consecutive layers of one unit on one rank, and what passes through them."""

    layers: tuple[LayerShape, ...]
    input_grad: tuple[bool, ...]  # per layer: does anything below it train (see `analytic.input_grad_needed`)
    recompute: tuple[bool, ...]  # per layer
    tp: int
    dp: int
    in_flight: int  # microbatches whose forward ran and whose backward did not, at the fullest moment
    load: TokenLoad  # of the largest microbatch
    sp: bool = False  # sequence parallelism: ranks of a TP group share out the tokens between products


@dataclass(frozen=True)
class RankMemory:
    """Bytes one rank needs, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    margin: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.by_kind().values())

    @property
    def binding(self) -> str:
        """The kind that takes most."""
        kinds = self.by_kind()
        return max(kinds, key=lambda kind: kinds[kind])

    def by_kind(self) -> dict[str, float]:
        """Bytes under the name of their kind."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


def rank_memory(held: Sequence[HeldLayers], costs: CostModel, precision: Precision, tied: bool) -> RankMemory:
    """Add up what the stages of one rank hold.

    tied: embedding and head are one matrix, held once where both lie on this rank.
    """
    parameters = gradients = optimizer = 0.0
    for stage in held:
        for layer in stage.layers:
            own = layer_state(layer, stage.tp, stage.dp, precision)
            parameters, gradients, optimizer = parameters + own[0], gradients + own[1], optimizer + own[2]
    if tied:
        for twice in _tied_layers(held):
            own = matrix_state(twice[0], twice[1], twice[2], precision)
            parameters, gradients, optimizer = parameters - own[0], gradients - own[1], optimizer - own[2]
    activations = float(sum(stage.in_flight * microbatch_activation_bytes(stage, costs, precision) for stage in held))
    buffers = max((stage_working_bytes(stage, costs, precision) for stage in held), default=0)
    margin = MEMORY_MARGIN * (parameters + gradients + optimizer + activations + buffers)
    return RankMemory(parameters, gradients, optimizer, activations, buffers, margin)


def layer_state(layer: LayerShape, tp: int, dp: int, precision: Precision) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state of one layer on one rank."""
    return _state(analytic.num_parameters(layer, tp), layer.trainable, dp, precision)


def matrix_state(layer: LayerShape, tp: int, dp: int, precision: Precision) -> tuple[float, float, float]:
    """Bytes of state of the vocabulary matrix alone."""
    return _state(layer.vocab * layer.hidden // tp, layer.trainable, dp, precision)


def _state(count: int, trainable: bool, dp: int, precision: Precision) -> tuple[float, float, float]:
    size = STATE_BYTES[precision]
    if not trainable:
        return (float(count * size.parameter), 0.0, 0.0)
    return (float(count * size.parameter), float(count * size.gradient), count * size.optimizer / dp)


def microbatch_activation_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Bytes of activations that one microbatch leaves behind between forward and backward."""
    return sum(
        layer_activation_bytes(layer, stage.tp, stage.load, again, costs, precision, input_grad=needed, sp=stage.sp)
        for layer, again, needed in zip(stage.layers, stage.recompute, stage.input_grad, strict=True)
    )


def layer_activation_bytes(
    layer: LayerShape,
    tp: int,
    load: TokenLoad,
    recompute: bool,
    costs: CostModel,
    precision: Precision,
    *,
    input_grad: bool = True,
    sp: bool = False,
) -> int:
    """Bytes of activations that one microbatch leaves behind in a layer."""
    kept = costs.activation_bytes(layer, tp, load, recompute, input_grad=input_grad)
    sliced = analytic.sequence_parallel_savings(layer, load, ELEMENT_BYTES[precision], tp, recompute) if sp else 0
    return max(kept - sliced, 0)


def stage_working_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Bytes that live only while a layer is computed, and the messages at both ends of the stage."""
    largest = max(
        layer_working_bytes(layer, stage.tp, stage.load, again, costs, precision, input_grad=needed, sp=stage.sp)
        for layer, again, needed in zip(stage.layers, stage.recompute, stage.input_grad, strict=True)
    )
    return largest + sum(
        hidden_state_bytes(layer, stage.load, precision) for layer in (stage.layers[0], stage.layers[-1])
    )


def layer_working_bytes(
    layer: LayerShape,
    tp: int,
    load: TokenLoad,
    recompute: bool,
    costs: CostModel,
    precision: Precision,
    *,
    input_grad: bool = True,
    sp: bool = False,
) -> int:
    """Bytes a layer needs for a while: in its backward gradients, and what is recomputed; without one what it computes.

    Gradients are as large as what forward keeps, but that is given up as they come.
    """
    if not (layer.trainable or input_grad):
        computed = layer_activation_bytes(replace(layer, trainable=True), tp, load, False, costs, precision, sp=sp)
        return computed + hidden_state_bytes(layer, load, precision)  # which nothing else counts as kept
    kept = layer_activation_bytes(layer, tp, load, False, costs, precision, sp=sp)
    return round(kept * (LIVE_GRADIENT_SHARE + recompute))


def hidden_state_bytes(layer: LayerShape, load: TokenLoad, precision: Precision) -> int:
    """Bytes of the hidden states that enter a layer, and of what a diffusion transformer hands on beside them."""
    hidden = layer.hidden * diffusion.input_rows(layer, load)
    return (hidden + layer.conditioning_elements(load.num_sequences)) * ELEMENT_BYTES[precision]


def _tied_layers(held: Iterable[HeldLayers]) -> list[tuple[LayerShape, int, int]]:
    """The head, with its tp and dp, if the embedding is on the same rank."""
    by_kind = {
        layer.kind: (layer, s.tp, s.dp) for s in held for layer in s.layers if layer.kind in ("embedding", "head")
    }
    return [by_kind["head"]] if len(by_kind) == 2 else []
