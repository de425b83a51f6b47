"""Images to draw are mixed with noise as the generator's settings say, whatever the plan."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.data.loading.payload import EncoderPayload
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.runtime.execution.noisy_images import noisy_images
from tests.flow.drawing import recipe

NUM_IMAGES, FEATURES = 400, 48
NUM_STEPS = 1000  # what time 1 is for the generator
MIN_P_VALUE = 1e-3


def flow_images(**changes: Any) -> GeneratorInput:
    """Return the input of one microbatch of images of one cell, each in a sample of its own."""
    settings = {f"model__generator__{name}": value for name, value in {"prediction": "flow", **changes}.items()}
    numbers, ones = np.arange(NUM_IMAGES), np.ones(NUM_IMAGES, dtype=np.int64)
    zeros = numbers * 0
    items = ItemTable(numbers, zeros, ones, ones, ones, ones, zeros, zeros)
    meta = BatchMeta(0, 0, numbers, ones, ones, zeros, zeros, {"generator": items})
    cells = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, FEATURES), dtype=np.uint8)
    payload = EncoderPayload((1,) * NUM_IMAGES, (1,) * NUM_IMAGES, cells)
    return noisy_images(payload, meta, (0, 0), recipe(Path("unused"), **settings))


def parts_of(images: GeneratorInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the times of images, and the images without their noise."""
    assert images.cells is not None
    assert images.targets is not None
    assert images.timesteps is not None
    times = images.timesteps / NUM_STEPS
    return times, images.cells - times[:, None] * images.targets


def test_times_are_shifted_towards_noise() -> None:
    times, image = parts_of(flow_images())
    shifted_times, same_image = parts_of(flow_images(flow_shift=3.0))
    torch.testing.assert_close(shifted_times, 3 * times / (1 + 2 * times))
    torch.testing.assert_close(same_image, image, rtol=0, atol=1e-5)
    assert stats.kstest(times.numpy(), "uniform").pvalue > MIN_P_VALUE


def test_times_have_the_density_that_is_set() -> None:
    times, _ = parts_of(flow_images(flow_times="logit_normal"))
    logits = torch.logit(times.double()).numpy()
    assert stats.kstest(logits, "norm").pvalue > MIN_P_VALUE
