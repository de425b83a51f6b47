"""The gated delta rule over packed samples, with its convolution and gated norm (arXiv 2412.06464), in plain torch.

A head keeps a state S (key width, value width), which is 0 before the first token of every sample. A token with query
q, key k, value v, decay exp(g) <= 1 and rate b changes it and reads it:

    S <- exp(g) S;   S <- S + b k (v - k S);   output q S

Inside a chunk the corrections v - k S of all tokens solve a triangular system, so that a chunk is a few matrix products
and the state passes from chunk to chunk alone. Everything is computed in fp32.

Backward computes a mixer's forward again from what the first linear made, some heads at a time: all that lies between
that and the output is many times as large.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.attention.sample_chunks import SampleChunks
from mmtrain.models.shapes.layer_shape import DELTA_HEAD_TOKENS

_NORM_EPS = 1e-6  # of the lengths of queries and keys


class DeltaWeights(NamedTuple):
    """The parameters between the linears of a mixer, of G key heads, each of which serves `ratio` value heads."""

    taps: Tensor  # (G, convolved width, taps): the last one is the token's own
    decay_log: Tensor  # (G, ratio): a head forgets the faster, the larger it is
    step_bias: Tensor  # (G, ratio)
    norm: Tensor  # (value width,), the same for all heads

    def of_heads(self, heads: slice) -> "DeltaWeights":
        """Return the parameters of some key heads."""
        return DeltaWeights(self.taps[heads], self.decay_log[heads], self.step_bias[heads], self.norm)


@dataclass(frozen=True)
class DeltaWidths:
    """What the first linear makes of a token for one key head: query, key, values, gates, and two numbers a value head.

    The convolution runs over the first three.
    """

    key: int
    value: int
    ratio: int  # value heads of a key head
    norm_eps: float

    @property
    def convolved(self) -> int:
        """Return the features that the convolution runs over."""
        return 2 * self.key + self.ratio * self.value

    @property
    def outputs(self) -> int:
        """Return the features of the mixer's output."""
        return self.ratio * self.value

    @property
    def inputs(self) -> int:
        """Return the features that the first linear makes."""
        return self.convolved + self.outputs + 2 * self.ratio


class _Heads(NamedTuple):
    """What the rule reads of T tokens, in fp32."""

    queries: Tensor  # (T, G, key)
    keys: Tensor  # (T, G, key)
    values: Tensor  # (T, G, ratio, value)
    decays: Tensor  # (T, G, ratio), logarithms
    rates: Tensor  # (T, G, ratio)


def mix_samples(x: Tensor, weights: DeltaWeights, widths: DeltaWidths, chunks: SampleChunks) -> Tensor:
    """Mix the tokens of each sample: (T, G, inputs) to (T, G, outputs)."""
    if not len(x):
        nothing = torch.stack([parameter.sum() for parameter in weights]).sum() * 0  # gives parameters a gradient
        return x[..., : widths.outputs] + nothing
    out: Tensor = _Mixed.apply(x, widths, chunks, *weights)  # type: ignore[no-untyped-call]
    return out


def mix_and_keep_state(
    x: Tensor, weights: DeltaWeights, widths: DeltaWidths, chunks: SampleChunks
) -> tuple[Tensor, Tensor]:
    """Return what `mix_samples` does, and the states behind the samples, (S, G, ratio, key, value), in their chunks'
    order.
    """
    heads = _heads(_convolve(x[..., : widths.convolved].float(), weights.taps, chunks.places), x, weights, widths)
    out, states = _apply_rule(heads, chunks)
    return _gated_norm(out, x, weights, widths), states


def mix_next_token(
    x: Tensor, window: Tensor, state: Tensor, weights: DeltaWeights, widths: DeltaWidths
) -> tuple[Tensor, Tensor]:
    """Mix one more token of each sample, (S, G, inputs); return (S, G, outputs), and the states behind it.

    window: what the convolution reads, (S, taps, G, convolved width), of the token and those before it.
    state: (S, G, ratio, key, value).
    """
    convolved = torch.einsum("stgc,gct->sgc", window.float(), weights.taps.float())
    heads = _heads(convolved, x, weights, widths)
    state = state * heads.decays.exp()[..., None, None]
    keys = heads.keys[:, :, None, :, None]
    corrections = heads.values - (state * keys).sum(dim=-2)
    state = state + keys * (heads.rates[..., None] * corrections)[..., None, :]
    out = (state * heads.queries[:, :, None, :, None]).sum(dim=-2)
    return _gated_norm(out, x, weights, widths), state


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: DeltaWidths, chunks: SampleChunks, *parameters: Tensor) -> Tensor:
        weights = DeltaWeights(*parameters)
        ctx.save_for_backward(x, *weights)
        ctx.widths, ctx.chunks = widths, chunks
        out = x.new_empty(*x.shape[:2], widths.outputs)
        for heads in _heads_at_once(x, widths):
            out[:, heads] = mix_and_keep_state(x[:, heads], weights.of_heads(heads), widths, chunks)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        weights, needs = DeltaWeights(*parameters), (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        grads = [
            torch.zeros_like(tensor) if needed else None for tensor, needed in zip((x, *weights), needs, strict=True)
        ]
        for heads in _heads_at_once(x, ctx.widths):
            parts = (x[:, heads], *weights.of_heads(heads))
            leaves = [part.detach().requires_grad_(needed) for part, needed in zip(parts, needs, strict=True)]
            with torch.enable_grad():
                out, _ = mix_and_keep_state(leaves[0], DeltaWeights(*leaves[1:]), ctx.widths, ctx.chunks)
            of_parts = iter(
                torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], out_grad[:, heads])
            )
            of_all = [None if grad is None else next(of_parts) for grad in grads]
            for grad, of_part, name in zip(grads, of_all, ("x", *DeltaWeights._fields), strict=True):
                if grad is not None and of_part is not None:
                    _place(grad, of_part, name, heads)
        return (grads[0], None, None, *grads[1:])


