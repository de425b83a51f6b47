"""Samplers against the schedulers of `diffusers`, with a made-up generator."""

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from mmtrain.models.generator.noise_schedules import DiffusionSchedule, FlowSchedule, PredictionKind
from mmtrain.models.generator.sampling import denoise, diffusion_sampling_steps, flow_sampling_steps, guide

SCHEDULE = DiffusionSchedule()


def generator(noisy: Tensor, timestep: Tensor) -> Tensor:
    """Predict something that depends on image and timestep."""
    return torch.tanh(1.3 * noisy + timestep / 1000) - 0.2 * noisy


def first_noise() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_steps", [1, 7, 50])
@pytest.mark.parametrize(("kind", "theirs"), [("noise", "epsilon"), ("velocity", "v_prediction")])
def test_ddim_is_that_of_diffusers(kind: PredictionKind, theirs: str, num_steps: int) -> None:
    scheduler = DDIMScheduler(
        num_train_timesteps=SCHEDULE.num_steps,
        beta_start=SCHEDULE.beta_start,
        beta_end=SCHEDULE.beta_end,
        beta_schedule="scaled_linear",
        prediction_type=theirs,
        clip_sample=False,
    )
    scheduler.set_timesteps(num_steps)
    ours = expected = first_noise()
    steps = diffusion_sampling_steps(SCHEDULE, num_steps)
    assert [step.timestep.item() for step in steps] == scheduler.timesteps.tolist()
    for step, timestep in zip(steps, scheduler.timesteps, strict=True):
        ours = denoise(kind, generator(ours, step.timestep), ours, step)
        expected = scheduler.step(generator(expected, timestep), timestep, expected).prev_sample
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_steps", [1, 7, 28])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_is_that_of_diffusers(shift: float, num_steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    ours = expected = first_noise()
    steps = flow_sampling_steps(FlowSchedule(shift=shift), num_steps)
    torch.testing.assert_close(torch.stack([step.timestep for step in steps]), scheduler.timesteps)
    for step, timestep in zip(steps, scheduler.timesteps, strict=True):
        ours = denoise("flow", generator(ours, step.timestep), ours, step)
        expected = scheduler.step(generator(expected, timestep), timestep, expected).prev_sample
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["noise", "velocity", "flow"])
def test_a_perfect_generator_gives_the_image(kind: PredictionKind) -> None:
    from mmtrain.models.generator.noise_schedules import add_noise, prediction_target

    image, noise = first_noise(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    steps = flow_sampling_steps(FlowSchedule(), 5) if kind == "flow" else diffusion_sampling_steps(SCHEDULE, 5)
    noisy = add_noise(image, noise, steps[0].before)
    for step in steps:
        noisy = denoise(kind, prediction_target(kind, image, noise, step.before), noisy, step)
    torch.testing.assert_close(noisy, image, rtol=1e-3, atol=1e-3)


def test_guidance_scales_the_difference() -> None:
    conditioned, unconditioned = torch.tensor([2.0]), torch.tensor([1.0])
    assert guide(conditioned, unconditioned, 1.0) == conditioned
    assert guide(conditioned, unconditioned, 4.0) == 5.0
