"""Random numbers of diffusion that depend on the image alone: its noise, its timestep, whether it keeps its condition.

Each number is drawn under the run's seed, the step, the sample and the place of the image in the sample. So every plan,
every rank that needs the same image, and every resumed run draws the same ones. They are drawn on the host.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Purpose = Literal["noise", "timestep", "condition"]
TimeDensity = Literal["uniform", "logit_normal"]
_KEY_BYTES = 16  # of the counter-based generator Philox 4x64 (Salmon et al., SC 2011)


@dataclass(frozen=True)
class ImageKey:
    """One target image in one step of a run."""

    seed: int
    step: int
    sample: int | str  # unique among the samples of a step
    item: int  # place among the target images of its sample

    def stream(self, purpose: Purpose) -> np.random.Generator:
        """Return the random numbers of this image for one purpose; purposes are independent of each other."""
        text = f"{self.seed}:{self.step}:{self.item}:{purpose}:{self.sample}"
        digest = hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_noise(keys: Sequence[ImageKey], lengths: Sequence[int], width: int) -> FloatArray:
    """Draw normal noise for packed images, `lengths[i]` rows of `width` numbers for image i: (sum(lengths), width)."""
    parts = [
        key.stream("noise").standard_normal((length, width), dtype=np.float32)
        for key, length in zip(keys, lengths, strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty((0, width), dtype=np.float32)


def draw_steps(keys: Sequence[ImageKey], num_steps: int) -> npt.NDArray[np.int64]:
    """Draw a diffusion step in [0, num_steps) for each image, all equally likely: (images,)."""
    steps = [key.stream("timestep").integers(num_steps) for key in keys]
    return np.asarray(steps, dtype=np.int64)


def draw_flow_times(keys: Sequence[ImageKey], density: TimeDensity = "uniform") -> FloatArray:
    """Draw a time of flow matching for each image, (images,): 0 is the image, 1 is noise.

    logit_normal: the logistic function of a normal number, which favors the middle (Esser et al., arXiv 2403.03206).
    """
    if density == "uniform":
        times = [key.stream("timestep").random() for key in keys]
    else:
        normals = (key.stream("timestep").standard_normal() for key in keys)
        times = [1 / (1 + np.exp(-normal)) for normal in normals]
    return np.asarray(times, dtype=np.float32)


def draw_dropped_conditions(keys: Sequence[ImageKey], probability: float) -> npt.NDArray[np.bool_]:
    """Draw which images lose their condition, so that guidance without classifier can be used: (images,).

    Ho and Salimans, arXiv 2207.12598.
    """
    return np.asarray([key.stream("condition").random() < probability for key in keys], dtype=np.bool_)
