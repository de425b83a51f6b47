"""What ranks that share sequences exchange in a mixer, and the seconds that this adds to a block.

Sequence parallelism changes a layer's time too: less element-wise work, and more gathers of tokens.
"""

from dataclasses import dataclass, replace

from mmtrain.costs.analytic_costs import REDUCED_BESIDE_WEIGHT_GRADIENT, TP_ALL_REDUCES, gemm_seconds
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel, LayerWork, TokenLoad
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.layer_arithmetic import gemms as layer_gemms
from mmtrain.costs.layer_arithmetic import needed_gradients
from mmtrain.models.shapes.layer_shape import PROJECTOR_KINDS, GatedDeltaNet
from mmtrain.models.shapes.model_shape import BLOCK_KINDS, LayerShape

BLOCK = "decoder_block"  # the only layer of an LLM in which tokens of a sequence meet
# By kind: how many numbers norms and residuals move for a token in forward, in widths of the layer (see
# `layer_arithmetic.elementwise_elements`). Sequence parallelism divides this work among the ranks.
_DIVIDED_WIDTHS = {"vit_block": 10, "decoder_block": 10, "head": 2}
_POST_NORM_WIDTHS = 4  # of a block whose outputs of attention and MLP are normalized


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of a microbatch: `cp` TP ranks of one number, and how they attend."""

    layout: GroupLayout
    is_ring: bool  # keys and values go round; else an all-to-all gives each rank some heads of all tokens

    @classmethod
    def of_mesh(cls, tp: int, cp: int, is_ring: bool, ranks_per_node: int) -> "ContextGroup":
        """Return the group of a mesh whose ranks are numbered by tp first and by cp next."""
        return cls(GroupLayout.strided(cp, tp, ranks_per_node), is_ring)

    @property
    def cp(self) -> int:
        """The number of ranks."""
        return self.layout.size

    @property
    def on_node_share(self) -> float:
        """Of what a rank sends to all others evenly, the share that stays on its node."""
        return (self.layout.fewest_per_node - 1) / max(self.cp - 1, 1)


def context_seconds(work: LayerWork, costs: CostModel, group: ContextGroup, element_bytes: int) -> float:
    """Return the seconds that a block waits for other ranks in a pass; `work.load` is that of one rank.

    Layers in which tokens do not meet wait for nothing, and nor does a rank that shares no sequence. A block whose
    activations come back from host memory is not computed again.
    """
    layer = work.layer
    comes_back = (work.kind, layer.offload) == ("recompute", "all")
    if layer.kind != BLOCK or group.cp == 1 or not work.load.exchanged or comes_back:
        return 0.0
    seconds = _ring_seconds if group.is_ring else _all_to_all_seconds
    return seconds(work, costs, group, element_bytes)


def exchange_buffer_bytes(layer: LayerShape, tp: int, load: TokenLoad, element_bytes: int) -> int:
    """Return the bytes of buffers in which a block exchanges tokens with ranks that share its sequences.

    An all-to-all needs as much as queries, keys and values take once more. A ring needs less where keys have fewer
    heads than queries: keys and values that come, that are used, and that go. A gated DeltaNet exchanges when all is
    free that its rule makes again, which is more.
    """
    if layer.kind != BLOCK or not load.exchanged or isinstance(layer.mixer, GatedDeltaNet):
        return 0
    heads, kv_heads = _local_heads(layer, tp)
    return load.exchanged * (heads + 4 * kv_heads) * layer.attention.head_dim * element_bytes


def _local_heads(layer: LayerShape, tp: int) -> tuple[int, int]:
    """Return the query heads and the key-value heads of a TP rank; more ranks than the latter hold copies."""
    return layer.attention.heads // tp, max(layer.attention.kv_heads // tp, 1)


def _all_to_all_seconds(work: LayerWork, costs: CostModel, group: ContextGroup, element_bytes: int) -> float:
    """Return the seconds of two all-to-alls: of what a mixer reads, and of outputs; gradients take the same way."""
    row_bytes = element_bytes * work.load.exchanged * (group.cp - 1) / group.cp

    def seconds(width: int) -> float:
        nbytes = width * row_bytes
        on_node = round(nbytes * group.on_node_share)
        return costs.all_to_all(on_node, round(nbytes) - on_node, group.layout)

    return sum(map(seconds, _exchanged_widths(work.layer, work.tp, group.cp)))


def _exchanged_widths(layer: LayerShape, tp: int, cp: int) -> tuple[int, int]:
    """Return the numbers that a rank has of a token before the mixer and behind it.

    Of attention those are queries, keys and values. Where ranks are more than key-value heads, each needs a whole one.
    """
    if isinstance(layer.mixer, GatedDeltaNet):
        return layer.mixer.first_width // tp, layer.mixer.inner_width // tp
    heads, kv_heads = _local_heads(layer, tp)
    width = layer.attention.head_dim
    return (heads + 2 * max(kv_heads, cp)) * width, heads * width


def _ring_seconds(work: LayerWork, costs: CostModel, group: ContextGroup, element_bytes: int) -> float:
    """Return the seconds by which messages around the ring outlast the attention beside them.

    A forward passes keys and values on cp - 1 times, each while the rank attends to those it has. A backward passes
    them on again, with their gradients, which need one message more to come home.
    """
    kv_heads = _local_heads(work.layer, work.tp)[1]
    kv_bytes = 2 * kv_heads * work.layer.attention.head_dim * work.load.exchanged * element_bytes
    message_bytes = 2 * kv_bytes if work.kind == "backward" else kv_bytes
    same_node = group.layout.nodes == 1
    message_s = costs.transfer(message_bytes, same_node)
    beside_s = _attention_seconds(work, costs) / group.cp
    hidden_s = min(message_s, beside_s)
    lost_share = costs.overlap_slowdown("all_gather", message_bytes, group.layout)
    seconds = (group.cp - 1) * (message_s - hidden_s + lost_share * hidden_s)
    return seconds + (costs.transfer(kv_bytes, same_node) if work.kind == "backward" else 0.0)


def _attention_seconds(work: LayerWork, costs: CostModel) -> float:
    """Return what of a block's seconds grows with the square of lengths."""
    of_layer = LayerWork(work.layer, work.tp, work.load, work.kind)
    short = replace(work.load, sum_sq=work.load.num_sequences, max_len=1)
    return max(costs.seconds(of_layer) - costs.seconds(of_layer._replace(load=short)), 0.0)


