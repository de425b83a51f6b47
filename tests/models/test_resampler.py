"""A resampler computes what torch's own attention computes for each item alone, and so do its gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.stage.resampler import Resampler
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.stage_module import StageModule
from tests.models.factory import LLM, RESAMPLED, VISION, clips, images, settings, stage

WIDTH = VISION["hidden"]
MERGED = {"downsample": "identity", "merge": 1}
PLAIN: dict[str, Any] = MERGED | {"projector": {"kind": "resampler", "queries": 5, "bias": False}}
NORMED: dict[str, Any] = RESAMPLED | {"post_norm": False, "projector": RESAMPLED["projector"] | {"norm": True}}
RMS: dict[str, Any] = MERGED | {"norm": "rms", "projector": RESAMPLED["projector"]}
WINDOWS: dict[str, Any] = MERGED | {"positions": "rotary", "window": 2, "projector": RESAMPLED["projector"]}
EQUAL, UNEQUAL, REPEATED = ((2, 4), (2, 4)), ((2, 4), (4, 4), (6, 2)), ((4, 4), (2, 2), (4, 4), (3, 5))


def _attention(layer: Resampler) -> nn.MultiheadAttention:
    """Return torch's attention with the weights of a resampler."""
    has_bias = layer.linear_q.bias is not None
    attention = nn.MultiheadAttention(WIDTH, WIDTH // layer.head_dim, bias=has_bias)
    for name in ("weight", "bias") if has_bias else ("weight",):
        query, both = getattr(layer.linear_q, name), getattr(layer.linear_kv, name)
        keys, values = both.unflatten(0, (-1, 2, layer.head_dim)).unbind(1)
        joined = torch.cat((query, keys.flatten(0, 1), values.flatten(0, 1)))
        getattr(attention, f"in_proj_{name}").data = joined.detach().clone()
        getattr(attention.out_proj, name).data = getattr(layer.linear_proj, name).detach().clone()
    return attention


def _norm(norm: Any, rows: Tensor) -> Tensor:
    if norm.bias is None:
        return F.rms_norm(rows, (WIDTH,), norm.weight, norm.eps)
    return F.layer_norm(rows, (WIDTH,), norm.weight, norm.bias, norm.eps)


def _expected(layer: Resampler, hidden: Tensor, lengths: list[int], num_dropped: int) -> tuple[Tensor, nn.Module]:
    """Return the features of all items, each computed alone, and the attention that computed them."""
    attention, features = _attention(layer), []
    for item in torch.split(hidden, lengths):
        tokens = item[num_dropped:]
        for norm in (layer.post_norm, layer.norm):
            tokens = tokens if norm is None else _norm(norm, tokens)
        queries = _norm(layer.query_norm, layer.queries)
        attended = attention(queries, tokens, tokens, need_weights=False)[0]
        features.append(F.linear(_norm(layer.output_norm, attended), layer.linear.weight, layer.linear.bias))
    return torch.cat(features), attention


def _randomized(model: Any, unit: str) -> tuple[StageModule, Resampler]:
    """Return the last stage with weights that are all other than 0 and 1."""
    module = stage(model, unit, layers=(3, 4))
    layer = module.layers["3"]
    assert isinstance(layer, Resampler)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in layer.parameters():
            param += 0.3 * torch.randn(param.shape, generator=generator)
    return module, layer


def _compare(module: StageModule, layer: Resampler, inputs: EncoderInput, lengths: list[int], num_dropped: int) -> None:
    hidden = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected, attention = _expected(layer, hidden, lengths, num_dropped)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    shared = [
        p for name, p in layer.named_parameters() if name.split(".")[0] not in ("linear_q", "linear_kv", "linear_proj")
    ]
    want = torch.autograd.grad((expected * weights).sum(), [hidden, *shared, *attention.parameters()])
    features = module(hidden, inputs)
    assert features.shape == (len(lengths) * 5, LLM["hidden"])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    (features * weights).sum().backward()
    assert hidden.grad is not None
    of_attention = _gradients_of_attention(layer)
    got = [hidden.grad, *[p.grad for p in shared], *[of_attention[name] for name, _ in attention.named_parameters()]]
    for real, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(real, wanted, rtol=1e-3, atol=1e-4)


def _gradients_of_attention(layer: Resampler) -> dict[str, Tensor]:
    """Return the gradients of the linears by the names of torch's attention."""
    gradients = {}
    for name in ("weight", "bias") if layer.linear_q.bias is not None else ("weight",):
        keys, values = getattr(layer.linear_kv, name).grad.unflatten(0, (-1, 2, layer.head_dim)).unbind(1)
        parts = (getattr(layer.linear_q, name).grad, keys.flatten(0, 1), values.flatten(0, 1))
        gradients[f"in_proj_{name}"] = torch.cat(parts)
        gradients[f"out_proj.{name}"] = getattr(layer.linear_proj, name).grad
    return gradients


@pytest.mark.parametrize("sides", [EQUAL, UNEQUAL, REPEATED], ids=["equal", "unequal", "some equal"])
@pytest.mark.parametrize(
    "vision", [PLAIN, RESAMPLED, NORMED, RMS], ids=["plain", "class token", "norm of tokens", "rms norms"]
)
def test_every_image_is_attended_to_alone(vision: dict[str, Any], sides: tuple[tuple[int, int], ...]) -> None:
    module, layer = _randomized(settings(vision=vision), "vision")
    num_dropped = int(vision.get("class_token", False))
    _compare(module, layer, images(*sides), [rows * cols + num_dropped for rows, cols in sides], num_dropped)


def test_clips_of_any_length_become_as_many_features() -> None:
    audio = {"downsample": 1, "projector": {"kind": "resampler", "queries": 5}}
    module, layer = _randomized(settings(audio=audio), "audio")
    _compare(module, layer, clips(12, 4, 20), [6, 2, 10], num_dropped=0)


def test_windows_do_not_change_what_belongs_to_an_image() -> None:
    """Blocks with windows leave the tokens of an image in another order, which attention over all of them ignores."""
    model = settings(vision=WINDOWS)
    features = stage(model, "vision")(None, images(*UNEQUAL))
    alone = [stage(model, "vision")(None, images_of(i)) for i in range(len(UNEQUAL))]
    torch.testing.assert_close(features, torch.cat(alone), rtol=1e-4, atol=1e-5)


def images_of(number: int) -> EncoderInput:
    """Return one of the images alone."""
    every, areas = images(*UNEQUAL), [rows * cols for rows, cols in UNEQUAL]
    assert every.cells is not None
    return EncoderInput(*((side,) for side in UNEQUAL[number]), torch.split(every.cells, areas)[number])


def test_without_items_every_parameter_has_a_gradient_of_zero() -> None:
    module = stage(settings(vision=RESAMPLED), "vision")
    features = module(None, images())
    assert features.shape == (0, LLM["hidden"])
    features.sum().backward()
    for name, param in module.layers["3"].named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name
