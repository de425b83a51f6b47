"""Self-attention whose linears are split over a TP group, of Megatron-core's parts."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.shapes.layer_shape import Attention


class GroupedAttention(SelfAttention):  # type: ignore[misc]  # Megatron-core has no types
    """Self-attention that also runs on more tensor-parallel ranks than there are KV heads.

    Every rank holds an equal share of the rows [q heads, their gates, k, v] x KV heads of `linear_qkv`; without v where
    values are what keys are made of. If a KV head is spread over several ranks, they gather their projections, and each
    rank takes its queries and gates, and the keys and values that these need. Megatron-core does the same, but only
    over its global process group.
    """

    def __init__(self, *args: Any, shape: Attention, **kwargs: Any) -> None:
        """Build the attention that `shape` describes."""
        super().__init__(*args, **kwargs)
        self.shape = shape

    @property
    def first_linear(self) -> nn.Module:
        """Return the linear that reads the block's normalized hidden states."""
        return cast(nn.Module, self.linear_qkv)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute of (T, 1, hidden) what `mix` reads: queries, keys and values, and gates of the output if it has any.

        Queries and gates are (T, 1, heads, d), keys and values (T, 1, kv heads, d), of this rank.
        """
        kv_heads, tp, shape = self.config.num_query_groups, self.world_size, self.shape
        if shape.reads_kv:
            own_queries = self.linear_qkv(x)[0].unflatten(-1, (-1, self.hidden_size_per_attention_head))
            return (own_queries if self.q_layernorm is None else self.q_layernorm(own_queries),)
        if kv_heads >= tp and not (shape.value_norm or shape.keys_as_values):
            is_gated = shape.output_gate
            return cast(tuple[Tensor, ...], self.get_query_key_value_tensors(x, output_gate=is_gated))
        qkv, num_queries = self.linear_qkv(x)[0], self.config.num_attention_heads // tp
        first_query = 0
        if kv_heads >= tp:
            heads = qkv.unflatten(-1, (kv_heads // tp, -1, self.hidden_size_per_attention_head))
        else:
            qkv = all_gather_last_dim_from_tensor_parallel_region(qkv, group=self.tp_group)
            kv_head, rank_in_head = divmod(self.tp_group.rank(), tp // kv_heads)
            heads = qkv.unflatten(-1, (kv_heads, -1, self.hidden_size_per_attention_head))
            heads = heads.narrow(2, kv_head, 1)
            first_query = rank_in_head * num_queries
        num_of_group = num_queries // heads.shape[2]
        queries = heads.narrow(3, first_query, num_of_group).flatten(2, 3)
        keys = heads[:, :, :, -1 if shape.keys_as_values else -2]
        values = heads[:, :, :, -1]
        if shape.value_norm:
            values = F.rms_norm(values, values.shape[-1:], None, self.config.layernorm_epsilon)
        if self.q_layernorm is not None:
            queries, keys = self.q_layernorm(queries), self.k_layernorm(keys)
        if not shape.output_gate:
            return queries, keys, values
        first_gate = self.config.num_attention_heads // kv_heads + first_query
        return queries, keys, values, heads.narrow(3, first_gate, num_of_group).flatten(2, 3)

    def mix(self, packing: PackedSequences, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Attend, and multiply what that makes by the sigmoid of the gates: (T, 1, width of this rank's heads).

        others: keys and values, unless those of an earlier block are read, and gates. Where later blocks read keys and
        values, these are the second result, side by side, (T, 2 * width of this rank's KV heads).
        """
        if self.shape.reads_kv:
            assert packing.shared_kv is not None, "the block that keeps them came before"
            k, v = packing.shared_kv.reshape(len(q), 2, -1, self.hidden_size_per_attention_head).unbind(1)
            gates = others
        else:
            k, v = (tensor.squeeze(1) for tensor in others[:2])
            gates = others[2:]
        out: Tensor = self.core_attention(q.squeeze(1), k, v, None, packed_seq_params=packing)
        out = out.reshape(len(out), 1, -1)
        if gates:
            out = out * gates[0].flatten(2).sigmoid()
        return (out, torch.cat((k.flatten(1), v.flatten(1)), dim=1)) if self.shape.keeps_kv else (out,)
