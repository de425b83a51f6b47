"""The peak memory of one rank, by kind: state, activations, working buffers, a margin, communicators, and inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal

from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.block_arithmetic import LayerInputArithmetic, mixer_arithmetic, mlp_arithmetic
from mmtrain.costs.context_parallel_costs import exchange_buffer_bytes
from mmtrain.costs.cost_model import CostModel, TokenLoad
from mmtrain.costs.expert_costs import expert_replicas
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.muon_costs import muon_buffer_bytes, num_muon_parameters
from mmtrain.costs.offload_costs import NUM_BLOCKS_ON_DEVICE, without_offload
from mmtrain.models.shapes.layer_shape import COPIES_SUMMED_AT_ONCE, Attention, MoeMlp, expert_shard
from mmtrain.models.shapes.model_shape import BLOCK_KINDS, MLP_CHUNK_TOKENS, LayerShape

# Share added to what is counted: 7% for what a caching allocator loses to fragments, 1% for what is not counted, which
# was up to 0.4% on 30 measured ranks (scripts/bench_costs.py).
MEMORY_MARGIN = 0.08
# Gradients alive at once in the backward of a layer that is no block (see `_block_gradient_bytes`), as a share of its
# activations, beyond activations already freed. With one half, predictions came out below the measured runs.
LIVE_GRADIENT_SHARE = 0.75

# The input of the step that computes and that of the next, each in an arena with room to grow; see
# `runtime.execution.input_arena`, which a test compares.
NUM_INPUT_ARENAS = 2
INPUT_ARENA_GROWTH = 1.25
INDEX_BYTES_PER_TOKEN = 24  # that come with a step for each stage: positions in time, row and column, as int64

NUM_GATHERED_LAYERS = 2  # layers with whole weights on a rank: the one computed and the one being gathered


NUM_OWN_COPIES = 2  # in a node's memory: one is complete while the other changes


@dataclass(frozen=True)
class StateCopies:
    """Copies of a rank's part of a checkpoint in the memory of its node (`train.peer_copies`)."""

    number: int = 0  # with those that a rank keeps for its peer
    on_device: bool = False  # the host's memory is that in which ranks compute

    @property
    def has_peers(self) -> bool:
        """Whether a rank keeps copies for another node's, too."""
        return self.number > NUM_OWN_COPIES

    @classmethod
    def planned(cls, every: int, num_ranks: int, hardware: Hardware) -> "StateCopies":
        """Return the copies of a run that takes one `every` steps, in turn into two places, here and at a peer."""
        if not every:
            return cls()
        is_one_machine = num_ranks <= hardware.ranks_per_node and not hardware.spans_machines
        number = NUM_OWN_COPIES if is_one_machine else 2 * NUM_OWN_COPIES
        return cls(number, hardware.host_bytes_per_s is None)


