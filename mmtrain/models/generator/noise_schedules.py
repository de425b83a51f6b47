"""How much of an image and how much noise a generator sees at each timestep, and what it has to predict.

At every timestep the generator sees `signal * image + noise_level * noise`. Two kinds of schedules differ in these two
numbers: diffusion with a fixed number of steps (DDPM, arXiv 2006.11239), and flow matching along straight lines
(arXiv 2210.02747, 2403.03206). Functions take one number of each for an image, and rows of images packed or batched.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

BetaKind = Literal["linear", "scaled_linear", "cosine"]
PredictionKind = Literal["noise", "velocity", "flow"]
_MAX_COSINE_BETA = 0.999  # Nichol and Dhariwal, arXiv 2102.09672
_COSINE_OFFSET = 0.008  # likewise


@dataclass(frozen=True)
class Levels:
    """The share of the image and of the noise in what a generator sees: alike shaped, or broadcast against images."""

    signal: Tensor
    noise: Tensor

    def per_token(self, image_of_token: Tensor) -> "Levels":
        """Return the levels (images,) as a column for packed tokens, (T, 1)."""
        return Levels(self.signal[image_of_token][:, None], self.noise[image_of_token][:, None])


@dataclass(frozen=True)
class DiffusionSchedule:
    """Diffusion in `num_steps` steps. Defaults are those of Stable Diffusion 2.1; PixArt's are linear, 1e-4 to 0.02.

    linear: the variances of the steps' noise grow linearly. scaled_linear: their roots do. cosine: the signal's power
    falls as a squared cosine, and `beta_start` and `beta_end` are not used.
    """

    kind: BetaKind = "scaled_linear"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    num_steps: int = 1000

    @cached_property
    def signal_power(self) -> Tensor:
        """Return the signal's share of the variance after each step, `alphas_cumprod` of `diffusers`: (num_steps,)."""
        return torch.cumprod(1.0 - self._betas(), dim=0)

    def levels(self, steps: Tensor) -> Levels:
        """Return the levels at integer steps (images,) in [0, num_steps), in fp32."""
        power = self.signal_power.to(steps.device)[steps]
        return Levels(power.sqrt(), (1.0 - power).sqrt())

    def _betas(self) -> Tensor:
        if self.kind == "linear":
            return torch.linspace(self.beta_start, self.beta_end, self.num_steps, dtype=torch.float32)
        if self.kind == "scaled_linear":
            roots = torch.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_steps, dtype=torch.float32)
            return roots**2
        time = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        power = torch.cos((time + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * torch.pi / 2) ** 2
        return (1.0 - power[1:] / power[:-1]).clamp(max=_MAX_COSINE_BETA).float()


@dataclass(frozen=True)
class FlowSchedule:
    """Straight lines from images at time 0 to noise at time 1. The generator reads `time * num_steps`.

    shift: above 1 it moves times towards noise, which larger images need (Esser et al., arXiv 2403.03206, section 5.3).
    """

    num_steps: int = 1000
    shift: float = 1.0

    def shifted(self, times: Tensor) -> Tensor:
        """Shift times (images,) towards noise."""
        return self.shift * times / (1.0 + (self.shift - 1.0) * times)

    def levels(self, times: Tensor) -> Levels:
        """Return the levels at times (images,) in [0, 1], which are shifted already."""
        return Levels(1.0 - times, times)

    def timesteps(self, times: Tensor) -> Tensor:
        """Return what the generator reads at these times."""
        return times * self.num_steps


def add_noise(image: Tensor, noise: Tensor, levels: Levels) -> Tensor:
    """Return what the generator sees of images and their noise, in the images' dtype."""
    return (levels.signal * image + levels.noise * noise).to(image.dtype)


def prediction_target(kind: PredictionKind, image: Tensor, noise: Tensor, levels: Levels) -> Tensor:
    """Return what the generator has to predict.

    noise: the noise. velocity: v of Salimans and Ho (arXiv 2202.00512). flow: the direction from image to noise.
    """
    if kind == "noise":
        return noise
    if kind == "velocity":
        return (levels.signal * noise - levels.noise * image).to(image.dtype)
    return noise - image


def predicted_image(kind: PredictionKind, prediction: Tensor, noisy: Tensor, levels: Levels) -> Tensor:
    """Return the image that a prediction implies: the inverse of `prediction_target`."""
    if kind == "noise":
        return (noisy - levels.noise * prediction) / levels.signal
    if kind == "velocity":
        return levels.signal * noisy - levels.noise * prediction
    return noisy - levels.noise * prediction


def predicted_noise(kind: PredictionKind, prediction: Tensor, noisy: Tensor, levels: Levels) -> Tensor:
    """Return the noise that a prediction implies: the inverse of `prediction_target`."""
    if kind == "noise":
        return prediction
    if kind == "velocity":
        return levels.noise * noisy + levels.signal * prediction
    return noisy + levels.signal * prediction
