"""Attention inside packed sequences behind one function, with several backends.

Tokens of many sequences lie one after another, (T, heads, d) without padding; attention is block-diagonal. Heads of
k and v may be fewer than those of q (grouped-query attention).
"""

import importlib.util
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.errors import UserError

if TYPE_CHECKING:
    from mmtrain.models.kv_cache import KVCache

AttentionBackend = Literal["flash_attn", "varlen", "sdpa", "reference"]
RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each (T, 1, d / 2)

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedSequences:
    """How the tokens of a microbatch are packed, for every block of a stage."""

    lengths: tuple[int, ...]  # tokens of each sequence
    rope: RotaryTables | None = None  # rotary positions, where the model has them
    kv_cache: "KVCache | None" = None  # of the sequences' earlier tokens, while an answer is written
    qkv_format: ClassVar[str] = "thd"  # what Megatron-core calls packed tokens; it looks for this attribute

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    def padded(self, rows: int) -> "PackedSequences":
        """The same with `rows` tokens of padding at the end, a sequence that the others do not see."""
        if not rows:
            return self
        # Rotated by zeros the padding attends to itself evenly; nobody looks at what comes out.
        rope = None if self.rope is None else tuple(F.pad(table, (0, 0, 0, 0, 0, rows)) for table in self.rope)
        return PackedSequences((*self.lengths, rows), rope, self.kv_cache)  # type: ignore[arg-type]  # still a pair


def rotary_tables(
    lengths: tuple[int, ...],
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    device: torch.device,
    starts: tuple[int, ...] | None = None,
) -> RotaryTables:
    """Cosines and sines of rotary positions that start at 0, or at `starts`, in each sequence (arXiv 2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    spans = [(start, start + n) for start, n in zip(starts or (0,) * len(lengths), lengths, strict=True)]
    longest = torch.arange(max((stop for _, stop in spans), default=0), dtype=torch.float32)
    whole = torch.outer(longest, frequencies)
    angles = torch.cat([whole[start:stop] for start, stop in spans] or [longest.new_empty(0, head_dim // 2)])
    return tuple(f(angles).unsqueeze(1).to(device, dtype) for f in (torch.cos, torch.sin))  # type: ignore[return-value]


def apply_rotary(x: Tensor, rope: RotaryTables) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) of each head by its position's angle, paired as in Llama."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool, backend: AttentionBackend
) -> Tensor:
    """Attend inside each of the packed sequences, scores scaled by `1 / sqrt(d)`.

    q (T, heads, d), k and v (T, kv_heads, d), `sum(lengths) == T` -> (T, heads, d). Lengths are ordinary integers so
    that no backend has to wait for the device to learn them.
    """
    assert sum(lengths) == q.shape[0], f"lengths sum to {sum(lengths)}, but there are {q.shape[0]} tokens"
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum()) * 0  # nothing to do, but the gradients of k and v must exist
    lengths = tuple(n for n in lengths if n)
    match backend:
        case "reference":
            return _reference(q, k, v, lengths, causal)
        case "sdpa":
            return _sdpa(q, k, v, lengths, causal)
        case "varlen":
            return _varlen(q, k, v, lengths, causal)
        case "flash_attn":
            return _flash_attn(q, k, v, lengths, causal)


def choose_backend(
    backend: Literal["auto"] | AttentionBackend, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Return the backend to use for `train.attention: backend`; `auto` takes the fastest that works here.

    Raises UserError if the named backend does not work on this device with this dtype.
    """
    found = backend_problems(device, dtype)
    usable = [name for name, problem in found.items() if problem is None]
    if backend == "auto":
        return usable[0]
    if backend not in usable:
        raise UserError(
            f"train.attention: {backend} cannot be used here: {found[backend]}. "
            f"Usable on this machine: auto, {', '.join(usable)}."
        )
    return backend


def backend_problems(device: torch.device, dtype: torch.dtype) -> dict[AttentionBackend, str | None]:
    """Every backend, the fastest first, with what keeps it from computing in `dtype` on this device, if anything."""
    return {
        "flash_attn": _flash_attn_problem(device, dtype),
        "varlen": _varlen_problem(device, dtype),
        "sdpa": None,
        "reference": None,
    }


def _half_on_cuda_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this run uses `{device.type}`"
    if dtype not in _HALF:
        return f"it computes in bf16 or fp16, and this run in {str(dtype).removeprefix('torch.')}"
    return None


def _flash_attn_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if problem := _half_on_cuda_problem(device, dtype):
        return problem
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install 'mmtrain[cuda]')"
    return None


def _varlen_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if problem := _half_on_cuda_problem(device, dtype):
        return problem
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    from torch.nn.attention.varlen import varlen_attn

    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"in torch {torch.__version__} it is not yet causal by window, nor grouped-query"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs an Ampere GPU or newer, and this is a {torch.cuda.get_device_name(device)}"
    return None


def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Softmax over explicitly masked scores of all tokens with all tokens; the oracle for the others."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence = torch.arange(len(lengths), device=q.device).repeat_interleave(
        torch.tensor(lengths, device=q.device), output_size=q.shape[0]
    )
    allowed = sequence[:, None] == sequence[None, :]
    if causal:
        allowed = allowed.tril()
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """One call of torch's dense kernel per distinct length: nothing is padded, nothing masked.

    Padding unequal lengths into one masked call was measured slower on a CPU, forward and backward together.
    """
    layout = _by_length(lengths, q.device)
    if layout.order is not None:
        q, k, v = (x.index_select(0, layout.order) for x in (q, k, v))
    sizes = [n * count for n, count in layout.buckets]
    split = zip(*(torch.split(x, sizes) for x in (q, k, v)), strict=True)
    parts = [_sdpa_bucket(q, k, v, num, causal) for (_, num), (q, k, v) in zip(layout.buckets, split, strict=True)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if layout.back is None else out.index_select(0, layout.back)


def _sdpa_bucket(q: Tensor, k: Tensor, v: Tensor, num: int, causal: bool) -> Tensor:
    """Attend inside `num` sequences of equal length, packed one after another."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.view(num, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Buckets:
    """Sequences sorted by length."""

    buckets: tuple[tuple[int, int], ...]  # (length, number of sequences)
    order: Tensor | None  # (T,) token that comes to each place; None if the tokens may stay where they are
    back: Tensor | None  # (T,) the inverse


@lru_cache(maxsize=64)  # the blocks of a stage ask for the same microbatch one after another
def _by_length(lengths: tuple[int, ...], device: torch.device) -> _Buckets:
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
    buckets = tuple((n, len(list(same))) for n, same in itertools.groupby(lengths[i] for i in by_length))
    if len(buckets) == 1 or len(buckets) == len(lengths):
        in_place = buckets if len(buckets) == 1 else tuple((n, 1) for n in lengths)
        return _Buckets(in_place, None, None)
    starts = (0, *itertools.accumulate(lengths))
    order = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in by_length])
    return _Buckets(buckets, order.to(device), torch.argsort(order).to(device))


@lru_cache(maxsize=64)
def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where each sequence starts, and where the last one ends: (S + 1,) int32."""
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32).to(device, non_blocking=True)


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(lengths, q.device), max(lengths)
    out = varlen_attn(
        q, k, v, ends, ends, longest, longest,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    ends, longest = _ends(lengths, q.device), max(lengths)
    out: Tensor = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=causal)
    return out