NO_COPIES = StateCopies()


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter. Optimizer state is sharded over the data-parallel replicas (ZeRO-1, arXiv 1910.02054)."""

    parameter: int
    gradient: int  # only if it trains
    optimizer: int  # only if it trains: Adam's two moments, and the fp32 master weight of a bf16 parameter
    muon_saves: int = 0  # of these, what a parameter that Muon trains does not need; 0: it trains none
    copies: StateCopies = NO_COPIES

    @property
    def saved_share(self) -> float:
        """What a checkpoint holds of parameters that train, over their optimizer state: fp32 weights have no master."""
        has_master = self.parameter < ELEMENT_BYTES["fp32"]
        return 1.0 if has_master else (self.optimizer + self.parameter) / self.optimizer

    def copied(self, optimizer: float, frozen: float) -> tuple[float, float]:
        """Return the bytes of copies on the device and in host memory, of this optimizer state and frozen weights."""
        num_bytes = self.copies.number * (optimizer * self.saved_share + frozen)
        return (num_bytes, 0.0) if self.copies.on_device else (0.0, num_bytes)

    def saved_by_muon(self, layer: LayerShape, tp: int) -> tuple[int, int]:
        """Return the bytes that Muon saves in a layer, before they are sharded: of all replicas, and of experts apart.

        See `num_apart_parameters`.
        """
        if not self.muon_saves:
            return 0, 0
        joint, apart = num_muon_parameters(layer, tp)
        return joint * self.muon_saves, apart * self.muon_saves


def state_bytes(
    precision: Precision,
    moments: Precision = "fp32",
    kind: Literal["adamw", "muon"] = "adamw",
    copies: StateCopies = NO_COPIES,
) -> StateBytes:
    """Return the bytes per parameter for parameters in `precision`, and `moments` and `kind` of `train.optimizer`."""
    master_bytes, moment_bytes = 4 if precision == "bf16" else 0, ELEMENT_BYTES[moments]
    muon_saves = moment_bytes if kind == "muon" else 0
    return StateBytes(ELEMENT_BYTES[precision], 4, master_bytes + 2 * moment_bytes, muon_saves, copies)


@dataclass(frozen=True)
class RankLayer:
    """One layer as a rank of `tp` holds it."""

    layer: LayerShape
    tp: int
    input_grad: bool = True  # whether anything below it trains (see `layer_arithmetic.input_grad_needed`)
    recompute: bool = False  # its activations do not stay on the device, see `program.ir.graph.Stage`
    sp: bool = False  # sequence parallelism: between GEMMs each rank of a TP group holds a slice of the tokens

    @property
    def is_recomputed(self) -> bool:
        """Whether backward computes the layer again, rather than bring its activations back from host memory."""
        return self.recompute and self.layer.offload != "all"


@dataclass(frozen=True)
class HeldLayers:
    """Consecutive layers of one unit on one rank, and the microbatches that pass through them."""

    layers: tuple[LayerShape, ...]
    input_grad: tuple[bool, ...]  # by layer, see `RankLayer`
    recompute: tuple[bool, ...]  # by layer
    tp: int
    dp: int
    in_flight: int  # the most microbatches at once between forward and backward
    load: TokenLoad  # of the largest microbatch
    sp: bool = False
    num_microbatches: int = 1  # of a step
    shard: int | None = None  # replicas that hold one copy of the layers together; None: each holds them whole
    keeps_weights: bool = False  # with `shard`: gathered weights stay through the step (ZeRO-2)
    held_features: int = 0  # microbatches whose features, or gradients of these, the rank holds at once
    gathered_elements: int = 0  # of features, or gradients of these, that an all-gather brings at once
    read_feature_bytes: int = 0  # of encoders, which a microbatch of the LLM's first stage keeps
    under_way_bytes: int = 0  # of messages beyond those of the microbatch that computes
    is_computed: bool = True  # in the part of a step that is counted; else the rank only holds state and activations
    has_gradients: bool = True  # else no backward of the step has begun, and gradients of the last step are dropped

    @property
    def state_replicas(self) -> int:
        """Replicas over which ZeRO-1 shards optimizer state; that of sharded layers is divided like their weights."""
        return self.dp if self.shard is None else 1

    @property
    def gathered(self) -> tuple[LayerShape, ...]:
        """Layers whose weights are whole on the rank only while they compute, each once.

        FSDP2 copies the weights of a layer also where a rank holds all of them.
        """
        return () if self.shard is None else tuple(run.layer for run, _ in self.runs)

    @cached_property
    def runs(self) -> Sequence[tuple[RankLayer, int]]:
        """Consecutive layers that are alike, with their number: blocks of a unit are mostly one object."""
        runs: list[tuple[RankLayer, int]] = []
        last: RankLayer | None = None
        number = 0
        for layer, input_grad, recompute in zip(self.layers, self.input_grad, self.recompute, strict=True):
            if (
                last is not None
                and layer is last.layer
                and (input_grad, recompute) == (last.input_grad, last.recompute)
            ):
                number += 1
                continue
            if last is not None:
                runs.append((last, number))
            last = RankLayer(layer, self.tp, input_grad, recompute, self.sp)
            number = 1
        return runs if last is None else [*runs, (last, number)]


@dataclass(frozen=True)
class RankMemory:
    """Bytes one rank needs, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    margin: float
    communicators: float = 0.0
    inputs: float = 0.0
    host_activations: float = 0.0  # in host memory, so no part of the total
    copies: float = 0.0  # of state in the memory of the node, where ranks compute in that
    host_copies: float = 0.0  # of state in host memory, so no part of the total

    @property
    def on_host(self) -> float:
        """What lies in host memory beside the device's."""
        return self.host_activations + self.host_copies

    @property
    def on_host_text(self) -> str:
        """Name what lies there."""
        kinds = {"activations": self.host_activations, "copies of its state": self.host_copies}
        return " and ".join(kind for kind, nbytes in kinds.items() if nbytes)

    @property
    def total(self) -> float:
        """All kinds on the device together."""
        return sum(self.by_kind().values())

    @property
    def binding(self) -> str:
        """The kind that needs the most bytes."""
        kinds = self.by_kind()
        return max(kinds, key=lambda kind: kinds[kind])

    def by_kind(self) -> dict[str, float]:
        """Return the bytes of each kind on the device."""
        kinds = {f.name: float(getattr(self, f.name)) for f in fields(self) if not f.name.startswith("host_")}
        if not self.copies:
            del kinds["copies"]  # few runs take any
        return kinds


