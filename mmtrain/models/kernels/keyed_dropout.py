"""Dropout whose masks depend on the token, the feature and the linear alone, and a linear behind it.

Every number of a mask is a hash of what it belongs to, so a rank that holds some tokens or some features drops what one
process would drop there, and a forward that runs again drops the same. The hash is the finalizer of SplitMix64 (Steele
et al., OOPSLA 2014) over a sum of two 64-bit keys: that of the token, in this step, and that of the linear and four
neighboring features, which get 16 bits each.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FEATURES_PER_HASH = 4  # features that share a hash
_LEVELS = 1 << 16  # values of 16 bits
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's own
_SHIFTS = (30, 27, 31)
_CHUNK_ELEMENTS = 1 << 24  # whose hashes and dropped copies, a few hundred MB, exist at once


@dataclass(frozen=True)
class KeyedDropout:
    """Which inputs of one linear are dropped: of this rank, those from `first_feature` on."""

    probability: float
    linear_key: int
    first_feature: int = 0

    @property
    def threshold(self) -> int:
        """Return how many of the 65536 values of a hash drop an input."""
        return round(self.probability * _LEVELS)

    def kept(self, token_keys: Tensor, num_features: int) -> Tensor:
        """Return which inputs of tokens are kept: (T, num_features).

        token_keys: (T,) int64, see `token_keys`.
        """
        first, stop = self.first_feature, self.first_feature + num_features
        groups = torch.arange(first // _FEATURES_PER_HASH, -(-stop // _FEATURES_PER_HASH), device=token_keys.device)
        of_features = _mixed(groups * _as_signed(_STEP) + _as_signed(self.linear_key))
        numbers = _mixed(token_keys.unsqueeze(1) + of_features).view(torch.int16)
        offset = first % _FEATURES_PER_HASH
        return numbers[:, offset : offset + num_features] >= self.threshold - _LEVELS // 2

    def apply(self, rows: Tensor, kept: Tensor) -> Tensor:
        """Return the kept numbers of rows, scaled so that the expected value stays, and zeros for the others."""
        return (rows * kept).mul_(_LEVELS / max(1, _LEVELS - self.threshold))


class DropsInputs(Protocol):
    """What drops inputs, such as an adapter, and must be told which tokens its rows are."""

    token_keys: Tensor | None


class HoldsDropping(Protocol):
    """A layer that tells what it holds which tokens their rows are."""

    dropping: Sequence[DropsInputs]


@contextmanager
def with_token_keys(dropping: Sequence[DropsInputs], keys: Tensor | None) -> Iterator[None]:
    """Say which tokens the rows are that `dropping` compute inside the context.

    keys: (T,) int64 of all tokens, also where ranks shard them; None: nothing is dropped.
    """
    before = [each.token_keys for each in dropping]
    for each in dropping:
        each.token_keys = keys
    try:
        yield
    finally:
        for each, earlier in zip(dropping, before, strict=True):
            each.token_keys = earlier


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key of what the parts name, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def token_keys(sequence_keys: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the key of each token of packed sequences, (T,), from those of the sequences and the token's place."""
    of_sequences = np.asarray(sequence_keys, dtype=np.uint64)
    counts = np.asarray(lengths, dtype=np.int64)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    keys = np.repeat(of_sequences, counts) + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, 1), strict=True):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys.view(np.int64)


def dropped_linear(x: Tensor, weight: Tensor, token_keys: Tensor, dropout: KeyedDropout) -> Tensor:
    """Compute (..., outputs) of (..., inputs), some of which are dropped; rows of x in order are tokens.

    Autograd keeps x itself and neither the mask nor what is left of x: backward makes both again.
    """
    out = _DroppedLinear.apply(x, weight, token_keys, dropout)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _DroppedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keys: Tensor, dropout: KeyedDropout) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.keys, ctx.dropout = keys, dropout
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(rows), len(weight))
        for chunk in _chunks(*rows.shape):
            kept = dropout.kept(keys[chunk], rows.shape[1])
            out[chunk] = F.linear(dropout.apply(rows[chunk], kept), weight)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        x_grad = torch.empty_like(rows) if needs_x else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for chunk in _chunks(*rows.shape):
            kept = ctx.dropout.kept(ctx.keys[chunk], rows.shape[1])
            if weight_grad is not None:
                weight_grad += grads[chunk].t() @ ctx.dropout.apply(rows[chunk], kept)
            if x_grad is not None:
                x_grad[chunk] = ctx.dropout.apply(grads[chunk] @ weight, kept)
        of_x = None if x_grad is None else x_grad.view_as(x)
        return of_x, None if weight_grad is None else weight_grad.to(weight.dtype), None, None


def _chunks(num_rows: int, num_features: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // num_features)
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


def _mixed(keys: Tensor) -> Tensor:
    """Return the keys (int64, overwritten), each of whose bits now depends on all."""
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, 1), strict=True):
        keys ^= (keys >> shift) & ((1 << (64 - shift)) - 1)  # torch shifts in the sign
        if factor != 1:
            keys *= _as_signed(factor)
    return keys


def _as_signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
