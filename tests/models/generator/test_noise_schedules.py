"""Noise levels and targets against the schedulers of `diffusers`."""

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from mmtrain.models.generator.noise_schedules import (
    DiffusionSchedule,
    FlowSchedule,
    Levels,
    PredictionKind,
    add_noise,
    predicted_image,
    predicted_noise,
    prediction_target,
)

STABLE_DIFFUSION = DiffusionSchedule()
PIXART = DiffusionSchedule("linear", 1e-4, 0.02)
COSINE = DiffusionSchedule("cosine", num_steps=100)
THEIR_KINDS = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}


def images_and_noise(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, num_images, 3, 4, 4, generator=generator).unbind(0))  # type: ignore[return-value]


def levels_of_images(levels: Levels) -> Levels:
    """Broadcast levels of images (I,) against images (I, C, H, W)."""
    return Levels(levels.signal.view(-1, 1, 1, 1), levels.noise.view(-1, 1, 1, 1))


@pytest.mark.parametrize("schedule", [STABLE_DIFFUSION, PIXART, COSINE], ids=lambda schedule: schedule.kind)
def test_noise_and_velocity_equal_those_of_ddpm(schedule: DiffusionSchedule) -> None:
    theirs = DDPMScheduler(
        num_train_timesteps=schedule.num_steps,
        beta_start=schedule.beta_start,
        beta_end=schedule.beta_end,
        beta_schedule=THEIR_KINDS[schedule.kind],
    )
    steps = torch.tensor([0, 1, schedule.num_steps // 2, schedule.num_steps - 1])
    image, noise = images_and_noise(len(steps))
    levels = levels_of_images(schedule.levels(steps))
    torch.testing.assert_close(add_noise(image, noise, levels), theirs.add_noise(image, noise, steps))
    velocity = prediction_target("velocity", image, noise, levels)
    torch.testing.assert_close(velocity, theirs.get_velocity(image, noise, steps))
    assert prediction_target("noise", image, noise, levels) is noise


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_equals_that_of_stable_diffusion_3(shift: float) -> None:
    schedule = FlowSchedule(shift=shift)
    theirs = FlowMatchEulerDiscreteScheduler(num_train_timesteps=schedule.num_steps, shift=shift)
    unshifted = torch.arange(schedule.num_steps, 0, -1) / schedule.num_steps
    times = schedule.shifted(unshifted)
    torch.testing.assert_close(times, theirs.sigmas)
    torch.testing.assert_close(schedule.timesteps(times), theirs.timesteps)
    chosen = torch.tensor([0, 300, 999])
    image, noise = images_and_noise(len(chosen))
    noisy = add_noise(image, noise, levels_of_images(schedule.levels(times[chosen])))
    torch.testing.assert_close(noisy, theirs.scale_noise(image, theirs.timesteps[chosen], noise))


@pytest.mark.parametrize("kind", ["noise", "velocity", "flow"])
def test_a_perfect_prediction_gives_back_image_and_noise(kind: PredictionKind) -> None:
    image, noise = images_and_noise(3)
    if kind == "flow":
        levels = FlowSchedule().levels(torch.tensor([0.1, 0.5, 0.9]))
    else:
        levels = STABLE_DIFFUSION.levels(torch.tensor([10, 500, 900]))
    levels = levels_of_images(levels)
    noisy = add_noise(image, noise, levels)
    prediction = prediction_target(kind, image, noise, levels)
    torch.testing.assert_close(predicted_image(kind, prediction, noisy, levels), image, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(predicted_noise(kind, prediction, noisy, levels), noise, atol=1e-4, rtol=1e-4)


def test_packed_tokens_take_the_levels_of_their_image() -> None:
    levels = STABLE_DIFFUSION.levels(torch.tensor([3, 700])).per_token(torch.tensor([0, 1, 1]))
    assert levels.signal.shape == (3, 1)
    assert levels.noise[1] == levels.noise[2] > levels.noise[0]