def rank_memory(
    held: Sequence[HeldLayers],
    costs: CostModel,
    precision: Precision,
    size: StateBytes,
    tied: bool,
    communicator_bytes: float = 0.0,
) -> RankMemory:
    """Add up what the stages of one rank hold.

    Args:
        size: bytes of weights, gradients and optimizer state per parameter.
        tied: embedding and head are one matrix, held once where both are on this rank.
        communicator_bytes: of its communicators. The allocator does not manage them, so no margin is added; nor to
            inputs, of which all microbatches count like the largest.
    """
    parameters = gradients = optimizer = 0.0
    for stage in held:
        for run, number in stage.runs:
            state = _held_layer_state(stage, run.layer, size)
            parameters += number * state[0]
            gradients += number * state[1]
            optimizer += number * state[2]
    if tied:
        for head, stage in _tied_heads(held):
            of_matrix = matrix_state(head, stage.tp, stage.state_replicas, size)
            state = _held_state(stage, of_matrix, stage.shard or 1)
            parameters, gradients, optimizer = parameters - state[0], gradients - state[1], optimizer - state[2]
    activations = float(sum(stage.in_flight * microbatch_activation_bytes(stage, costs, precision) for stage in held))
    computed = [stage for stage in held if stage.is_computed]
    buffers = max((stage_working_bytes(stage, costs, precision) for stage in computed), default=0)
    gathered = (
        gathered_bytes(layer, precision, stage.tp, stage.keeps_weights)
        for stage in computed
        for layer in stage.gathered
    )
    buffers += max(gathered, default=0)
    buffers += sum(stage.held_features * feature_bytes(stage, precision) for stage in held)
    buffers += max((stage.gathered_elements for stage in held), default=0) * ELEMENT_BYTES[precision]
    buffers += sum(stage.under_way_bytes for stage in held)
    if size.muon_saves:  # an update follows the last backward, when no activations are left
        in_update = muon_buffer_bytes((layer for stage in held for layer in stage.layers), precision)
        buffers = max(buffers, in_update - int(activations))
    margin = MEMORY_MARGIN * (parameters + gradients + optimizer + activations + buffers)
    inputs = NUM_INPUT_ARENAS * INPUT_ARENA_GROWTH * sum(step_input_bytes(stage) for stage in held)
    host = float(sum(stage.in_flight * microbatch_host_bytes(stage, costs, precision) for stage in held))
    copies = size.copied(optimizer, sum(_frozen_bytes(stage, size) for stage in held))
    of_data = (communicator_bytes, inputs, host)
    return RankMemory(parameters, gradients, optimizer, activations, buffers, margin, *of_data, *copies)


def _frozen_bytes(stage: HeldLayers, size: StateBytes) -> float:
    """Return the bytes of frozen weights of a stage that one rank saves: the first replica alone does."""
    num_frozen = sum(
        number * (analytic.num_parameters(run.layer, stage.tp) - analytic.num_trained_parameters(run.layer, stage.tp))
        for run, number in stage.runs
    )
    return num_frozen * size.parameter / (stage.shard or 1)


