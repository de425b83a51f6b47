"""Attention over packed sequences: one function, `attend`, and several backends that compute it.

The tokens of many sequences lie one after another as (T, heads, d), without padding; attention is block-diagonal.
k and v may have fewer heads than q (grouped-query attention). Under a causal mask, spans of tokens (those of an image)
may see each other in both directions. `backends` chooses one for a device; `reference` is the definition of them all.
"""

from mmtrain.models.attention.backends import (
    attend,
    attend_to_context,
    backend_problems,
    choose_backend,
    prepare_attention,
)
from mmtrain.models.attention.fused import FUSED_KERNELS, padded_head_dim
from mmtrain.models.attention.options import AttentionBackend, AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout, Spans

__all__ = [
    "FUSED_KERNELS",
    "AttentionBackend",
    "AttentionOptions",
    "SequenceLayout",
    "Spans",
    "attend",
    "attend_to_context",
    "backend_problems",
    "choose_backend",
    "padded_head_dim",
    "prepare_attention",
]
