"""`AnalyticCosts`: a roofline model of a layer's GEMMs, element-wise work and kernel launches."""

from dataclasses import dataclass
from functools import lru_cache

from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.block_pieces import BlockSeconds, PassDirection, block_pieces
from mmtrain.costs.cost_model import CollectiveKind, ComputeKind, PieceCost, TokenLoad
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.layer_arithmetic import Gemm
from mmtrain.models.model_shape import LayerShape, adaptable_linears, num_pieces

_ROTATION_KERNELS, _GATE_KERNELS, _JOINT_NORM_KERNELS, _SCALE_KERNELS = 6, 2, 14, 2  # what they add to a block
# Kernels of one forward: GEMMs, norms, rotary, attention, activation, residual adds, bias and layout changes.
FORWARD_KERNELS = {
    "patch_embed": 6,
    "audio_embed": 18,
    "vit_block": 22,
    "decoder_block": 30,
    "projector": 10,
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
_ROW_PARALLEL = ("linear_proj", "linear_fc2", "linear_2", "linear")  # linears that split their inputs
ADAPTER_KERNELS = 4  # of one adapter in forward: two GEMMs, the scale, the addition
# All-reduces that tensor parallelism adds to forward, and to the input gradients of backward (Megatron-LM, arXiv
# 1909.08053). Layers of a U-Net are not split.
TP_ALL_REDUCES = {
    "patch_embed": (0, 0),
    "audio_embed": (0, 0),
    "vit_block": (2, 2),
    "decoder_block": (2, 2),
    "projector": (1, 1),
    "embedding": (1, 0),
    "head": (0, 1),
    "dit_block": (3, 3),
    "context_projector": (0, 1),  # the gradient of the context, to which all blocks add
}

# Bytes per parameter that the gradient norm, clipping and AdamW read and write, in fp32. The norm reads the gradient.
# AdamW reads gradient, weight and two moments and writes all four, the gradient since it clips it on the way.
OPTIMIZER_BYTES_PER_PARAMETER = 4 * (1 + 4 + 4)


@dataclass(frozen=True)
class AnalyticCosts:
    """A `CostModel` that needs nothing but a hardware preset."""

    hardware: Hardware
    precision: Precision

    @property
    def source(self) -> str:
        """Name of the preset, marked as modelled: nothing was measured on the machine that will run."""
        return f"modelled: {self.hardware.name}"

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return ELEMENT_BYTES[self.precision]

    def seconds(
        self, layer: LayerShape, tp: int, load: TokenLoad, kind: ComputeKind, *, input_grad: bool = True
    ) -> float:
        """Return the seconds one rank of `tp` spends on `layer`, tensor-parallel collectives included.

        `backward` excludes `recompute`, which costs a forward. A load without tokens costs nothing.
        """
        if load.tokens == 0:
            return 0.0
        if kind == "backward":
            return self._backward(layer, tp, load, input_grad)
        return self._forward(layer, tp, load)

    def pieces(
        self,
        layer: LayerShape,
        tp: int,
        load: TokenLoad,
        kind: ComputeKind,
        *,
        input_grad: bool = True,
        sp: bool = False,
    ) -> tuple[PieceCost, ...]:
        """Divide `seconds` among the layer's pieces; see `block_pieces`. A single piece includes its collectives."""
        total = self.seconds(layer, tp, load, kind, input_grad=input_grad)
        if num_pieces(layer.kind) == 1:
            return (PieceCost(total, 0.0),)
        if not total:
            return (PieceCost(0.0, 0.0),) * num_pieces(layer.kind)
        direction: PassDirection = "backward" if kind == "backward" else "forward"
        if direction == "backward":
            weight_grad, input_grad = analytic.needed_gradients(layer, input_grad)
            passes = analytic.backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
            cost_factor, num_reduces = 2, TP_ALL_REDUCES[layer.kind][1]
        else:
            passes = tuple((gemm, 1) for gemm in analytic.gemms(layer, load, tp))
            cost_factor, num_reduces = 1, TP_ALL_REDUCES[layer.kind][0]
        adapters = self._adapters(layer, tp, load, direction)
        seconds = BlockSeconds(
            gemms=[times * self._gemm(gemm) + extra for (gemm, times), extra in zip(passes, adapters, strict=True)],
            attention=cost_factor * self._attention(layer, tp, load),
            elementwise=cost_factor * self._elementwise(layer, tp, load),
            launches=self._launches(layer),
            kv_gather=self._kv_gather(layer, tp, load),
            all_reduces=num_reduces * self._tp_reduce(layer, tp, load),
        )
        return block_pieces(layer, tp, direction, seconds, sp=sp)

    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Return the bytes one rank keeps between forward and backward of `layer`; 0 if it has no backward."""
        if not (layer.trainable or input_grad):
            return 0
        if recompute:
            return analytic.input_bytes(layer, load, self.element_bytes)
        not_needed = 0 if layer.trains_weights else analytic.weight_grad_bytes(layer, load, self.element_bytes, tp)
        return analytic.activation_bytes(layer, load, self.element_bytes, tp) - not_needed

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Return the seconds of one message of `nbytes` between two ranks."""
        return self.hardware.link(same_node).seconds(nbytes)

    def posting(self) -> float:
        """Return how many seconds each end of a message keeps its rank from computing."""
        return self.hardware.post_s

    def collective(self, kind: CollectiveKind, nbytes: int, size: int, same_node: bool) -> float:
        """Return the seconds of a ring collective over `size` ranks on the whole (gathered or reduced) tensor."""
        if size == 1:
            return 0.0
        link = self.hardware.link(same_node)
        if kind == "broadcast":
            return link.seconds(nbytes)
        rounds = (size - 1) * (2 if kind == "all_reduce" else 1)
        return rounds * link.seconds(nbytes / size)

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of an optimizer step over `parameters` of one rank."""
        return parameters * OPTIMIZER_BYTES_PER_PARAMETER / self.hardware.memory_bytes_per_s

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - a cost model is small and lives as long as the planning
    def _forward(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        gemms = sum(self._gemm(gemm) for gemm in analytic.gemms(layer, load, tp))
        reduces = TP_ALL_REDUCES.get(layer.kind, (0, 0))[0] * self._tp_reduce(layer, tp, load)
        elementwise = self._elementwise(layer, tp, load) + self._launches(layer)
        layer_s = gemms + self._attention(layer, tp, load) + elementwise + reduces + self._kv_gather(layer, tp, load)
        return layer_s + self.adapter_seconds(layer, tp, load, "forward")

    def adapter_seconds(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> float:
        """Return the part of the layer's seconds that its adapters take."""
        return 0.0 if layer.lora is None else sum(self._adapters(layer, tp, load, direction))

    def _adapters(self, layer: LayerShape, tp: int, load: TokenLoad, direction: PassDirection) -> list[float]:
        """Return the seconds of the adapter of each GEMM, 0 for those without.

        Each adds its output to that of its linear, and in one direction the ranks exchange what A computes, or its
        gradient.
        """
        pairs = analytic.adapter_gemms(layer, load, tp)
        if layer.lora is None:
            return [0.0] * len(pairs)
        is_backward = direction == "backward"
        seconds = []
        for linear, pair in zip(adaptable_linears(layer), pairs, strict=True):
            adapter_s = 0.0
            if pair:
                low, out = pair
                is_row_parallel = linear.endswith(_ROW_PARALLEL)
                adapter_s = sum(map(self._gemm, pair)) * (2 if is_backward else 1)
                adapter_s += ADAPTER_KERNELS * self.hardware.kernel_launch_s
                adapter_s += 3 * out.m * out.n * self.element_bytes / self.hardware.memory_bytes_per_s
                if is_row_parallel != is_backward:
                    adapter_s += self.collective("all_reduce", low.m * low.n * self.element_bytes, tp, same_node=True)
            seconds.append(adapter_s)
        return seconds

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def _backward(self, layer: LayerShape, tp: int, load: TokenLoad, input_grad: bool) -> float:
        if not (layer.trainable or input_grad):
            return 0.0
        weight_grad, input_grad = analytic.needed_gradients(layer, input_grad)
        passes = analytic.backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
        gemms = sum(times * self._gemm(gemm) for gemm, times in passes)
        reduces = TP_ALL_REDUCES.get(layer.kind, (0, 0))[1] * self._tp_reduce(layer, tp, load)
        # Backward has about twice the kernels, but starts them without Python in between.
        elementwise = 2 * self._elementwise(layer, tp, load) + self._launches(layer)
        gather = self._kv_gather(layer, tp, load)
        layer_s = gemms + 2 * self._attention(layer, tp, load) + elementwise + reduces + gather
        return layer_s + self.adapter_seconds(layer, tp, load, "backward")

    def _gemm(self, gemm: Gemm) -> float:
        m, n, k = gemm.m, gemm.n, gemm.k
        if m == 0:
            return 0.0
        hardware = self.hardware
        compute = gemm.flops / (hardware.peak_flops(self.precision) * hardware.efficiency_at(m, n, k))
        operands = (m * k + k * n + m * n) * self.element_bytes
        return max(compute, operands / hardware.memory_bytes_per_s)

    def _attention(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        rate = self.hardware.peak_flops(self.precision) * self.hardware.attention_efficiency
        return analytic.num_attention_passes(layer) * analytic.attention_flops(layer, load, tp) / rate

    def _elementwise(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        nbytes = analytic.elementwise_elements(layer, load, tp) * self.element_bytes
        return nbytes / self.hardware.memory_bytes_per_s

    def _launches(self, layer: LayerShape) -> float:
        num_kernels = FORWARD_KERNELS[layer.kind] + 2 * int(layer.qk_norm) + 2 * int(layer.post_norms)
        num_kernels += int(layer.adds_carried)
        if layer.kind == "projector":
            num_kernels *= 1 + layer.carried_in
        if layer.kind == "vit_block":  # blocks of a decoder are counted with rotation and gate
            num_kernels += _ROTATION_KERNELS * int(layer.rotary) + _GATE_KERNELS * int(layer.gated)
            num_kernels += _JOINT_NORM_KERNELS * int(layer.joint_qk_norm) + _SCALE_KERNELS * int(layer.layer_scale)
        return num_kernels * self.hardware.kernel_launch_s

    def _kv_gather(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        """Return the seconds in which a block with fewer KV heads than ranks gathers its QKV projections."""
        if layer.kv_heads >= tp or not layer.kv_heads:
            return 0.0
        width = (layer.heads + 2 * layer.kv_heads) * layer.head_dim
        return self.collective("all_gather", load.tokens * width * self.element_bytes, tp, same_node=True)

    def _tp_reduce(self, layer: LayerShape, tp: int, load: TokenLoad) -> float:
        rows = analytic.feature_rows(layer, load) if layer.kind == "projector" else load.tokens
        if layer.kind == "context_projector":
            rows = load.num_sequences * layer.context
        if layer.kind == "projector":
            rows *= 1 + layer.carried_in
        width = layer.out
        if layer.kind == "head":
            rows, width = load.num_targets, layer.hidden
        return self.collective("all_reduce", rows * width * self.element_bytes, tp, same_node=True)