def step_input_bytes(stage: HeldLayers) -> int:
    """Return the bytes of data and index tables that come to a stage for one step; on a GPU the host pins as many."""
    payload = sum(number * analytic.payload_bytes(run.layer, stage.load) for run, number in stage.runs)
    return stage.num_microbatches * (payload + INDEX_BYTES_PER_TOKEN * stage.load.tokens)


def layer_state(layer: LayerShape, tp: int, dp: int, size: StateBytes) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of one layer on one rank.

    Optimizer state of experts is sharded over those of the `dp` replicas that hold the same ones.
    """
    apart, num_same_experts = analytic.num_apart_parameters(layer, tp), expert_replicas(layer, dp)
    parameters, gradients, optimizer = _state(
        analytic.num_parameters(layer, tp), analytic.num_trained_parameters(layer, tp), dp, size
    )
    saved, saved_apart = size.saved_by_muon(layer, tp)
    optimizer += apart * size.optimizer * (1 / num_same_experts - 1 / dp)
    return parameters, gradients, optimizer - saved / dp - saved_apart / num_same_experts


def _held_layer_state(stage: HeldLayers, layer: LayerShape, size: StateBytes) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of one layer of a stage on one rank."""
    if stage.shard is None:
        return _held_state(stage, layer_state(layer, stage.tp, stage.dp, size), 1)
    held, trained = analytic.num_parameters(layer, stage.tp), analytic.num_trained_parameters(layer, stage.tp)
    held_apart, apart = analytic.num_held_apart(layer, stage.tp), analytic.num_apart_parameters(layer, stage.tp)
    saved, saved_apart = size.saved_by_muon(layer, stage.tp)
    joint = _held_state(stage, _less_optimizer(_state(held - held_apart, trained - apart, 1, size), saved), stage.shard)
    if not isinstance(layer.mlp, MoeMlp):
        return joint
    shard = expert_shard(stage.shard, layer.mlp.ep)
    of_experts = _held_state(stage, _less_optimizer(_state(held_apart, apart, 1, size), saved_apart), shard)
    return (joint[0] + of_experts[0], joint[1] + of_experts[1], joint[2] + of_experts[2])


def _less_optimizer(state: tuple[float, float, float], saved: float) -> tuple[float, float, float]:
    return state[0], state[1], state[2] - saved


def _held_state(stage: HeldLayers, state: tuple[float, float, float], shard: int) -> tuple[float, float, float]:
    """Return what a rank holds of some state: one of `shard` parts, and the weights that it keeps gathered."""
    return (state[0] / shard + state[0] * stage.keeps_weights, state[1] / shard * stage.has_gradients, state[2] / shard)


def gathered_bytes(layer: LayerShape, precision: Precision, tp: int = 1, kept: bool = False) -> int:
    """Return the bytes of whole weights while a sharded layer computes and another one's arrive, with its gradients.

    kept: whether whole weights are counted elsewhere, so that those that arrive alone need a buffer.
    """
    num_gathered = 1 if kept else NUM_GATHERED_LAYERS
    num_bytes = num_gathered * ELEMENT_BYTES[precision] + BYTES_PER_GRADIENT
    return analytic.num_parameters(layer, tp) * num_bytes


def matrix_state(layer: LayerShape, tp: int, dp: int, size: StateBytes) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of the vocabulary matrix alone."""
    count = layer.vocab * layer.hidden // tp
    return _state(count, count if layer.trainable else 0, dp, size)


def _state(count: int, num_trained: int, dp: int, size: StateBytes) -> tuple[float, float, float]:
    return (float(count * size.parameter), float(num_trained * size.gradient), num_trained * size.optimizer / dp)


def microbatch_activation_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Return the bytes of activations that one microbatch keeps on the device between forward and backward.

    A stage also keeps features, a table of rotations, and what came beside the hidden states in the same message. It
    keeps the hidden states themselves, since the backward of its first layer starts from them, even if that layer keeps
    them in host memory.
    """
    first, _ = stage.runs[0]
    received = stage.read_feature_bytes
    if first.layer.trainable or first.input_grad:
        received += carried_bytes(first, stage.load, precision)
        if layer_host_bytes(first, stage.load, costs, precision):
            received += message_bytes(first, stage.load, precision)
    return (
        received
        + _rotary_table_bytes(stage, precision)
        + sum(number * layer_activation_bytes(run, stage.load, costs, precision) for run, number in stage.runs)
    )


