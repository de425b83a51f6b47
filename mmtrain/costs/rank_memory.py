"""What one rank must hold at its fullest moment, by kind."""

from collections.abc import Iterable, Iterator, Sequence
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
class RankLayer:
    """One layer as a rank of `tp` holds it."""

    layer: LayerShape
    tp: int
    input_grad: bool = True  # whether anything below it trains (see `layer_arithmetic.input_grad_needed`)
    recompute: bool = False
    sp: bool = False  # sequence parallelism: between GEMMs each rank of a TP group holds a slice of the tokens


@dataclass(frozen=True)
class HeldLayers:
    """Consecutive layers of one unit on one rank, and what passes through them."""

    layers: tuple[LayerShape, ...]
    input_grad: tuple[bool, ...]  # by layer, see `RankLayer`
    recompute: tuple[bool, ...]  # by layer
    tp: int
    dp: int
    in_flight: int  # microbatches whose forward ran and whose backward did not, at the fullest moment
    load: TokenLoad  # of the largest microbatch
    sp: bool = False

    def rank_layers(self) -> Iterator[RankLayer]:
        """Yield the layers one by one."""
        for layer, input_grad, recompute in zip(self.layers, self.input_grad, self.recompute, strict=True):
            yield RankLayer(layer, self.tp, input_grad, recompute, self.sp)


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
    """Return the bytes of activations that one microbatch keeps between forward and backward."""
    return sum(layer_activation_bytes(held, stage.load, costs, precision) for held in stage.rank_layers())


def layer_activation_bytes(held: RankLayer, load: TokenLoad, costs: CostModel, precision: Precision) -> int:
    """Return the bytes of activations that one microbatch keeps in a layer between forward and backward."""
    nbytes = costs.activation_bytes(held.layer, held.tp, load, held.recompute, input_grad=held.input_grad)
    if held.sp:
        element_bytes = ELEMENT_BYTES[precision]
        nbytes -= analytic.sequence_parallel_savings(held.layer, load, element_bytes, held.tp, held.recompute)
    return max(nbytes, 0)


def stage_working_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Return the bytes that live only while a layer is computed, and those of messages at both ends of the stage."""
    largest = max(layer_working_bytes(held, stage.load, costs, precision) for held in stage.rank_layers())
    ends = (stage.layers[0], stage.layers[-1])
    return largest + sum(hidden_state_bytes(layer, stage.load, precision) for layer in ends)


def layer_working_bytes(held: RankLayer, load: TokenLoad, costs: CostModel, precision: Precision) -> int:
    """Return the bytes that a layer needs while it is computed.

    In a backward these are gradients, as large as what forward keeps but freed as backward goes on, and what is
    recomputed. A layer without backward needs what its forward computes, and its input, which nothing else counts.
    """
    computed = replace(held, input_grad=True, recompute=False)
    if not (held.layer.trainable or held.input_grad):
        computed = replace(computed, layer=replace(held.layer, trainable=True))
        activations = layer_activation_bytes(computed, load, costs, precision)
        return activations + hidden_state_bytes(held.layer, load, precision)
    return round(layer_activation_bytes(computed, load, costs, precision) * (LIVE_GRADIENT_SHARE + held.recompute))


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
