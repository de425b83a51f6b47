"""Clipping, and updates that a gradient without a finite norm prevents, decided on the device."""

import pytest
import torch
from torch import Tensor

from mmtrain.models.optim import clip_factors as module
from mmtrain.models.optim.bf16_moments import Bf16MomentsAdamW
from mmtrain.models.optim.clip_factors import clip_factors, set_clip_factors, sum_of_squares
from tests.models.device_copies import META, DeviceCopies

OPTIMIZERS = [torch.optim.AdamW, Bf16MomentsAdamW]


def started(adam_class: type[torch.optim.AdamW], device: torch.device) -> tuple[Tensor, torch.optim.AdamW]:
    """Return a weight after no update, and its optimizer with state."""
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5, device=device))
    adam = adam_class([weight], lr=0.1, fused=True)
    state = adam.state[weight]
    state["step"] = torch.tensor(0.0, device=device)
    moments = torch.bfloat16 if adam_class is Bf16MomentsAdamW else torch.float32
    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(5, dtype=moments, device=device) for _ in range(2))
    return weight, adam


def update(weight: Tensor, adam: torch.optim.AdamW, gradient: Tensor, limit: float | None) -> None:
    weight.grad = gradient.clone()
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    set_clip_factors(adam, clip_factors(norm, limit))
    adam.step()


@pytest.mark.parametrize("adam_class", OPTIMIZERS)
@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_gradients_are_clipped_as_torch_clips_them(adam_class: type[torch.optim.AdamW], limit: float | None) -> None:
    gradients = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 9.0, 0.1, 2.0])[:, None]
    )
    weight, adam = started(adam_class, torch.device("cpu"))
    expected, peer = started(adam_class, torch.device("cpu"))
    for gradient in gradients:
        update(weight, adam, gradient, limit)
        expected.grad = gradient.clone()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_([expected], limit)
        peer.step()
    assert torch.allclose(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adam_class", OPTIMIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_nothing_changes_where_the_norm_is_not_finite(
    adam_class: type[torch.optim.AdamW], bad: float, limit: float | None
) -> None:
    weight, adam = started(adam_class, torch.device("cpu"))
    update(weight, adam, torch.arange(1.0, 6.0), limit)
    before = [weight.detach().clone(), *(value.clone() for value in adam.state[weight].values())]
    update(weight, adam, torch.tensor([1.0, bad, 0.0, 2.0, 3.0]), limit)
    after = [weight.detach(), *adam.state[weight].values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_host_does_not_read_the_norm() -> None:
    weight, adam = started(torch.optim.AdamW, META)
    with DeviceCopies() as copies:
        update(weight, adam, torch.ones(5, device=META), 0.5)
    assert copies.found == set()


def test_no_more_than_a_chunk_of_a_gradient_is_copied_into_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    vector_norm = torch.linalg.vector_norm

    def watched(x: Tensor, dtype: torch.dtype) -> Tensor:
        summed.append(x.numel())
        return vector_norm(x, dtype=dtype)

    monkeypatch.setattr(module, "NORM_CHUNK_ELEMENTS", 10)
    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    for given in (gradient, gradient.T):
        assert torch.allclose(sum_of_squares(given), gradient.double().square().sum())
    assert summed == [10, 10, 10, 5] * 2
    assert sum_of_squares(gradient[:0]) == 0
