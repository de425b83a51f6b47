"""How a training framework computes what a layer's shape asks for: what it fuses, and what it computes again.

The arithmetic of a layer is the same in every framework; the memory traffic around it is not. `AnalyticCosts` prices
mmtrain's own runtime by default. Other frameworks' settings are needed to compare the model with their published
step times (scripts/bench_known.py), so that constants of the hardware are not bent to explain another's software.
"""

from dataclasses import dataclass
from typing import Literal

from mmtrain.costs.block_arithmetic import mlp_arithmetic
from mmtrain.costs.cost_model import PassDirection
from mmtrain.costs.part_records import FP32_BYTES
from mmtrain.models.shapes.layer_shape import Attention
from mmtrain.models.shapes.model_shape import LayerShape

_BLOCKS = ("vit_block", "decoder_block")
_FUSED_NORM_MOVES, _FUSED_ROTATION_MOVES = 2, 2  # counted in `layer_arithmetic.elementwise_elements`
_MASK_MOVES = 0.5  # a dropout's mask has one byte for each bf16 number
# Softmax reads and writes the scores once; dropout does so too, and writes its mask. Around them, the two products
# write the scores and read them.
_SOFTMAX_MOVES, _DROPOUT_MOVES, _PRODUCT_MOVES = 2, 2 + _MASK_MOVES, 2


