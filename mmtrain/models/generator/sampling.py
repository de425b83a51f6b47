"""Sample images from noise: DDIM for diffusion, Euler for flow matching, both with guidance.

A sampler is a list of steps and a pure function from the noisy image, and the generator's prediction at a step, to the
image with less noise. Nothing random happens after the first noise, so a seed decides the image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmtrain.models.generator.noise_schedules import (
    DiffusionSchedule,
    FlowSchedule,
    Levels,
    PredictionKind,
    add_noise,
    predicted_image,
    predicted_noise,
)


@dataclass(frozen=True)
class SamplingStep:
    """One call of the generator: what it reads as its timestep, and how noisy the image is before and after it."""

    timestep: Tensor  # a number
    before: Levels  # likewise
    after: Levels


def diffusion_sampling_steps(schedule: DiffusionSchedule, num_steps: int) -> tuple[SamplingStep, ...]:
    """Return the steps of DDIM (Song et al., arXiv 2010.02502, with eta 0), from noise to image.

    Steps of the schedule are taken at equal distances, the last of which is the schedule's first: `leading` spacing of
    `diffusers`, with the image without noise at the end. The first is less noisy than pure noise where `num_steps`
    does not divide the schedule, as there.
    """
    assert 1 <= num_steps <= schedule.num_steps, "the caller checks the number of steps"
    stride = schedule.num_steps // num_steps
    steps = torch.arange(num_steps - 1, -1, -1) * stride
    levels = schedule.levels(steps)
    signal = torch.cat([levels.signal, torch.ones(1)])
    noise = torch.cat([levels.noise, torch.zeros(1)])
    return _steps(steps, Levels(signal, noise))


def flow_sampling_steps(schedule: FlowSchedule, num_steps: int) -> tuple[SamplingStep, ...]:
    """Return the steps of Euler's method along the lines of flow matching, from noise to image.

    Times are those of `FlowMatchEulerDiscreteScheduler` of `diffusers`: equally spaced, and then shifted.
    """
    assert num_steps >= 1, "the caller checks the number of steps"
    last = schedule.shifted(torch.tensor(1.0 / schedule.num_steps)).item()
    times = schedule.shifted(torch.linspace(1.0, last, num_steps))
    levels = schedule.levels(torch.cat([times, torch.zeros(1)]))
    return _steps(schedule.timesteps(times), levels)


def _steps(timesteps: Tensor, levels: Levels) -> tuple[SamplingStep, ...]:
    """Return the steps between neighbouring levels (steps + 1,)."""
    points = [Levels(signal, noise) for signal, noise in zip(levels.signal, levels.noise, strict=True)]
    return tuple(
        SamplingStep(timestep, before, after)
        for timestep, before, after in zip(timesteps, points[:-1], points[1:], strict=True)
    )


def denoise(kind: PredictionKind, prediction: Tensor, noisy: Tensor, step: SamplingStep) -> Tensor:
    """Return what is left of a noisy image after a step: the image and the noise that the prediction implies, remixed.

    For diffusion that is DDIM, for flow matching a step of Euler's method.
    """
    image = predicted_image(kind, prediction, noisy, step.before)
    noise = predicted_noise(kind, prediction, noisy, step.before)
    return add_noise(image, noise, step.after)


def guide(conditioned: Tensor, unconditioned: Tensor, scale: float) -> Tensor:
    """Push a prediction away from that without a condition (Ho and Salimans, arXiv 2207.12598); 1 leaves it alone."""
    return unconditioned + scale * (conditioned - unconditioned)
