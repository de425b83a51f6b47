"""The gated delta rule over packed samples equals the recurrence and the module of `transformers`, sample by sample."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention import SequenceLayout, delta_rule
from mmtrain.models.attention.delta_rule import (
    DeltaWeights,
    DeltaWidths,
    mix_and_keep_state,
    mix_next_token,
    mix_samples,
)
from mmtrain.models.attention.sample_chunks import SampleChunks, samples_by_chunks

CPU = torch.device("cpu")
KEY_HEADS, WIDTHS, TAPS = 3, DeltaWidths(key=8, value=12, ratio=2, norm_eps=1e-6), 4
LENGTHS = [(1,), (64,), (65, 3, 200), (7, 130, 64, 2, 129, 128), (5, 0, 70, 0)]


def _weights(seed: int = 0) -> DeltaWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return DeltaWeights(
        0.5 * draw(KEY_HEADS, WIDTHS.convolved, TAPS),
        draw(KEY_HEADS, WIDTHS.ratio),
        draw(KEY_HEADS, WIDTHS.ratio),
        1 + 0.3 * draw(WIDTHS.value),
    )


def _inputs(num_tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, KEY_HEADS, WIDTHS.inputs, generator=generator)


def _chunks(lengths: tuple[int, ...]) -> SampleChunks:
    return SequenceLayout(lengths).sample_chunks(CPU)


def _recurrence(x: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Mix one sample (n, G, inputs) token by token; return the outputs, and the state behind it."""
    key, value, ratio = WIDTHS.key, WIDTHS.value, WIDTHS.ratio
    state = x.new_zeros(KEY_HEADS, ratio, key, value)
    padded = F.pad(x[..., : WIDTHS.convolved], (0, 0, 0, 0, TAPS - 1, 0))
    outputs = []
    for i in range(len(x)):
        summed = sum(padded[i + tap] * weights.taps[..., tap] for tap in range(TAPS))
        q, k, v = F.silu(summed).split((key, key, ratio * value), dim=-1)
        q, k = (vector / (vector.square().sum(-1, keepdim=True) + 1e-6).sqrt() for vector in (q, k))
        v = v.unflatten(-1, (ratio, value))
        gate, rate, step = x[i, :, WIDTHS.convolved :].split((ratio * value, ratio, ratio), dim=-1)
        decay = torch.exp(-weights.decay_log.exp() * F.softplus(step + weights.step_bias))
        state = decay[..., None, None] * state
        known = torch.einsum("grkv,gk->grv", state, k)
        state = state + torch.einsum("gk,grv->grkv", k, rate.sigmoid()[..., None] * (v - known))
        out = torch.einsum("grkv,gk->grv", state, q) / key**0.5
        normed = out / (out.square().mean(-1, keepdim=True) + WIDTHS.norm_eps).sqrt() * weights.norm
        outputs.append((normed * F.silu(gate.unflatten(-1, (ratio, value)))).flatten(-2))
    return torch.stack(outputs) if outputs else x[..., : WIDTHS.outputs], state


def _in_fp64(weights: DeltaWeights) -> DeltaWeights:
    return DeltaWeights(*(weight.double() for weight in weights))


