"""Stand-ins for the functions of FlashAttention and torch, with their true signatures and conventions, for any device.

Each computes what its original is documented to compute, and refuses what it refuses. So a wrong name, a positional
argument in a wrong place, or another library's sign for "no window" fails here as it would on a GPU.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor


class AuxRequest(NamedTuple):
    """As in `torch.nn.attention.varlen`."""

    lse: bool = False


class Ends(NamedTuple):
    """Where sequences of queries and of keys start and end, and the longest of each."""

    q: Tensor
    k: Tensor
    max_q: int
    max_k: int


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Ends, scale: float | None, before: int | None, behind: int | None
) -> Tensor:
    """Let each token see `before` tokens before it and `behind` tokens behind it; None: all."""
    assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]} features are not aligned"
    for cu_seqlens, longest, rows in ((ends.q, ends.max_q, q), (ends.k, ends.max_k, k)):
        assert cu_seqlens.dtype == torch.int32
        assert int(cu_seqlens[-1]) == len(rows)
        assert longest == int(cu_seqlens.diff().max())
    assert len(ends.q) == len(ends.k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    bounds = (cu_seqlens.tolist() for cu_seqlens in (ends.q[:-1], ends.q[1:], ends.k[:-1], ends.k[1:]))
    for start, stop, first_key, last_key in zip(*bounds, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[first_key:last_key]) * scale
        distance = torch.arange(stop - start)[:, None] - torch.arange(last_key - first_key)
        if before is not None:
            scores = scores.masked_fill(distance > before, float("-inf"))
        if behind is not None:
            scores = scores.masked_fill(-distance > behind, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first_key:last_key]))
    return torch.cat(outputs)


def _sides(window_size: tuple[int, int], causal: bool) -> tuple[int | None, int | None]:
    """Read a window in which -1 stands for no limit."""
    before, behind = (None if side < 0 else side for side in window_size)
    return before, 0 if causal else behind


def varlen_attn_2_10(  # docs.pytorch.org/docs/2.10
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    return _attend(query, key, value, Ends(cu_seq_q, cu_seq_k, max_q, max_k), None, *_sides((-1, -1), is_causal))


def varlen_attn_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: AuxRequest | None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    return _attend(query, key, value, Ends(cu_seq_q, cu_seq_k, max_q, max_k), scale, *_sides(window_size, causal=False))


def varlen_attn_2_12(  # and 2.13
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: AuxRequest | None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    assert enable_gqa or query.shape[1] == key.shape[1], "try setting enable_gqa=True"
    assert cu_seq_k is not None
    return _attend(query, key, value, Ends(cu_seq_q, cu_seq_k, max_q, max_k), scale, *_sides(window_size, causal=False))


def flash_attn_2_8(  # flash-attn 2.8.3, flash_attn/flash_attn_interface.py
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:  # fmt: skip
    ends = Ends(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dropout_p == 0.0
    return _attend(q, k, v, ends, softmax_scale, *_sides(window_size, causal))


def flash_attn_3(  # hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 01afd16
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    ends = Ends(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert qv is None
    return _attend(q, k, v, ends, softmax_scale, *_sides(window_size, causal))


def flash_attn_3_of_2024(  # of its first releases, which return the log-sum-exp unasked
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ends = Ends(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend(q, k, v, ends, softmax_scale, *_sides(window_size, causal)), torch.zeros(q.shape[1::-1])


def flash_attn_4(  # flash-attn-4 4.0.0b36, flash_attn/cute/interface.py
    q: Any, k: Any, v: Any, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None, softmax_scale: Any = None,
    causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
    aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None, seqlen_k_per_split: Any = None,
    disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert qv is None
    assert causal or not 96 < q.shape[-1] <= 112, "MLIRError: failed to partition input with tiled_mma"
    ends = Ends(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    before, behind = window_size  # one side of -1 is no sign for "no limit" here
    if before is not None and behind is not None and before < 0 and behind < 0:
        before, behind = None, None
    return _attend(q, k, v, ends, softmax_scale, before, 0 if causal else behind), None


INTERFACES: dict[str, tuple[str, str, Callable[..., Any]]] = {  # case -> backend, module, stand-in
    "torch 2.11": ("varlen", "torch.nn.attention.varlen", varlen_attn_2_11),
    "torch 2.12": ("varlen", "torch.nn.attention.varlen", varlen_attn_2_12),
    "flash-attn 2.8": ("flash_attn", "flash_attn", flash_attn_2_8),
    "FlashAttention-3": ("flash_attn_3", "flash_attn_interface", flash_attn_3),
    "FlashAttention-3 of 2024": ("flash_attn_3", "flash_attn_interface", flash_attn_3_of_2024),
    "flash-attn-4 4.0.0b36": ("flash_attn_4", "flash_attn.cute", flash_attn_4),
}


def install(monkeypatch: pytest.MonkeyPatch, *cases: str) -> None:
    """Put the stand-ins in place of what Python would import, and hide what is installed of the others but torch."""
    for _, module_name, _ in INTERFACES.values():
        if not module_name.startswith("torch."):
            monkeypatch.setitem(sys.modules, module_name, None)  # type: ignore[arg-type]  # importing it fails
    for case in cases:
        backend, module_name, function = INTERFACES[case]
        module = ModuleType(module_name)
        setattr(module, "varlen_attn" if backend == "varlen" else "flash_attn_varlen_func", function)
        monkeypatch.setitem(sys.modules, module_name, module)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let torch report a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU of sm_{capability[0]}{capability[1]}")
