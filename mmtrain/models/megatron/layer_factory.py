"""Building blocks made of Megatron-core's tensor-parallel layers, for tokens packed as (T, features).

Every weight that tensor parallelism splits carries Megatron-core's own marks: `tensor_model_parallel`,
`partition_dim`, and `partition_stride` (2 for a gated MLP's first linear, whose local rows are the gate's shard
followed by the up-projection's shard).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from mmtrain.models.attention import AttentionBackend, PackedSequences, apply_rotary, attend
from mmtrain.models.megatron.parallel_groups import ParallelGroups, tp_group_scope
from mmtrain.models.model_shape import LayerShape


def quick_gelu(x: Tensor) -> Tensor:
    """Approximate GELU as OpenAI's CLIP does: `x * sigmoid(1.702 x)`."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


class Norm(nn.Module):
    """RMSNorm without bias, or LayerNorm with bias, as the config's `normalization` says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class PackedAttention(nn.Module):
    """Core attention over packed sequences, in the place of Megatron-core's, which refuses them without CUDA."""

    def __init__(self, backend: AttentionBackend, causal: bool) -> None:
        super().__init__()
        self.backend = backend
        self.causal = causal

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, *, packed_seq_params: PackedSequences, **_: object
    ) -> Tensor:
        """Attend inside each sequence: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d)."""
        if packed_seq_params.rope is not None:
            q, k = apply_rotary(q, packed_seq_params.rope), apply_rotary(k, packed_seq_params.rope)
        if packed_seq_params.kv_cache is not None:
            return packed_seq_params.kv_cache.attend(self, q, k, v, packed_seq_params.lengths, self.backend)
        return attend(q, k, v, packed_seq_params.lengths, self.causal, self.backend)


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron-core has no types
    """Linear with split outputs whose bias also trains while its weight is frozen."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, bias: Tensor | None, **kwargs: Any) -> Tensor:
        if bias is None or weight.requires_grad:
            out: Tensor = super()._forward_impl(input, weight, *args, bias=bias, **kwargs)
            return out
        # Megatron-core's product with a frozen weight hands its bias no gradient.
        return cast(Tensor, super()._forward_impl(input, weight, *args, bias=None, **kwargs)) + bias


class GroupedAttention(SelfAttention):  # type: ignore[misc]  # Megatron-core has no types
    """Self-attention that also runs on more tensor-parallel ranks than there are KV heads.

    Every rank always holds an equal share of the rows [q heads, k, v] x KV heads of `linear_qkv`. Where a KV head is
    spread over ranks, they join what they projected, and each takes its queries and the keys and values those need.
    Megatron-core does the same, but only over its global process group.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Project (T, 1, hidden) to queries (T, 1, heads, d) and keys and values (T, 1, kv heads, d) of this rank."""
        kv_heads, tp = self.config.num_query_groups, self.world_size
        if kv_heads >= tp:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        whole = all_gather_last_dim_from_tensor_parallel_region(self.linear_qkv(hidden_states)[0], group=self.tp_group)
        kv_head, part = divmod(self.tp_group.rank(), tp // kv_heads)
        heads = whole.unflatten(-1, (kv_heads, -1, self.hidden_size_per_attention_head))[:, :, kv_head]
        num_queries = self.config.num_attention_heads // tp
        return heads.narrow(2, part * num_queries, num_queries), heads[:, :, -2:-1], heads[:, :, -1:]


class PackedTransformerBlock(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types
    """One pre-norm transformer block on packed tokens."""

    def forward(self, hidden: Tensor, packing: PackedSequences) -> Tensor:
        """Map (T, hidden) to (T, hidden)."""
        if hidden.shape[0] == 0:
            # Megatron-core cannot reshape nothing. A row whose result is dropped gives every weight a zero gradient.
            padded: Tensor = self(F.pad(hidden, (0, 0, 0, 1)), PackedSequences((1,)))
            return padded[:0]
        # Megatron-core wants (sequence, batch, hidden): one sequence that holds all the packed ones.
        out: Tensor = super().forward(hidden.unsqueeze(1), packed_seq_params=packing)[0]
        return out.squeeze(1)


@dataclass(frozen=True)
class LayerFactory:
    """Builds the parts of one unit. `block` is the shape of the unit's transformer blocks.

    Under sequence parallelism (arXiv 2205.05198) blocks and head read and hand on each rank's slice of the tokens.
    Weights that see only such a slice are marked `sequence_parallel`: their gradients must be summed over the ranks.
    """

    block: LayerShape
    activation: str
    norm_eps: float
    groups: ParallelGroups
    dtype: torch.dtype
    attention: AttentionBackend
    sequence_parallel: bool

    @cached_property
    def config(self) -> TransformerConfig:
        """Megatron-core's view of the unit. Weights are created on the CPU, uninitialised."""
        shape = self.block
        return TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.ffn,
            gated_linear_unit=shape.gated,
            activation_func=ACTIVATIONS[self.activation],
            normalization="RMSNorm" if shape.rms_norm else "LayerNorm",
            layernorm_epsilon=self.norm_eps,
            add_bias_linear=shape.linear_bias,
            add_qkv_bias=shape.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=self.groups.tp_size,
            params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            use_cpu_initialization=True,
            perform_initialization=False,
            # Fusions need Transformer Engine, Apex or a compiler's warm-up; on a CPU they cost more than they save.
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            cuda_graph_scope=[],
        )

    @cached_property
    def sequence_parallel_config(self) -> TransformerConfig:
        """The same for parts that work on slices of the tokens, where the unit does."""
        return replace(self.config, sequence_parallel=self.sequence_parallel)

    def scatter_tokens(self, hidden: Tensor) -> Tensor:
        """Take this rank's slice of tokens (T, width), zeros added where T does not divide; at least a row each."""
        padded = F.pad(hidden, (0, 0, 0, self.num_padding_rows(len(hidden))))
        mine: Tensor = scatter_to_sequence_parallel_region(padded, group=self.groups.tp)
        return mine

    def gather_tokens(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Join all ranks' slices to the `num_tokens` tokens they came from. Each rank brings the same gradient."""
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.groups.tp
        )
        return whole[:num_tokens]

    def num_padding_rows(self, num_tokens: int) -> int:
        """Rows that `scatter_tokens` adds."""
        tp = self.groups.tp_size
        return -num_tokens % tp if num_tokens else tp

    @cached_property
    def collection(self) -> ProcessGroupCollection:
        """The unit's groups for Megatron-core."""
        return self.groups.collection()

    def transformer_block(self) -> nn.Module:
        """One block (`PackedTransformerBlock`): attention and MLP with residual connections."""
        norm = Norm

        def qkv(*args: Any, bias: bool, **kwargs: Any) -> nn.Module:
            # Megatron-core gives qkv a bias whenever the other linears have one; ours is a setting of its own.
            return cast(nn.Module, ColumnLinear(*args, bias=self.block.qkv_bias, **kwargs))

        def core(**_: object) -> nn.Module:
            return PackedAttention(self.attention, self.block.causal)

        spec = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=GroupedAttention,
                params={"attn_mask_type": AttnMaskType.causal if self.block.causal else AttnMaskType.no_mask},
                submodules=SelfAttentionSubmodules(linear_qkv=qkv, core_attention=core, linear_proj=RowParallelLinear),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                params={"ffn_hidden_size": self.block.ffn},
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        )
        layer = PackedTransformerBlock(self.sequence_parallel_config, spec, pg_collection=self.collection)
        _mark(layer.self_attention.linear_qkv, dim=0)
        _mark(layer.self_attention.linear_proj, dim=1)
        _mark(layer.mlp.linear_fc1, dim=0, stride=2 if self.block.gated else 1)
        _mark(layer.mlp.linear_fc2, dim=1)
        return cast(nn.Module, layer)

    def norm(self, width: int, sliced: bool = False) -> Norm:
        """The unit's kind of norm over `width` features; `sliced` where blocks hand it their tokens."""
        return Norm(self.sequence_parallel_config if sliced else self.config, width, self.norm_eps)

    def column_linear(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Linear whose outputs are split over the tensor-parallel ranks; returns `(output, None)`."""
        linear = ColumnLinear(inputs, outputs, config=self.config, init_method=None, bias=bias, tp_group=self.groups.tp)
        return _mark(linear, dim=0)

    def row_linear(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Linear whose inputs are split over the tensor-parallel ranks; returns `(output, None)`."""
        linear = RowParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=None,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.groups.tp,
        )
        return _mark(linear, dim=1)

    def vocab_embedding(self, rows: int, width: int) -> nn.Module:
        """Embedding whose rows are split over the tensor-parallel ranks."""
        table = VocabParallelEmbedding(rows, width, init_method=None, config=self.config, tp_group=self.groups.tp)
        return _mark(table, dim=0)

    def vocab_linear(self, width: int, rows: int, own_weight: bool) -> nn.Module:
        """Projection to the split vocabulary; without `own_weight` it takes `weight=` when called."""
        linear = ColumnParallelLinear(
            width,
            rows,
            config=self.sequence_parallel_config,
            init_method=None,
            bias=False,
            skip_weight_param_allocation=not own_weight,
            tp_group=self.groups.tp,
        )
        return _mark(linear, dim=0) if own_weight else linear

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of logits (T, vocab / tp) at labels (T,), in fp32; may overwrite the logits.

        A label outside the vocabulary (-100) yields a finite value that the caller must drop.
        """
        with tp_group_scope(self.groups):
            losses: Tensor = vocab_parallel_cross_entropy(logits, labels)
        return losses

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """Join logits (T, vocab / tp) of all tensor-parallel ranks to (T, vocab)."""
        whole: Tensor = gather_from_tensor_model_parallel_region(logits, group=self.groups.tp)
        return whole

    def greedy_tokens(self, logits: Tensor, limit: int) -> Tensor:
        """Id of the largest of logits (T, vocab / tp) below id `limit`, on all ranks alike: (T,) int64.

        Of equal ones the lowest id is taken. Two numbers a token travel, not the vocabulary.
        """
        first = self.groups.tp_rank * logits.shape[1]
        padding = torch.arange(first, first + logits.shape[1], device=logits.device) >= limit
        best, ids = logits.float().masked_fill(padding, float("-inf")).max(dim=-1)  # the first of equals
        if self.groups.tp_size == 1:
            return ids
        found = torch.stack((best.double(), (ids + first).double()))
        everyone = [torch.empty_like(found) for _ in range(self.groups.tp_size)]
        dist.all_gather(everyone, found, group=self.groups.tp)
        values, candidates = torch.stack(everyone, dim=1)
        tokens: Tensor = candidates.gather(0, values.argmax(dim=0, keepdim=True))[0].long()
        return tokens


def _mark(module: nn.Module, dim: int, stride: int = 1) -> nn.Module:
    """Mark the weight as split along `dim`, and the bias too if the outputs are split.

    Megatron-core does so only when it initialises weights itself. A bias after split inputs is whole on every rank.
    """
    marked = [module.weight] if dim == 1 else [module.weight, getattr(module, "bias", None)]
    for param in marked:
        if isinstance(param, nn.Parameter):
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = dim  # type: ignore[attr-defined]
            param.partition_stride = stride  # type: ignore[attr-defined]
    return module