def microbatch_host_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Return the bytes of activations that one microbatch keeps in host memory between forward and backward."""
    return sum(number * layer_host_bytes(run, stage.load, costs, precision) for run, number in stage.runs)


def _rotary_table_bytes(stage: HeldLayers, precision: Precision) -> int:
    """Return the bytes of the tables that rotate heads; blocks whose windows differ may have tables of their own."""
    trained = [run.layer for run, _ in stage.runs if run.layer.trainable or run.input_grad]
    by_window = {
        layer.mixer.window: layer for layer in trained if isinstance(layer.mixer, Attention) and layer.mixer.rotates
    }
    element_bytes = ELEMENT_BYTES[precision]
    return sum(analytic.rotary_table_bytes(layer, stage.load, element_bytes) for layer in by_window.values())


def carried_bytes(held: RankLayer, load: TokenLoad, precision: Precision) -> int:
    """Return the bytes of what travels into a layer beside the hidden states."""
    nbytes = (held.layer.in_width - held.layer.hidden) * load.tokens * ELEMENT_BYTES[precision]
    return nbytes // held.tp if held.sp else nbytes


def layer_activation_bytes(held: RankLayer, load: TokenLoad, costs: CostModel, precision: Precision) -> int:
    """Return the bytes of activations that one microbatch keeps in a layer between forward and backward."""
    nbytes = costs.activation_bytes(held.layer, held.tp, load, held.recompute, input_grad=held.input_grad)
    if held.sp:
        element_bytes = ELEMENT_BYTES[precision]
        nbytes -= analytic.sequence_parallel_savings(held.layer, load, element_bytes, held.tp, held.is_recomputed)
    return max(nbytes, 0)


def layer_host_bytes(held: RankLayer, load: TokenLoad, costs: CostModel, precision: Precision) -> int:
    """Return the bytes of activations that one microbatch keeps of a layer in host memory."""
    if not held.recompute or held.layer.offload == "none":
        return 0
    on_device = replace(held, layer=without_offload(held.layer), recompute=held.is_recomputed)
    kept_bytes = layer_activation_bytes(on_device, load, costs, precision)
    return kept_bytes - layer_activation_bytes(held, load, costs, precision)


def stage_working_bytes(stage: HeldLayers, costs: CostModel, precision: Precision) -> int:
    """Return the bytes that live only while a layer is computed, and those of messages at both ends of the stage.

    They count beyond what the stage keeps, of which layers behind the computed one have freed their part in backward.
    """
    largest = freed = 0
    for run, number in reversed(stage.runs):
        largest = max(largest, layer_working_bytes(run, stage.load, costs, precision) - freed)
        freed += number * layer_activation_bytes(run, stage.load, costs, precision)
    ends = (stage.runs[0][0], stage.runs[-1][0])
    return largest + sum(message_bytes(held, stage.load, precision) for held in ends)


def message_bytes(held: RankLayer, load: TokenLoad, precision: Precision) -> int:
    """Return the bytes of a message at the end of a stage with this layer; between blocks, ranks may share the tokens.

    They are those of what enters the layer.
    """
    nbytes = hidden_state_bytes(held.layer, load, precision)
    return nbytes // held.tp if held.sp and held.layer.kind in BLOCK_KINDS else nbytes


def feature_bytes(stage: HeldLayers, precision: Precision) -> int:
    """Return the bytes of the features that an encoder's last stage makes of one microbatch."""
    projector = stage.layers[-1]
    return analytic.feature_rows(projector, stage.load) * projector.out_width * ELEMENT_BYTES[precision]


