"""AdamW that keeps both moments in bf16: 4 bytes per parameter instead of 8."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

# Elements that are updated at once: their moments exist in fp32, and as random bits, for that long (12 bytes each).
CHUNK_ELEMENTS = 2**24
_FRACTION_BITS = 16  # of an fp32 number that bf16 drops
_KEPT_BITS_MASK = -(1 << _FRACTION_BITS)


class Bf16MomentsAdamW(AdamW):
    """AdamW over fp32 parameters, whose moments `exp_avg` and `exp_avg_sq` are in bf16.

    An update computes in fp32 and stores the moments with stochastic rounding. Rounding to nearest would lose every
    change below half a unit of bf16's 8 bits, which is each change of `exp_avg_sq` where beta2 is near 1: see "Moments
    in bf16" in docs/decisions/training.md. The random bits depend on `num_updates` only, so a resumed run repeats them.

    The caller creates the state of each parameter (`step`, `exp_avg`, `exp_avg_sq`) before the first update.
    """

    num_updates = 0  # so far; the caller counts, as it learns only later whether the device made an update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.device not in generators:
                    generators[param.device] = torch.Generator(param.device).manual_seed(self.num_updates)
                self._update(param, group, generators[param.device])

    def _update(self, param: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[param]
        assert param.grad is not None
        flat = [t.view(-1) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])]
        found_inf = getattr(self, "found_inf", None)
        beta1, beta2 = group["betas"]
        for weights, gradients, *moments in zip(*(t.split(CHUNK_ELEMENTS) for t in flat), strict=True):
            exp_avg, exp_avg_sq = (moment.float() for moment in moments)
            adamw(
                [weights],
                [gradients],
                [exp_avg],
                [exp_avg_sq],
                [],
                [state["step"].clone()],  # it counts each call
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, updated in zip(moments, (exp_avg, exp_avg_sq), strict=True):
                moment.copy_(round_stochastically(updated, generator))
        state["step"] += 1 if found_inf is None else 1 - found_inf


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 `values` in place to one of the two nearest bf16 numbers, in the mean to the value itself.

    A value that lies a quarter of the way to the next bf16 number becomes that number with probability 1/4. Returns
    `values`, still fp32; bf16 holds each of them exactly.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(1 << _FRACTION_BITS, bits.shape, generator=generator, dtype=torch.int32, device=bits.device)
    bits.add_(noise).bitwise_and_(_KEPT_BITS_MASK)
    return values