def _error(ours: Tensor, exact: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((ours - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_compute_the_recurrence_of_each_sample(lengths: tuple[int, ...]) -> None:
    x, weights = _inputs(sum(lengths)), _weights()
    expected = torch.cat([_recurrence(sample, _in_fp64(weights))[0] for sample in x.double().split(lengths)])
    assert _error(mix_samples(x, weights, WIDTHS, _chunks(lengths)), expected) < 2e-6


@pytest.mark.parametrize("heads_at_once", [1, 3])
def test_gradients_are_those_of_the_recurrence(heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (7, 80, 64, 2)
    monkeypatch.setattr(delta_rule, "DELTA_HEAD_TOKENS", heads_at_once * sum(lengths) * WIDTHS.ratio)
    x, weights = _inputs(sum(lengths)), _weights()
    out_grad = torch.randn(sum(lengths), KEY_HEADS, WIDTHS.outputs, generator=torch.Generator().manual_seed(2))

    def gradients(packed: bool) -> tuple[Tensor, ...]:
        leaves = [(tensor if packed else tensor.double()).clone().requires_grad_() for tensor in (x, *weights)]
        own = DeltaWeights(*leaves[1:])
        if packed:
            out = mix_samples(leaves[0], own, WIDTHS, _chunks(lengths))
        else:
            out = torch.cat([_recurrence(sample, own)[0] for sample in leaves[0].split(lengths)])
        return torch.autograd.grad(out, leaves, out_grad.to(out.dtype))

    for name, ours, theirs in zip(("x", *DeltaWeights._fields), gradients(True), gradients(False), strict=True):
        assert _error(ours, theirs) < 1e-5, name


def test_frozen_weights_have_no_gradient() -> None:
    x, weights = _inputs(70).requires_grad_(), _weights()
    weights.taps.requires_grad_()
    mix_samples(x, weights, WIDTHS, _chunks((70,))).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.taps.grad is not None
    assert weights.norm.grad is None
    assert weights.decay_log.grad is None


def test_a_sample_does_not_depend_on_what_lies_before_it() -> None:
    lengths, weights = (90, 33, 150), _weights()
    x = _inputs(sum(lengths))
    mixed = mix_samples(x, weights, WIDTHS, _chunks(lengths)).split(lengths)
    changed = mix_samples(torch.cat((_inputs(90, seed=5), x[90:])), weights, WIDTHS, _chunks(lengths)).split(lengths)
    assert not torch.equal(mixed[0], changed[0])
    assert all(torch.equal(one, other) for one, other in zip(mixed[1:], changed[1:], strict=True))


def test_the_order_of_samples_changes_nothing() -> None:
    lengths, weights = (3, 129, 64), _weights()
    samples = _inputs(sum(lengths)).split(lengths)
    forwards = mix_samples(torch.cat(samples), weights, WIDTHS, _chunks(lengths)).split(lengths)
    reverse = mix_samples(torch.cat(samples[::-1]), weights, WIDTHS, _chunks(lengths[::-1])).split(lengths[::-1])
    for one, other in zip(forwards, reverse[::-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_states_behind_samples_continue_them() -> None:
    """Mix all but the last token of each sample at once, and the last one from the states."""
    lengths, weights = (66, 3, 129), _weights()
    samples = _inputs(sum(lengths)).split(lengths)
    prompts = tuple(length - 1 for length in lengths)
    _, states = mix_and_keep_state(torch.cat([s[:-1] for s in samples]), weights, WIDTHS, _chunks(prompts))
    _, order = samples_by_chunks(prompts)
    inverse = torch.argsort(torch.from_numpy(order))
    window = torch.stack([F.pad(s, (0, 0, 0, 0, TAPS, 0))[-TAPS:, :, : WIDTHS.convolved] for s in samples])
    last = torch.stack([s[-1] for s in samples])
    out, states = mix_next_token(last, window, states[inverse], weights, WIDTHS)
    for i, sample in enumerate(samples):
        expected, state = _recurrence(sample, weights)
        torch.testing.assert_close(out[i], expected[-1], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(states[i], state, rtol=1e-5, atol=2e-5)


def test_outputs_are_those_of_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

    config: Any = qwen3_5.Qwen3_5TextConfig(
        hidden_size=32, linear_num_key_heads=KEY_HEADS, linear_num_value_heads=KEY_HEADS * WIDTHS.ratio,
        linear_key_head_dim=WIDTHS.key, linear_value_head_dim=WIDTHS.value, linear_conv_kernel_dim=TAPS,
        num_hidden_layers=4,
    )  # fmt: skip
    module: Any = qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    weights = _weights()
    lengths = (70, 1, 130)
    hidden = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(3))
    key, of_values = WIDTHS.key, WIDTHS.outputs
    with torch.no_grad():
        taps = torch.cat([part.flatten(0, 1) for part in weights.taps.split((key, key, of_values), dim=1)])
        module.conv1d.weight.copy_(taps[:, None])
        module.A_log.copy_(weights.decay_log.flatten())
        module.dt_bias.copy_(weights.step_bias.flatten())
        module.norm.weight.copy_(weights.norm)
        module.out_proj.weight.copy_(torch.eye(32, KEY_HEADS * of_values))
        parts = module.in_proj_qkv(hidden).split((KEY_HEADS * key, KEY_HEADS * key, KEY_HEADS * of_values), dim=-1)
        others = (module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden))
        x = torch.cat([part.unflatten(1, (KEY_HEADS, -1)) for part in (*parts, *others)], dim=-1)
        ours = mix_samples(x, weights, WIDTHS, _chunks(lengths)).flatten(1)[:, :32]
        theirs = torch.cat([module(sample[None])[0] for sample in hidden.split(lengths)])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