def sequence_parallel_seconds(
    layer: LayerShape,
    tp: int,
    load: TokenLoad,
    costs: CostModel,
    machine: Hardware,
    precision: Precision,
    *,
    input_grad: bool = True,
) -> float:
    """Return by how many seconds sequence parallelism lengthens forward and backward of `layer`; may be negative.

    Each all-reduce around GEMMs becomes a reduce-scatter and an all-gather (Korthikanti et al., arXiv 2205.05198).
    What overlaps is what the runtime overlaps (`models.megatron.tp_linear`): in backward of a block's QKV and first MLP
    linear the reduction runs beside the GEMM of the weight's gradient, with and without sequence parallelism. The input
    is gathered once more beside the GEMM of its gradient. All other gathers and reductions wait.
    Between blocks and layers that need all tokens there is one gather: in forward before a projector, in backward
    after an embedding.
    """
    width = layer.hidden
    if layer.kind not in _DIVIDED_WIDTHS:  # at both ends, what travels beside the hidden states is gathered too
        width = max(layer.in_width, layer.out_width) if layer.kind == "embedding" else layer.in_width
    row_bytes = width * ELEMENT_BYTES[precision]
    if layer.kind in BLOCK_KINDS:
        row_bytes = round(costs.tp_traffic * row_bytes)
    nbytes = load.tokens * row_bytes
    # Without sequence parallelism the head computes only tokens with a target; its shards are of all tokens.
    whole_bytes = load.num_targets * row_bytes if layer.kind == "head" else nbytes
    gather = costs.collective("all_gather", nbytes, GroupLayout(tp))
    scatter = costs.collective("reduce_scatter", nbytes, GroupLayout(tp))
    reduce = costs.collective("all_reduce", whole_bytes, GroupLayout(tp))
    has_backward = layer.trainable or input_grad
    if layer.kind not in _DIVIDED_WIDTHS:
        return gather if layer.kind in PROJECTOR_KINDS or has_backward else 0.0
    passes = 1 + 2 * has_backward  # a backward moves twice as much as a forward
    widths = _DIVIDED_WIDTHS[layer.kind] + (_POST_NORM_WIDTHS if layer.post_norms else 0)
    moved = widths * passes * (whole_bytes - nbytes / tp)  # less than without
    moved /= costs.tp_traffic if layer.kind in BLOCK_KINDS else 1.0
    saved_s = moved / machine.moved_bytes_per_s
    weight_grad = needed_gradients(layer, input_grad)[0]
    if layer.kind == "head":  # its forward has no all-reduce
        gathers = 1 + has_backward * weight_grad
        return gathers * gather + has_backward * (scatter - reduce) - saved_s
    added_s = TP_ALL_REDUCES[layer.kind][0] * (scatter + gather - reduce)
    if has_backward:
        gemms = layer_gemms(layer, load, tp)
        for i in REDUCED_BESIDE_WEIGHT_GRADIENT[layer.kind]:
            gemm_s = gemm_seconds(machine, precision, gemms[i]) if weight_grad else 0.0
            added_s += machine.overlapped(scatter, gemm_s) + gather - machine.overlapped(reduce, gemm_s)
            # The weight's gradient needs the tokens of all ranks, which arrive beside the GEMM of the input's gradient.
            added_s += machine.overlapped(gather, gemm_s) * weight_grad
    return added_s - saved_s
