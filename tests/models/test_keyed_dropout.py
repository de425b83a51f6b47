"""Masks of dropout: how often they drop what, what they depend on, and the linear behind them."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.kernels import keyed_dropout
from mmtrain.models.kernels.keyed_dropout import KeyedDropout, dropped_linear, key_of, token_keys

LENGTHS = (300, 1, 211)
TOKENS, FEATURES = sum(LENGTHS), 96


def _keys(step: int = 0) -> Tensor:
    return torch.from_numpy(token_keys([key_of(7, step, "llm", sample) for sample in (5, 9, 2)], LENGTHS))


def _kept(probability: float, linear: str = "linear_fc1", step: int = 0) -> Tensor:
    return KeyedDropout(probability, key_of("llm.layers.3", linear)).kept(_keys(step), FEATURES)


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_as_many_inputs_are_dropped_as_asked_for_in_every_token_and_feature(probability: float) -> None:
    dropped = (~_kept(probability)).double()
    deviation = (probability * (1 - probability)) ** 0.5
    for mean, count in (
        (dropped.mean(), dropped.numel()),
        (dropped.mean(dim=0), TOKENS),
        (dropped.mean(dim=1), FEATURES),
    ):
        assert float((mean - probability).abs().max()) < 4.5 * deviation / count**0.5
    # In binomial draws the counts vary by p (1 - p): neither more nor less.
    for sums, count in ((dropped.sum(dim=0), TOKENS), (dropped.sum(dim=1), FEATURES)):
        assert float(sums.var()) == pytest.approx(count * deviation**2, rel=0.6)


def test_masks_of_neighbors_other_steps_and_other_linears_are_independent() -> None:
    kept = _kept(0.5).double() * 2 - 1
    others = {
        "next token": (kept[1:], kept[:-1]),
        "next feature": (kept[:, 1:], kept[:, :-1]),
        "same place in the next hash": (kept[:, 4:], kept[:, :-4]),
        "next step": (kept, _kept(0.5, step=1).double() * 2 - 1),
        "other linear": (kept, _kept(0.5, "linear_fc2").double() * 2 - 1),
        "other sample": (kept[:200], kept[301:501]),
    }
    for name, (one, other) in others.items():
        assert abs(float((one * other).mean())) < 4.5 / one.numel() ** 0.5, name


def test_a_mask_depends_on_the_keys_of_tokens_and_the_number_of_the_feature_alone() -> None:
    whole = _kept(0.3)
    order = torch.randperm(TOKENS)
    dropout = KeyedDropout(0.3, key_of("llm.layers.3", "linear_fc1"))
    assert torch.equal(dropout.kept(_keys()[order], FEATURES), whole[order])
    for first, count in ((0, 48), (48, 48), (30, 7), (5, 91), (93, 3)):
        shard = KeyedDropout(0.3, dropout.linear_key, first)
        assert torch.equal(shard.kept(_keys(), count), whole[:, first : first + count])
    alone = token_keys([key_of(7, 0, "llm", 9)], [1])
    assert np.array_equal(alone, _keys().numpy()[300:301])
    assert len(set(_keys().tolist())) == TOKENS


def test_keys_name_their_parts_apart() -> None:
    assert key_of(1, 23) != key_of(12, 3)
    assert key_of("llm.layers.1", "a") == 3097373771357300125  # on every machine, in every version


@pytest.mark.parametrize("chunk_elements", [1 << 24, 10 * FEATURES, 1])
@pytest.mark.parametrize("shape", [(TOKENS, FEATURES), (TOKENS, 1, FEATURES)])
def test_the_linear_behind_it_has_the_gradients_of_a_masked_product(
    chunk_elements: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(5, FEATURES, requires_grad=True)
    dropout = KeyedDropout(0.25, 1)
    mask = (dropout.kept(_keys(), FEATURES) / 0.75).view(shape)
    expected = F.linear(x * mask, weight)
    expected.square().sum().backward()
    gradients = x.grad, weight.grad
    x.grad = weight.grad = None
    with patch.object(keyed_dropout, "_CHUNK_ELEMENTS", chunk_elements):
        out = dropped_linear(x, weight, _keys(), dropout)
        out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip((x.grad, weight.grad), gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-3)


def test_no_tokens_have_no_outputs_and_gradients_of_zero() -> None:
    x, weight = torch.randn(0, FEATURES, requires_grad=True), torch.randn(5, FEATURES, requires_grad=True)
    out = dropped_linear(x, weight, _keys()[:0], KeyedDropout(0.25, 1))
    assert out.shape == (0, 5)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_autograd_keeps_the_input_itself_and_nothing_of_its_size() -> None:
    x, weight = torch.randn(TOKENS, FEATURES), torch.randn(5, FEATURES, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda t: t):
        dropped_linear(x, weight, _keys(), KeyedDropout(0.25, 1))
    assert kept == [x.data_ptr(), weight.data_ptr()]


def test_expected_values_stay() -> None:
    rows = torch.ones(TOKENS, FEATURES)
    for probability, step in itertools.product((0.1, 0.5), range(3)):
        dropout = KeyedDropout(probability, key_of(step))
        mean = float(dropout.apply(rows, dropout.kept(_keys(step), FEATURES)).mean())
        assert mean == pytest.approx(1, abs=4.5 * (probability / (1 - probability) / rows.numel()) ** 0.5)