def layer_working_bytes(held: RankLayer, load: TokenLoad, costs: CostModel, precision: Precision) -> int:
    """Return the bytes that a layer needs while it is computed.

    In a backward these are gradients, less what it has freed by then, and what is recomputed beyond the input. The
    gradient of a vocabulary matrix before it is added up counts too; where few tokens have a target it is the largest
    part. A
    layer without backward needs what its forward computes, and its input, which nothing else counts.
    What travels beside the hidden states is alive meanwhile, and so is in attention what ranks that share sequences
    exchange. Of blocks whose activations are in host memory, those of some are on the device meanwhile.
    """
    carried = carried_bytes(held, load, precision)
    # The input of a block that is computed again is counted with what that makes.
    num_blocks = NUM_BLOCKS_ON_DEVICE - held.is_recomputed
    carried += num_blocks * layer_host_bytes(held, load, costs, precision)
    if held.recompute and not held.is_recomputed:
        held = replace(held, recompute=False)
    computed = _as_computed(held)
    if not (held.layer.trainable or held.input_grad):
        activations = layer_activation_bytes(computed, load, costs, precision)
        if held.layer.kind in BLOCK_KINDS:
            return _block_forward_bytes(held, load, activations, precision)
        return activations + hidden_state_bytes(held.layer, load, precision)
    activations = layer_activation_bytes(computed, load, costs, precision)
    match held.layer.kind:
        case "vit_block" | "decoder_block":
            live_gradients = _block_gradient_bytes(held, load, precision)
        case "head":
            live_gradients = _head_gradient_bytes(held, load, precision)
        case _:
            live_gradients = LIVE_GRADIENT_SHARE * activations
    recomputed = activations - layer_activation_bytes(held, load, costs, precision) if held.recompute else 0
    return round(live_gradients + recomputed) + carried + _matrix_gradient_bytes(held, precision)


@lru_cache(maxsize=1 << 12)  # to make a layer and its hash takes longer than all else that is counted of it
def _as_computed(held: RankLayer) -> RankLayer:
    """Return a layer as it is while it is computed: everything is kept, and it has a backward.

    Where the whole layer is computed again, its activation function is among that.
    """
    trains = held.layer.trainable or not held.input_grad
    layer = replace(held.layer, recomputes_activation=False, offload="none", trainable=trains)
    return replace(held, layer=layer, input_grad=True, recompute=False)


def _block_forward_bytes(held: RankLayer, load: TokenLoad, activations: int, precision: Precision) -> int:
    """Return the bytes of a block's forward that keeps nothing, at its peak in attention or in the MLP.

    Of what a forward for a backward keeps (`activations`), either has its own part, one of the norms' outputs and the
    block's input; the MLP also has its norm's input. Tokens that ranks share between GEMMs are gathered before these.
    """
    element_bytes = ELEMENT_BYTES[precision]
    whole = load.tokens * held.layer.hidden * element_bytes
    states = whole // held.tp if held.sp else whole
    of_mlp = analytic.activation_function_elements(held.layer, load, held.tp) * element_bytes
    in_attention = activations - of_mlp - 2 * states  # the input and output of the MLP's norm
    in_mlp = of_mlp + 3 * states
    beside = hidden_state_bytes(held.layer, load, precision) - whole
    beside += analytic.rotary_table_bytes(held.layer, load, element_bytes)
    return max(in_attention, in_mlp) + whole - states + beside