def _place(grad: Tensor, of_part: Tensor, name: str, heads: slice) -> None:
    """Write the gradient of some heads' part of a tensor into that of all; the norm's is a sum over heads."""
    if name == "norm":
        grad += of_part
    elif name == "x":
        grad[:, heads] = of_part
    else:
        grad[heads] = of_part


def _heads_at_once(x: Tensor, widths: DeltaWidths) -> list[slice]:
    """Return the key heads that are computed together."""
    num_tokens, num_heads = x.shape[:2]
    number = max(1, DELTA_HEAD_TOKENS // max(num_tokens * widths.ratio, 1))
    return [slice(first, min(first + number, num_heads)) for first in range(0, num_heads, number)]


def _convolve(x: Tensor, taps: Tensor, places: Tensor) -> Tensor:
    """Sum each token (T, G, width) and the ones before it in its sample, weighted by `taps`."""
    taps = taps.float()
    num_taps = taps.shape[-1]
    out = x * taps[..., -1]
    for back in range(1, min(num_taps, len(x))):
        in_sample = (places[back:] >= back)[:, None, None]
        earlier = torch.where(in_sample, x[:-back] * taps[..., -1 - back], 0.0)
        out = out + F.pad(earlier, (0, 0, 0, 0, back, 0))
    return out


def _heads(convolved: Tensor, x: Tensor, weights: DeltaWeights, widths: DeltaWidths) -> _Heads:
    """Make what the rule reads of the convolution's sums and of the two numbers of each value head."""
    activated = F.silu(convolved)
    queries, keys, values = torch.split(activated, [widths.key, widths.key, widths.outputs], dim=-1)
    rates, steps = torch.split(x[..., -2 * widths.ratio :].float(), widths.ratio, dim=-1)
    steps = F.softplus(steps + weights.step_bias.float())
    return _Heads(
        _of_length_one(queries) * widths.key**-0.5,
        _of_length_one(keys),
        values.reshape(*values.shape[:-1], widths.ratio, widths.value),
        -weights.decay_log.float().exp() * steps,
        rates.sigmoid(),
    )


def _of_length_one(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


def _gated_norm(out: Tensor, x: Tensor, weights: DeltaWeights, widths: DeltaWidths) -> Tensor:
    """Normalize each value head of (T, G, ratio, value), and multiply it by its gate: (T, G, outputs), as `x`."""
    gates = x[..., widths.convolved : widths.convolved + widths.outputs].float().reshape(out.shape)
    normalized = out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + widths.norm_eps)
    return (normalized * weights.norm.float() * F.silu(gates)).flatten(-2).to(x.dtype)


def _apply_rule(heads: _Heads, chunks: SampleChunks) -> tuple[Tensor, Tensor]:
    """Apply the rule to T tokens: (T, G, ratio, value), and the states behind all samples, in their chunks' order."""
    queries = _to_chunks(heads.queries, chunks).movedim(1, 2).unsqueeze(2)  # (N, G, 1, C, key)
    keys = _to_chunks(heads.keys, chunks).movedim(1, 2).unsqueeze(2)
    values = _to_chunks(heads.values, chunks).movedim(1, 3)  # (N, G, ratio, C, value)
    rates = _to_chunks(heads.rates, chunks).movedim(1, 3).unsqueeze(-1)
    since_start = _to_chunks(heads.decays, chunks).movedim(1, 3).cumsum(dim=-1)  # (N, G, ratio, C)
    is_later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=keys.device).triu(1)
    between = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(is_later, float("-inf")).exp()
    kept = since_start.exp().unsqueeze(-1)
    # Row t: what the corrections of earlier tokens of the chunk take from that of token t.
    system = rates * (keys @ keys.mT) * between
    known = torch.cat((rates * values, rates * kept * keys), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    corrections, by_state = torch.split(solved, [values.shape[-1], keys.shape[-1]], dim=-1)
    scores = (queries @ keys.mT) * between
    reading = queries * kept
    writing = keys * (since_start[..., -1:] - since_start).exp().unsqueeze(-1)
    left = kept[..., -1:, :]  # of a state behind the chunk
    outputs, finals = [], []
    state = values.new_zeros(chunks.num_samples[0], *values.shape[1:3], keys.shape[-1], values.shape[-1])
    for step in _steps(corrections, by_state, reading, scores, writing, left, numbers=chunks.num_samples):
        corrections, by_state, reading, scores, writing, left = step
        number = len(left)
        if number < len(state):  # some samples end before this step
            state, final = torch.split(state, [number, len(state) - number])
            finals.append(final)
        corrected = corrections - by_state @ state
        outputs.append(reading @ state + scores @ corrected)
        state = state * left + writing.mT @ corrected
    out = torch.cat(outputs).movedim(3, 1).flatten(0, 1).index_select(0, chunks.slots)
    return out, torch.cat((state, *reversed(finals)))


def _steps(*tensors: Tensor, numbers: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the chunks of each step, of tensors (N, ...).

    They are split at once: the gradient of a slice would be as large as all chunks, and added up once for each step.
    """
    return zip(*(torch.split(tensor, list(numbers)) for tensor in tensors), strict=True)


def _to_chunks(tensor: Tensor, chunks: SampleChunks) -> Tensor:
    """Lay rows (T, ...) in their chunks: (N, C, ...), with zeros behind a sample's end."""
    rows = tensor.new_zeros(chunks.num_chunks * chunks.size, *tensor.shape[1:])
    return rows.index_copy(0, chunks.slots, tensor).view(-1, chunks.size, *tensor.shape[1:])
