"""Compare AdamW with moments in fp32, and in bf16 rounded to nearest and stochastically, on a small regression.

Labels are noisy in the first quarter of the steps and exact afterwards, so that squared gradients become small. Prints
the mean loss of the last 200 steps over three seeds, for several beta2. Takes about two minutes of one core.
"""

import argparse
import contextlib
import math
from unittest import mock

import torch
from torch import nn

from mmtrain.models import bf16_moments
from mmtrain.models.bf16_moments import Bf16MomentsAdamW

NUM_LAST_STEPS = 200
BATCH = 64


def main() -> None:
    """Print a row for each beta2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for beta2 in (0.95, 0.99, 0.999):
        losses = {}
        for moments in ("fp32", "nearest", "stochastic"):
            of_seeds = [last_loss(moments, beta2, arguments.steps, seed) for seed in range(arguments.seeds)]
            losses[moments] = sum(of_seeds) / len(of_seeds)
        ratios = ", ".join(f"{name} {loss / losses['fp32']:.3f}" for name, loss in losses.items())
        print(f"beta2 {beta2}: loss {losses['fp32']:.3e}; relative to fp32 moments: {ratios}", flush=True)


def last_loss(moments: str, beta2: float, num_steps: int, seed: int) -> float:
    """Train a student on a teacher's outputs; return the mean loss of the last steps."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
    adam_class = torch.optim.AdamW if moments == "fp32" else Bf16MomentsAdamW
    adam = adam_class(student.parameters(), betas=(0.9, beta2), weight_decay=0.0, fused=True)
    if moments != "fp32":
        for param in student.parameters():
            zeros = torch.zeros_like(param, dtype=torch.bfloat16)
            adam.state[param] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    to_nearest = mock.patch.object(bf16_moments, "round_stochastically", lambda values, _: values)
    total = 0.0
    with to_nearest if moments == "nearest" else contextlib.nullcontext():
        for step in range(num_steps):
            inputs = torch.randn(BATCH, 32)
            labels = teacher(inputs) + torch.randn(BATCH, 8) * (step < num_steps // 4)
            for group in adam.param_groups:
                group["lr"] = 1.5e-3 * (1 + math.cos(math.pi * step / num_steps))
            loss = (student(inputs) - labels).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += float(loss.detach()) * (step >= num_steps - NUM_LAST_STEPS)
    return total / NUM_LAST_STEPS


if __name__ == "__main__":
    main()
