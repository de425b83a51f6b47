"""AdamW with moments in bf16: its rounding, and how near it stays to AdamW with fp32 moments."""

import pytest
import torch
from torch import Tensor

from mmtrain.models.optim import bf16_moments
from mmtrain.models.optim.bf16_moments import Bf16MomentsAdamW, round_stochastically


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rounding_gives_the_value_itself_in_the_mean() -> None:
    below, above = 1.0, 1.0 + 2**-7  # neighbors in bf16
    rounded = round_stochastically(torch.full((40_000,), below + 0.25 * (above - below)), generator())
    assert set(rounded.tolist()) == {below, above}
    assert abs(float((rounded == above).float().mean()) - 0.25) < 0.01
    negative = round_stochastically(torch.full((40_000,), -(below + 0.25 * (above - below))), generator())
    assert torch.equal(negative, -rounded)


def test_what_bf16_holds_exactly_stays_as_it_is() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-100, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(exact.clone(), generator()), exact)
    assert round_stochastically(torch.tensor([float("nan")]), generator()).isnan().all()


def train(moments: torch.dtype, gradients: Tensor, beta2: float, start: int = 0, saved: Tensor | None = None) -> Tensor:
    """Return (weight, both moments) after an update by each row of `gradients`, continuing from `saved`."""
    start_state = torch.zeros(3, gradients.shape[1]) if saved is None else saved
    param = start_state[0].clone()
    adam_class = Bf16MomentsAdamW if moments == torch.bfloat16 else torch.optim.AdamW
    adam = adam_class([param], lr=1e-3, betas=(0.9, beta2), fused=True)
    state = adam.state[param]
    state["step"] = torch.tensor(float(start))
    state["exp_avg"], state["exp_avg_sq"] = (moment.to(moments) for moment in start_state[1:])
    if isinstance(adam, Bf16MomentsAdamW):
        adam.num_updates = start
    for gradient in gradients:
        param.grad = gradient
        adam.step()
        if isinstance(adam, Bf16MomentsAdamW):
            adam.num_updates += 1
    assert float(state["step"]) == start + len(gradients)
    return torch.stack([param, state["exp_avg"].float(), state["exp_avg_sq"].float()])


def test_moments_follow_those_in_fp32_where_rounding_to_nearest_would_stop_them() -> None:
    """The squared gradients fall by 1e4, which a beta2 of 0.999 forgets in steps of a thousandth."""
    gradients = torch.randn(600, 2000, generator=generator()) * torch.where(torch.arange(600) < 50, 1.0, 0.01)[:, None]
    exact = train(torch.float32, gradients, 0.999)
    stochastic = train(torch.bfloat16, gradients, 0.999)
    assert abs(float(stochastic[2].mean() / exact[2].mean()) - 1) < 0.01
    assert float((stochastic[0] - exact[0]).norm() / exact[0].norm()) < 0.02


def test_updates_continue_bit_for_bit_from_stored_moments() -> None:
    gradients = torch.randn(6, 300, generator=generator())
    unbroken = train(torch.bfloat16, gradients, 0.95)
    stopped = train(torch.bfloat16, gradients[:4], 0.95)
    assert torch.equal(train(torch.bfloat16, gradients[4:], 0.95, start=4, saved=stopped), unbroken)


def test_a_parameter_may_be_updated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(1, 100, generator=generator())
    whole = train(torch.bfloat16, gradients, 0.95)
    monkeypatch.setattr(bf16_moments, "CHUNK_ELEMENTS", 33)
    chunked = train(torch.bfloat16, gradients, 0.95)
    assert torch.equal(chunked[0], whole[0])  # the first update does not depend on how moments are rounded
    assert torch.allclose(chunked[1:], whole[1:], rtol=2**-6)