@dataclass(frozen=True)
class Execution:
    """What one framework does around the GEMMs of a model. "Moves" are numbers read or written for each number."""

    fused_attention: bool = True  # FlashAttention; else each head's scores pass through memory
    attention_kernel: str = ""  # one of the backends whose rates the hardware has; else the one that it assumes
    attention_slowdown: float = 1.0  # seconds of its attention kernel over those of that one
    # FlashAttention-2 adds up gradients of queries in a fixed order (`deterministic`): see `deterministic_share`.
    is_deterministic: bool = False
    dropout: bool = False  # on attention scores and on both outputs of a block
    norm_moves: int = _FUSED_NORM_MOVES
    rotation_moves: int = _FUSED_ROTATION_MOVES
    activation_extra_moves: int = 0  # of an MLP's inner numbers, beyond one kernel for the activation
    recomputed_gemms: float = 0.0  # share of a layer's GEMMs that backward computes again beside full recomputation
    recomputes_elementwise: bool = False  # the same of norms, activations and residuals
    recomputes_attention: bool = False
    # Backward computes the whole mixture again, from its router to what its experts send back.
    recomputes_mixture: bool = False
    sums_on_the_way: bool = False  # gradients that travel in bf16 are added up in bf16, by a reduce-scatter
    # Bytes per parameter of gradient norm, clipping and AdamW, in fp32. The norm reads the gradient. AdamW reads
    # gradient, weight and two moments and writes all four, the gradient since it clips it on the way.
    optimizer_bytes: int = 4 * (1 + 4 + 4)
    overlaps_shards: bool = True  # FSDP gathers and reduces a layer while it computes the next
    reduces_once: bool = False  # FSDP adds up whole gradients, and only the last microbatch's backward reduces them
    copies_shards: bool = True  # FSDP2 copies out of and into buffers; FSDP1 keeps a layer's weights in one flat buffer
    tp_traffic: float = 1.0  # bytes of a block's tensor-parallel collectives over those of Megatron-LM
    # With sequence parallelism, gathers and reduce-scatters of a TP group go round its ranks in parts, each beside the
    # GEMM of another part (Transformer Engine's user buffers, `tp_comm_overlap` of Megatron-LM and NeMo).
    user_buffers: bool = False
    gradient_bytes: int = 0  # per parameter and microbatch, where a kernel of its own adds gradients up
    # The GEMM of a weight's gradient adds it to an fp32 sum: it reads and writes the sum behind its arithmetic.
    fuses_gradients: bool = False
    # How often a token travels to its experts: once to each rank or each node that holds any (DeepEP's kernels inside
    # and between nodes), or once for each expert (the all-to-all of Megatron-core).
    sends_rows: Literal["ranks", "nodes", "copies"] = "ranks"
    # Experts are whole on the ranks of a group that is folded over tp x dp, each with its share of the TP group's
    # tokens (Megatron-core with `expert-tensor-parallel-size` 1). No tokens are gathered before such a mixture.
    folds_experts: bool = False
    # One kernel makes copies of rows for experts or sums them, and the weight of a copy enters the kernel of the
    # activation (Megatron-core's `moe-permute-fusion`). Ours sort copies by their rows before they sum them.
    fuses_copies: bool = False
    # Kernels of a mixture's forward that a dense block has not, those of its GEMMs left out; and of its exchange.
    mixture_kernels: int = 45
    exchange_kernels: int = 25
    # Outputs and gradients of experts are one GEMM for each expert, on streams of their own (Transformer Engine's
    # grouped linears on Hopper), where ours are one grouped GEMM.
    has_gemm_per_expert: bool = False

    def extra_elements(self, layer: LayerShape, tokens: int, tp: int) -> float:
        """Return how many numbers a forward of `layer` moves more than with everything fused, on one of `tp` ranks."""
        if layer.kind not in _BLOCKS:
            return 0.0
        whole = 2 * (self.norm_moves - _FUSED_NORM_MOVES) + 2 * _MASK_MOVES * self.dropout
        mixer, ffn, rotated = layer.mixer, mlp_arithmetic(layer).inner_width, 0
        if isinstance(mixer, Attention):
            rotated = (mixer.heads + mixer.kv_heads) * mixer.head_dim * int(mixer.rotates)
        split = rotated * (self.rotation_moves - _FUSED_ROTATION_MOVES) + ffn * self.activation_extra_moves
        return tokens * (whole * layer.hidden + split / tp)

    def mixture_passes(self, direction: PassDirection) -> int:
        """Return how many forwards of a mixture a pass is as long as, in what a backward takes as long as a forward."""
        return 1 + (self.recomputes_mixture and direction == "backward")

    def deterministic_share(self, heads: int, multiprocessors: int) -> float:
        """Return the share of a fused backward's rate that is left where its order is fixed, for heads of all samples.

        Only so many blocks of threads run for a head that every multiprocessor has one, and all are equally long. The
        last wave leaves the rest of the GPU idle (`gridDimx` in csrc/flash_attn/src/flash_bwd_launch_template.h of
        Dao-AILab/flash-attention). For 32 heads of 8,192 tokens on an H100 it is 0.61 of 290 TFLOP/s. Measured are 166
        (#1893 there).
        """
        blocks = self._blocks_per_head(heads, multiprocessors) * heads
        if not blocks:
            return 1.0
        return blocks / (-(-blocks // multiprocessors) * multiprocessors)

    def deterministic_bytes(self, heads: int, multiprocessors: int, query_elements: int) -> int:
        """Return the bytes by which fixed order lets a fused backward move more, for queries of so many numbers.

        Each block of a head has a gradient of all queries of its own, in fp32 (`dq_accum` in csrc/flash_attn/
        flash_api.cpp). These are zeroed before, and read when they are added up.
        """
        num_more = max(self._blocks_per_head(heads, multiprocessors) - 1, 0)
        return num_more * 2 * FP32_BYTES * query_elements

    def _blocks_per_head(self, heads: int, multiprocessors: int) -> int:
        """Return into how many blocks of threads a backward in fixed order divides a head's keys; 0: in no order."""
        if not (self.is_deterministic and self.fused_attention and heads):
            return 0
        return -(-multiprocessors // heads)

    def score_moves(self) -> float:
        """Return how often attention without fusion moves its scores in forward."""
        return _PRODUCT_MOVES + _SOFTMAX_MOVES + _DROPOUT_MOVES * self.dropout


OWN_RUNTIME = Execution(fuses_gradients=True)