def _block_gradient_bytes(held: RankLayer, load: TokenLoad, precision: Precision) -> float:
    """Return by how much the backward of a block at its peak exceeds what its forward keeps.

    That is in the MLP, while the gradient of the activation function's input is made from that of its output. The
    output itself is then free, if it was kept. Tensor parallelism divides these widths, but not those of whole hidden
    states: where ranks share the tokens between GEMMs, the MLP's last linear gathers the gradient of its output, and
    the first one, whose input has a whole gradient, that input. Attention comes later, when all of the MLP is free. It
    has gradients of its output, and of queries, keys and values before and after their rotation. Gradients of hidden
    states at both ends of a stage are counted with its messages.

    In a recomputed block with many tokens the MLP is computed in chunks, of which one exists at a time, so the block
    then holds less than what its forward would keep. A grouped GEMM of experts reads copies of their weights.
    """
    layer, mlp = held.layer, mlp_arithmetic(held.layer)
    ffn = mlp.inner_width // held.tp
    kept = ffn if layer.keeps_activation_output and (held.recompute or not layer.recomputes_activation) else 0
    input_width = mlp.elementwise_width // held.tp - ffn
    gathered = layer.hidden * held.sp + mlp.copied_width
    last_linear = gathered + 2 * ffn - kept  # the output made again, if it is not kept, and its gradient
    activation = ffn + input_width - kept
    first_linear = gathered + layer.hidden - kept
    mixer = mixer_arithmetic(layer)
    in_mixer = mixer.gradient_width // held.tp - input_width - kept
    copied = mlp.copied_weights // held.tp if precision == "bf16" else 0
    tokens = min(load.tokens, MLP_CHUNK_TOKENS) if held.recompute else load.tokens
    in_mlp = max(last_linear * tokens + copied // 2, activation * tokens, first_linear * tokens + copied)
    # What experts make of a row is summed in forward, and gets its gradient from that of the sum.
    summed = 3 * COPIES_SUMMED_AT_ONCE // 2 * layer.hidden if mlp.copied_width else 0
    in_mlp = max(in_mlp, (mlp.copied_width + mlp.arriving_width) * tokens + summed)
    if held.recompute and load.tokens > MLP_CHUNK_TOKENS:
        states = layer.hidden // (held.tp if held.sp else 1)  # output of a chunk, gradients of its input and of all
        in_mlp += (input_width + kept + 2 * states) * tokens + (states - input_width - kept) * load.tokens
    element_bytes = ELEMENT_BYTES[precision]
    exchanged = exchange_buffer_bytes(layer, held.tp, load, element_bytes)
    of_mixer = in_mixer * load.tokens * element_bytes + mixer.working_bytes(load, held.tp)
    return float(max(in_mlp * element_bytes, of_mixer + exchanged))


def _head_gradient_bytes(held: RankLayer, load: TokenLoad, precision: Precision) -> float:
    """Return the bytes that a head makes besides what it keeps: gradients of logits are written over these.

    The softmax of some logits is computed in fp32. If the loss is computed by chunks, a chunk's logits come to it, and
    what a smaller microbatch, whose loss is computed with all logits, needs beyond that. Beside logits there are the
    normalized states of tokens with a target, or the gradients of these. The gradient of all hidden states comes later,
    and is counted with the stage's messages. That of the matrix comes when no softmax is left, and with all logits only
    one of them counts.
    """
    sizes = analytic.loss_sizes(held.layer, load, ELEMENT_BYTES[precision], held.tp)
    states = load.num_targets * held.layer.hidden * ELEMENT_BYTES[precision]
    if not sizes.uses_chunks:
        return max(states, sizes.softmax_bytes - _matrix_gradient_bytes(held, precision))
    most = replace(sizes, tokens=sizes.most_tokens_at_once or 0)
    normalized = most.tokens * held.layer.hidden * ELEMENT_BYTES[precision]  # is kept for the gradient of the matrix
    at_once = most.logits_bytes + most.softmax_bytes + normalized
    return states + sizes.chunk_bytes + max(0, at_once - sizes.kept_bytes - sizes.chunk_bytes)


def _matrix_gradient_bytes(held: RankLayer, precision: Precision) -> int:
    """Return the bytes of the gradient of the vocabulary matrix that one microbatch gives."""
    layer = held.layer
    if layer.kind not in ("embedding", "head") or not layer.trains_weights:
        return 0
    width = layer.hidden + LayerInputArithmetic(layer).num_features * (layer.kind == "embedding")
    return layer.vocab * width // held.tp * ELEMENT_BYTES[precision]


def hidden_state_bytes(layer: LayerShape, load: TokenLoad, precision: Precision) -> int:
    """Return the bytes of what enters a layer: hidden states, what travels beside them, a diffusion's conditioning."""
    hidden = layer.in_width * diffusion.input_rows(layer, load)
    return (hidden + layer.conditioning_elements(load.num_sequences)) * ELEMENT_BYTES[precision]


def _tied_heads(held: Iterable[HeldLayers]) -> list[tuple[LayerShape, HeldLayers]]:
    """Return the head, with the layers that it is among, if the embedding is on the same rank."""
    by_kind = {layer.kind: (layer, s) for s in held for layer in s.layers if layer.kind in ("embedding", "head")}
    return [by_kind["head"]] if len(by_kind) == 2 else []
