"""`AnalyticCosts`: a roofline model of a layer's GEMMs, element-wise work and kernel launches."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs import merger_arithmetic, resampler_arithmetic
from mmtrain.costs.block_arithmetic import (
    attention_arithmetic,
    joins_attention_output,
    mixer_arithmetic,
    mlp_arithmetic,
)
from mmtrain.costs.block_pieces import (
    ADD,
    DOWN,
    NORM,
    NORM_MLP,
    PROJECTION,
    QKV,
    UP,
    BlockSeconds,
    ComputeBeside,
    collective_kinds,
    piece_collectives,
    piece_compute,
    pieces_of,
)
from mmtrain.costs.collectives import CollectiveKind, GroupLayout, collective_seconds
from mmtrain.costs.cost_model import ComputeKind, LayerWork, PassDirection, PieceCost, TokenLoad, TokenSplit
from mmtrain.costs.delta_net_arithmetic import DeltaNetArithmetic
from mmtrain.costs.expert_costs import ExpertGroup, copied_elements, expert_exchange_seconds
from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.offload_costs import offloaded_bytes, offloaded_seconds
from mmtrain.costs.part_records import Gemm
from mmtrain.models.shapes.layer_shape import Attention, MoeMlp
from mmtrain.models.shapes.model_shape import BLOCK_KINDS, MLP_CHUNK_TOKENS, LayerShape, num_pieces

_ROTATION_KERNELS, _GATE_KERNELS, _JOINT_NORM_KERNELS, _SCALE_KERNELS = 6, 1, 14, 2  # what they add to a block
_LAYER_INPUT_KERNELS = 6  # of a block's own input: two GEMMs, the gate's activation, its product, a norm and a sum
# Kernels of one forward: GEMMs with their biases, norms, rotary, attention, activation, residual adds and layout
# changes. Those of blocks are held by tests/models/test_kernel_budget.py.
FORWARD_KERNELS = {
    "patch_embed": 6,
    "audio_embed": 18,
    "vit_block": 12,
    "decoder_block": 20,
    "projector": 10,
    "resampler": 20,
    "merger": 18,
    "embedding": 3,
    "head": 10,
    "context_projector": 2,
    "unet_embed": 10,
    "unet_residual": 14,
    "unet_attention": 40,
    "unet_down": 2,
    "unet_up": 3,
    "unet_out": 4,
    "dit_embed": 12,
    "dit_block": 36,
    "dit_out": 6,
}
_ROW_PARALLEL = ("proj", "linear_fc2", "linear_2", "linear")  # linears that split their inputs
ADAPTER_KERNELS = 4  # of one adapter in forward: two GEMMs, the scale, the addition
# Moved for each input of an adapter with dropout: hashes of 8 bytes for four inputs by 22 reads and writes (44), which
# of them are kept (3), the product and its scale (9), in bf16. Counted in `models.kernels.keyed_dropout`.
DROPOUT_BYTES = 56
# All-reduces that tensor parallelism adds to forward, and to the input gradients of backward (Megatron-LM, arXiv
# 1909.08053). Layers of a U-Net are not split.
TP_ALL_REDUCES = {
    "patch_embed": (0, 0),
    "audio_embed": (0, 0),
    "vit_block": (2, 2),
    "decoder_block": (2, 2),
    "projector": (1, 1),
    "resampler": (1, 1),  # several tensors together: see `resampler_arithmetic.reduced_elements`
    "merger": (1, 1),  # as those of a resampler
    "embedding": (1, 0),
    "head": (0, 1),
    "dit_block": (3, 3),
    "context_projector": (0, 1),  # the gradient of the context, to which all blocks add
}

# Backward of fused attention computes the scores again: five products where forward has two (arXiv 2307.08691).
ATTENTION_BACKWARD_RATIO = 2.5
# Linears of a block, by position among its GEMMs, whose backward sums the gradient of its input over the ranks of a TP
# group while it computes that of the weight (`models.megatron.tp_linear`).
REDUCED_BESIDE_WEIGHT_GRADIENT = {"vit_block": (0, 2), "decoder_block": (0, 2)}
# By the piece that a collective follows, the linear whose GEMM runs in chunks beside it: the one that makes what is
# reduced, or that reads what is gathered (`models.megatron.chunked_gemms`).
_CHUNKED_GEMMS: dict[PassDirection, dict[int, int]] = {
    "forward": {NORM: 0, PROJECTION: 1, NORM_MLP: 2, DOWN: 3},
    "backward": {QKV: 0, NORM_MLP: 1, UP: 2, ADD: 3},
}
# The pieces that the collectives of the mixer follow; the others are the MLP's.
_OF_MIXER: dict[PassDirection, tuple[int, ...]] = {"forward": (NORM, PROJECTION), "backward": (QKV, NORM_MLP)}
CHUNK_KERNELS = 2  # that each further chunk of a GEMM starts: the GEMM and its collective


def gemm_seconds(hardware: Hardware, precision: Precision, gemm: Gemm) -> float:
    """Return the seconds of a GEMM: of its arithmetic, or of its operands' way through memory."""
    m, n, k = gemm.m, gemm.n, gemm.k
    if m == 0:
        return 0.0
    rate = hardware.peak_flops(precision) * hardware.efficiency_at(-(-m // gemm.groups), n, k)
    operands = (m * k + gemm.num_weights + m * n) * ELEMENT_BYTES[precision]
    return max(gemm.flops * hardware.slowest_rank_ratio / rate, operands / hardware.moved_bytes_per_s)


@dataclass(frozen=True)
class AnalyticCosts:
    """A `CostModel` that needs nothing but a hardware preset."""

    hardware: Hardware
    precision: Precision
    execution: Execution = OWN_RUNTIME

    def __hash__(self) -> int:
        """Hash little: every cached call hashes its costs, and a process has hardly more than one of them."""
        return hash((self.hardware.name, self.precision))

    @property
    def source(self) -> str:
        """Name of the preset, marked as modelled: nothing was measured on the machine that will run."""
        return f"modelled: {self.hardware.name}"

    @property
    def holds_tp_waits(self) -> bool:
        """Return False: no ranks were measured."""
        return False

    @property
    def sums_on_the_way(self) -> bool:
        """Whether a reduce-scatter adds gradients up in bf16 on their way, as the framework does it."""
        return self.execution.sums_on_the_way

    @property
    def tp_traffic(self) -> float:
        """Bytes of a block's tensor-parallel collectives over those of Megatron-LM: what the framework moves."""
        return self.execution.tp_traffic

    @property
    def gradient_bytes(self) -> int:
        """Bytes for each parameter by which adding up its gradient exceeds writing it, in a layer's own price."""
        summed = 2 * BYTES_PER_GRADIENT - self.element_bytes if self.execution.fuses_gradients else 0
        return self.execution.gradient_bytes + summed

    @property
    def reduces_once(self) -> bool:
        """Whether sharded layers reduce gradients once in a step, as the framework does it."""
        return self.execution.reduces_once

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def sorts_sequences(self) -> bool:
        """Whether attention computes sequences of one length together, in copies of its inputs.

        So it does where no fused kernel runs, and these take no numbers in fp32.
        """
        return "sdpa" in self.hardware.attention_backends or self.precision == "fp32"

    def seconds(self, work: LayerWork) -> float:
        """Return the seconds that one rank spends on a pass, tensor-parallel collectives included.

        `backward` excludes `recompute`, which costs a forward. A load without tokens costs nothing.
        """
        layer, tp, load = work.layer, work.tp, work.load
        if load.tokens == 0:
            return 0.0
        if layer.offload != "none":
            return offloaded_seconds(self, self.hardware, self.element_bytes, work)
        is_saving = work.split.chunks > 1 or self._uses_buffers(work)
        saved_s = self._saved_beside_gemms(work) if is_saving else 0.0
        saved_s -= self._exchange_of_experts(work)
        if work.kind == "backward":
            return self._backward(layer, tp, load, work.input_grad) - saved_s
        again_s = self.activation_again(layer, tp, load, work.kind) + self.mlp_chunk_sums(layer, tp, load, work.kind)
        early_s = self._early_gradients(layer, tp, load, work.input_grad)
        return self._forward(layer, tp, load) + early_s + again_s - saved_s

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - a stage has many equal layers, which simulations ask for again and again
    def pieces(self, work: LayerWork) -> tuple[PieceCost, ...]:
        """Divide `seconds` among the layer's pieces; see `block_pieces`. A single piece includes its collectives.

        Where a pass stops behind a piece, gradients of the piece's own weights hide nothing of its collective, and all
        of it is left for other work.
        """
        total, num_of_layer = self.seconds(work), num_pieces(work.layer.kind)
        if num_of_layer == 1:
            return (PieceCost(total, 0.0),)
        if not total:
            return (PieceCost(0.0, 0.0),) * num_of_layer
        compute = self.block_compute(work)
        if work.tp == 1:
            return pieces_of(compute, {})
        nbytes = round(self.tp_traffic * work.load.tokens * work.layer.hidden * self.element_bytes)
        beside = self.compute_beside(work)
        collectives = piece_collectives(self, nbytes, work.tp, work.direction, beside, work.split)
        if self._folds_experts(work.layer):
            collectives = {piece: cost for piece, cost in collectives.items() if piece in _OF_MIXER[work.direction]}
        return pieces_of(compute, collectives)

    def block_compute(self, work: LayerWork) -> list[float]:
        """Return the seconds that each piece of a block computes, collectives of its tensor-parallel group left out."""
        layer, tp, load, direction = work.layer, work.tp, work.load, work.direction
        if direction == "backward":
            weight_grad, input_grad = analytic.needed_gradients(layer, work.input_grad)
            passes = self._backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
        else:
            passes = tuple((gemm, 1) for gemm in self._gemms(layer, load, tp))
        adapters = self._adapters(layer, tp, load, direction)
        seconds = BlockSeconds(
            gemms=[
                self._passes(gemm, times, direction) + extra
                for (gemm, times), extra in zip(passes, adapters, strict=True)
            ],
            attention=self._attention(layer, tp, load, direction),
            elementwise=self._elementwise(layer, tp, load, direction),
            launches=self._launches(layer, tp, direction),
            kv_gather=self._kv_gather(layer, tp, load),
        )
        compute = piece_compute(layer, tp, direction, seconds)
        exchange_s = self._exchange_of_experts(work)
        compute[UP] += exchange_s / 2
        compute[DOWN] += exchange_s / 2
        return compute

    def compute_beside(self, work: LayerWork) -> dict[int, ComputeBeside]:
        """Return, by piece of a block, the compute beside the collective that follows the piece."""
        gemms, direction = self._gemms(work.layer, work.load, work.tp), work.direction
        computes_weight_gradient = analytic.needed_gradients(work.layer, work.input_grad)[0]
        beside = {}
        for piece, kind in collective_kinds(direction, sp=work.split.sp).items():
            gemm = gemms[_CHUNKED_GEMMS[direction][piece]]
            gemm_s = self._gemm(gemm)
            has_gradient_beside = direction == "backward" and computes_weight_gradient and kind != "all_gather"
            after_s = gemm_s if has_gradient_beside else 0.0
            if not has_gradient_beside and self._uses_buffers(work):
                # The rank's own part travels nowhere, so its GEMM runs before the first message, or behind the last.
                after_s = gemm_s * (work.tp - 1) / work.tp
            chunk_s = gemm_s if after_s else self._chunk_of_gemm(gemm, work.split.chunks)
            beside[piece] = ComputeBeside(gemm_s, chunk_s, after_s)
        return beside

    def _chunk_of_gemm(self, gemm: Gemm, chunks: int) -> float:
        """Return the seconds of one chunk of a GEMM, with its share of what further chunks start."""
        launches_s = (chunks - 1) / chunks * CHUNK_KERNELS * self.hardware.kernel_launch_s
        return self._gemm(replace(gemm, m=-(-gemm.m // chunks))) + launches_s

    def _uses_buffers(self, work: LayerWork) -> bool:
        """Return whether a TP group's messages run beside GEMMs through user buffers."""
        return self.execution.user_buffers and work.tp > 1 and work.split.sp

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def _saved_beside_gemms(self, work: LayerWork) -> float:
        """Return by how much chunks or user buffers shorten a pass of a block; negative where they lengthen it."""
        layer, tp, direction = work.layer, work.tp, work.direction
        has_pass = direction == "forward" or work.has_gradient
        if tp == 1 or layer.kind not in REDUCED_BESIDE_WEIGHT_GRADIENT or not has_pass:
            return 0.0
        nbytes = work.load.tokens * layer.hidden * self.element_bytes
        hidden_s = []
        plain = replace(self, execution=replace(self.execution, user_buffers=False))
        for costs, split in ((self, work.split), (plain, TokenSplit(work.split.sp))):
            beside = costs.compute_beside(work._replace(split=split))
            collectives = piece_collectives(self, nbytes, tp, direction, beside, split)
            hidden_s.append(sum(collective.hidden_s for collective in collectives.values()))
        return hidden_s[0] - hidden_s[1]

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Return the bytes one rank keeps between forward and backward of `layer`; 0 if it has no backward."""
        if not (layer.trainable or input_grad):
            return 0
        if recompute and layer.offload != "none":
            return offloaded_bytes(self, self.hardware, layer, tp, load, input_grad)
        if recompute:
            return analytic.input_bytes(layer, load, self.element_bytes)
        not_needed = 0
        if not layer.trains_weights:
            joins_output = joins_attention_output(load, self.sorts_sequences)
            not_needed = analytic.weight_grad_bytes(layer, load, self.element_bytes, tp, joins_output)
        return analytic.activation_bytes(layer, load, self.element_bytes, tp, self.sorts_sequences) - not_needed

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Return the seconds of one message of `nbytes` between two ranks."""
        return self.hardware.link(same_node).seconds(nbytes)

    def posting(self) -> float:
        """Return how many seconds each end of a message keeps its rank from computing."""
        return self.hardware.post_s

    def collective(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the seconds of a collective over `group`; `nbytes` is the whole (gathered or reduced) tensor."""
        return collective_seconds(self.hardware, kind, nbytes, group)

    def all_to_all(self, on_node_bytes: int, off_node_bytes: int, group: GroupLayout) -> float:
        """Return the seconds of an all-to-all: those of the fullest rank's bytes as one message on each kind of link.

        What stays on a node and what leaves it use different links at the same time.
        """
        on_node_s = self.transfer(on_node_bytes, same_node=True) if on_node_bytes else 0.0
        off_node_s = self.transfer(off_node_bytes, same_node=False) if off_node_bytes else 0.0
        return max(on_node_s, off_node_s)

    def overlap_slowdown(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the share of a collective's seconds that compute beside it loses: that of the hardware."""
        return self.hardware.overlap_slowdown

    def cut(self) -> float:
        """Return the seconds that a pass loses each time it stops inside a layer and goes on later."""
        return self.hardware.cut_s

    def shard_copies(self, nbytes: float, kernels: int) -> float:
        """Return the seconds of copies between a sharded layer's tensors and the buffers that travel."""
        if not self.execution.copies_shards:
            return 0.0
        return nbytes / self.hardware.moved_bytes_per_s + kernels * self.hardware.kernel_launch_s

    def product(self, rows: int, columns: int, inner: int) -> float:
        """Return the seconds of a product of matrices (rows, inner) x (inner, columns)."""
        return self._gemm(Gemm(rows, columns, inner))

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of an optimizer step over `parameters` of one rank."""
        return parameters * self.execution.optimizer_bytes / self.hardware.moved_bytes_per_s

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - a cost model is small and lives as long as the planning
    def _forward(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        gemms = sum(self._gemm(gemm) for gemm in self._gemms(layer, load, tp))
        num_reduces = TP_ALL_REDUCES.get(layer.kind, (0, 0))[0] - self._folds_experts(layer)
        reduces = num_reduces * self._tp_reduce(layer, tp, load)
        elementwise = self._elementwise(layer, tp, load, "forward") + self._launches(layer, tp, "forward")
        layer_s = (
            gemms
            + self._attention(layer, tp, load, "forward")
            + elementwise
            + reduces
            + self._kv_gather(layer, tp, load)
        )
        return layer_s + self.adapter_seconds(layer, tp, load, "forward")

    def adapter_seconds(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> float:
        """Return the part of the layer's seconds that its adapters take."""
        return 0.0 if layer.lora is None else sum(self._adapters(layer, tp, load, direction))

    def _adapters(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> list[float]:
        """Return the seconds of the adapter of each GEMM, 0 for those without.

        Each adds its output to that of its linear, and in one direction the ranks exchange what A computes, or its
        gradient; inside a mixture, whose reduction sums up all, they do not.
        """
        pairs = analytic.adapter_gemms(layer, load, tp)
        if layer.lora is None:
            return [0.0] * len(pairs)
        is_backward = direction == "backward"
        seconds = []
        for linear, pair in zip_longest(analytic.gemm_linears(layer), pairs):
            adapter_s = 0.0
            if pair:
                low, out = pair
                is_row_parallel = linear.endswith(_ROW_PARALLEL)
                adapter_s = sum(map(self._gemm, pair)) * (2 if is_backward else 1)
                adapter_s += ADAPTER_KERNELS * self.hardware.kernel_launch_s
                if layer.lora.dropout:
                    adapter_s += DROPOUT_BYTES * low.m * low.k / self.hardware.moved_bytes_per_s
                adapter_s += 3 * out.m * out.n * self.element_bytes / self.hardware.moved_bytes_per_s
                of_mixer = () if layer.mixer is None else layer.mixer.linears
                is_in_mixture = isinstance(layer.mlp, MoeMlp) and linear not in of_mixer
                if is_row_parallel != is_backward and not is_in_mixture:
                    adapter_s += self.collective("all_reduce", low.m * low.n * self.element_bytes, GroupLayout(tp))
            seconds.append(adapter_s)
        return seconds

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def _backward(self, layer: LayerShape, tp: int, load: TokenLoad, input_grad: bool) -> float:
        if not (layer.trainable or input_grad):
            return 0.0
        weight_grad, input_grad = analytic.needed_gradients(layer, input_grad)
        passes = self._backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
        gemms = sum(self._passes(gemm, times, "backward") for gemm, times in passes)
        reduces = self._backward_reduces(layer, tp, load, weight_grad)
        # Backward has about twice the kernels, but starts them without Python in between.
        elementwise = self._elementwise(layer, tp, load, "backward") + self._launches(layer, tp, "backward")
        gather = self._kv_gather(layer, tp, load)
        layer_s = gemms + self._attention(layer, tp, load, "backward") + elementwise + reduces + gather
        layer_s -= self._early_gradients(layer, tp, load, input_grad)
        return layer_s + self.adapter_seconds(layer, tp, load, "backward")

    def _early_gradients(self, layer: LayerShape, tp: int, load: TokenLoad, input_grad: bool) -> float:
        """Return the seconds of a head's backward that its forward takes where it computes by chunks of tokens."""
        if layer.kind != "head" or not (layer.trainable or input_grad):
            return 0.0
        if not analytic.loss_sizes(layer, load, self.element_bytes, tp).uses_chunks:
            return 0.0
        weight_grad, input_grad = analytic.needed_gradients(layer, input_grad)
        passes = analytic.backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
        gemms = sum(self._passes(gemm, times, "backward") for gemm, times in passes)
        softmax_bytes = 2 * analytic.softmax_elements(layer, load, tp) * self.element_bytes
        return gemms + softmax_bytes / self.hardware.moved_bytes_per_s

    def _passes(self, gemm: Gemm, times: int, direction: PassDirection) -> float:
        """Return the seconds of a GEMM that a direction computes so many times, and of what it computes again."""
        again = self.execution.recomputed_gemms if direction == "backward" and times else 0.0
        return (times + again) * self._gemm(gemm)

    def _folds_experts(self, layer: LayerShape) -> bool:
        """Return whether the layer has experts that are whole on a rank, whatever the tp of its block."""
        return self.execution.folds_experts and isinstance(layer.mlp, MoeMlp)

    def _gemms(self, layer: LayerShape, load: TokenLoad, tp: int) -> tuple[Gemm, ...]:
        """Return the GEMMs of a forward, those of experts as the framework places them."""
        if not isinstance(layer.mlp, MoeMlp) or not self._folds_experts(layer):
            return analytic.gemms(layer, load, tp)
        group = ExpertGroup.of(layer.mlp, load.tokens, tp, self.execution)
        of_mlp = mlp_arithmetic(replace(layer, mlp=group.mlp)).gemms(group.tokens, group.tp)
        return (*mixer_arithmetic(layer).gemms(load.tokens, tp), *of_mlp)

    def _backward_passes(
        self, layer: LayerShape, load: TokenLoad, tp: int, *, weight_grad: bool, input_grad: bool
    ) -> tuple[tuple[Gemm, int], ...]:
        """Return each of `_gemms` with how often backward computes one of its size."""
        passes = analytic.backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
        if not isinstance(layer.mlp, MoeMlp):
            return passes
        num_of_mixer = len(mixer_arithmetic(layer).gemms(load.tokens, tp))
        again = self.execution.mixture_passes("backward") - 1
        return tuple(
            (gemm, times + again * (i >= num_of_mixer))
            for i, (gemm, (_, times)) in enumerate(zip(self._gemms(layer, load, tp), passes, strict=False))
        )

    def _exchange_of_experts(self, work: LayerWork) -> float:
        ranks_per_node, element_bytes = self.hardware.ranks_per_node, self.element_bytes
        return expert_exchange_seconds(work, self, ranks_per_node, element_bytes, self.execution)

    def _gemm(self, gemm: Gemm) -> float:
        return gemm_seconds(self.hardware, self.precision, gemm)

    def _attention(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> float:
        if layer.mixer is None:
            return 0.0
        mixer = mixer_arithmetic(layer)
        if isinstance(mixer, DeltaNetArithmetic):
            return mixer.rule_seconds(self.hardware, load, tp, direction)
        flops = mixer.num_passes * mixer.flops(load, tp)
        if not flops:
            return 0.0
        is_backward = direction == "backward"
        hardware = self.hardware
        slowdown = hardware.slowest_rank_ratio * self.execution.attention_slowdown
        peak = hardware.clock * hardware.peak_flops(self.precision) / slowdown
        if not self.execution.fused_attention:
            again = is_backward and self.execution.recomputes_attention
            return (1 + is_backward + again) * self._unfused_attention(layer, tp, load, peak)
        kernel = hardware.attention_kernel(self.execution.attention_kernel)
        keys, causal, width = mixer.mean_keys(load), mixer.attention.causal, mixer.attention.head_dim
        share = hardware.attention_efficiency * kernel.efficiency(width, keys, causal, is_backward=False)
        forward_s = flops / (peak * share)
        if not is_backward:
            return forward_s
        if not hardware.attention_backward_efficiency:
            return 2 * forward_s
        share = hardware.attention_backward_efficiency * kernel.efficiency(width, keys, causal, is_backward=True)
        heads = mixer.attention.heads // tp * load.num_sequences
        share *= self.execution.deterministic_share(heads, hardware.num_multiprocessors)
        backward_s = ATTENTION_BACKWARD_RATIO * flops / (peak * share)
        num_queries = load.tokens * mixer.attention.inner_width // tp
        moved = self.execution.deterministic_bytes(heads, hardware.num_multiprocessors, num_queries)
        backward_s += moved / hardware.moved_bytes_per_s
        return backward_s + forward_s * self.execution.recomputes_attention

    def _unfused_attention(self, layer: LayerShape, tp: int, load: TokenLoad, peak: float) -> float:
        """Return the seconds of one forward that computes whole squares of scores and keeps them in memory."""
        attention, length = layer.attention, load.max_len
        num_pairs = load.sum_sq
        if layer.kind == "resampler":
            num_pairs, length = attention_arithmetic(layer).query_key_pairs(load), layer.projector.features_per_item
        num_scores = attention.heads * num_pairs // tp
        share_of_peak = self.hardware.efficiency_at(length * attention.heads // tp, length, attention.head_dim)
        products_s = 4 * num_scores * attention.head_dim * self.hardware.clock / (peak * share_of_peak)
        moved = self.execution.score_moves() * num_scores * self.element_bytes
        return products_s + moved / self.hardware.moved_bytes_per_s

    def _elementwise(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> float:
        execution = self.execution
        elements = analytic.elementwise_elements(layer, load, tp) + execution.extra_elements(layer, load.tokens, tp)
        nbytes = elements * self.element_bytes
        if direction == "backward":
            nbytes *= 2 + execution.recomputes_elementwise
            nbytes += self.gradient_bytes * analytic.num_trained_parameters(layer, tp)
        copied = copied_elements(layer, load.tokens, tp, execution) * execution.mixture_passes(direction)
        nbytes += copied * self.element_bytes
        return nbytes / self.hardware.moved_bytes_per_s + self.activation_again(layer, tp, load, direction)

    def activation_again(self, layer: LayerShape, tp: int, load: TokenLoad, kind: ComputeKind) -> float:
        """Return the seconds by which an activation function that runs again lengthens a backward.

        Where the whole layer is recomputed it does not run a third time, so these are taken from `recompute`.
        """
        if not layer.recomputes_activation or kind == "forward":
            return 0.0
        moved_bytes = analytic.activation_function_elements(layer, load, tp) * self.element_bytes
        seconds = moved_bytes / self.hardware.moved_bytes_per_s + self.hardware.kernel_launch_s
        return seconds if kind == "backward" else -seconds

    def mlp_chunk_sums(self, layer: LayerShape, tp: int, load: TokenLoad, kind: ComputeKind) -> float:
        """Return the seconds by which a recomputed MLP takes longer in chunks of tokens than at once.

        Each chunk reads and writes the sums of gradients of the MLP's weights, in fp32. Other frameworks have none.
        """
        is_chunked = kind == "recompute" and layer.kind in BLOCK_KINDS and self.execution == OWN_RUNTIME
        if not is_chunked or not layer.trains_weights:
            return 0.0
        num_more = (load.tokens - 1) // MLP_CHUNK_TOKENS
        num_weights = sum(gemm.num_weights for gemm in mlp_arithmetic(layer).gemms(0, 1)) // tp
        return num_more * num_weights * 2 * BYTES_PER_GRADIENT / self.hardware.moved_bytes_per_s

    def _backward_reduces(self, layer: LayerShape, tp: int, load: TokenLoad, weight_grad: bool) -> float:
        """Return by how much the all-reduces of input gradients lengthen a backward."""
        num_reduces = TP_ALL_REDUCES.get(layer.kind, (0, 0))[1]
        if tp == 1 or not num_reduces:
            return 0.0
        reduce_s = self._tp_reduce(layer, tp, load, "backward")
        beside = REDUCED_BESIDE_WEIGHT_GRADIENT.get(layer.kind)
        if beside is None or not weight_grad:
            return (num_reduces - self._folds_experts(layer)) * reduce_s
        gemms = self._gemms(layer, load, tp)
        of_mixer = beside[: len(beside) - self._folds_experts(layer)]
        return sum(self.hardware.overlapped(reduce_s, self._gemm(gemms[i])) for i in of_mixer)

    def _launches(self, layer: LayerShape, tp: int, direction: PassDirection) -> float:
        num_kernels = FORWARD_KERNELS[layer.kind] + 2 * int(layer.post_norms) + int(layer.adds_carried)
        num_kernels += int(layer.output_scale) + _LAYER_INPUT_KERNELS * (layer.layer_input > 0)
        if isinstance(layer.mixer, Attention):
            num_kernels += 2 * int(layer.mixer.qk_norm) + int(layer.mixer.value_norm)
        if layer.kind == "projector":
            num_kernels *= 1 + layer.carried_in
        if layer.kind == "vit_block":  # blocks of a decoder are counted with rotation and gate
            attention = layer.attention
            num_kernels += _ROTATION_KERNELS * int(attention.rotary) + _GATE_KERNELS * int(layer.dense_mlp.gated)
            num_kernels += _JOINT_NORM_KERNELS * int(attention.joint_qk_norm) + _SCALE_KERNELS * int(layer.layer_scale)
        if isinstance(layer.mlp, MoeMlp):
            mlp = ExpertGroup.of(layer.mlp, 0, tp, self.execution).mlp
            num_kernels += self._mixture_kernels(mlp, direction) * self.execution.mixture_passes(direction)
        return num_kernels * self.hardware.kernel_launch_s

    def _mixture_kernels(self, mlp: MoeMlp, direction: PassDirection) -> int:
        """Return how many kernels a mixture starts beyond a dense MLP; gradients of our weights are a GEMM each."""
        execution = self.execution
        num_kernels = execution.mixture_kernels + execution.exchange_kernels * (mlp.ep > 1)
        if execution.has_gemm_per_expert or direction == "backward":
            num_kernels += 2 * mlp.held_experts
        return num_kernels

    def _kv_gather(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        """Return the seconds in which a block with fewer KV heads than ranks gathers its QKV projections."""
        if not isinstance(layer.mixer, Attention) or layer.mixer.kv_heads >= tp:
            return 0.0
        width = layer.mixer.inner_width + layer.mixer.kv_outputs
        return self.collective("all_gather", load.tokens * width * self.element_bytes, GroupLayout(tp))

    def _tp_reduce(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection = "forward") -> float:
        rows = analytic.feature_rows(layer, load) if layer.kind == "projector" else load.tokens
        if layer.kind == "context_projector":
            rows = load.num_sequences * layer.generator.context
        if layer.kind == "projector":
            rows *= 1 + layer.carried_in
        width = layer.out + layer.hidden * layer.projector.merge_linear
        if layer.kind == "head":
            rows, width = load.num_targets, layer.hidden
        if layer.kind == "resampler":
            rows, width = resampler_arithmetic.reduced_elements(layer, load, direction), 1
        if layer.kind == "merger":
            features = analytic.feature_rows(layer, load)
            rows, width = merger_arithmetic.reduced_elements(layer, features, direction), 1
        nbytes = rows * width * self.element_bytes
        if layer.kind in BLOCK_KINDS:
            nbytes = round(self.tp_traffic * nbytes)
        return self.collective("all_reduce", nbytes, GroupLayout(tp))
