"""Make the input of a generator from the images of a step: noise, keyed by the image, and what is to be predicted."""

import numpy as np
import torch
from torch import Tensor

from mmtrain.balance import BatchMeta
from mmtrain.data.loading.payload import EncoderPayload
from mmtrain.models.generator.keyed_noise import (
    ImageKey,
    draw_dropped_conditions,
    draw_flow_times,
    draw_noise,
    draw_steps,
)
from mmtrain.models.generator.noise_schedules import (
    DiffusionSchedule,
    FlowSchedule,
    Levels,
    add_noise,
    prediction_target,
)
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR

HALF_RANGE = 127.5  # of a byte: pixels become numbers from -1 to 1, as noise schedules assume
_SCHEDULES = {
    "linear": DiffusionSchedule("linear", 1e-4, 0.02),  # DDPM (arXiv 2006.11239), PixArt
    "scaled_linear": DiffusionSchedule("scaled_linear", 0.00085, 0.012),  # Stable Diffusion
    "cosine": DiffusionSchedule("cosine"),
}


def noisy_images(
    payload: EncoderPayload, meta: BatchMeta, microbatch: tuple[int, int], recipe: Recipe
) -> GeneratorInput:
    """Add noise to the images of a microbatch (replica, index), on the host.

    Noise, timestep, and whether an image keeps its context depend on seed, step, sample and place in the sample alone,
    so they are the same under every plan. An image that could not be decoded counts nothing in the loss.
    """
    generator = recipe.model.generator
    assert generator is not None, "only models with a generator have images to draw"
    table = meta.items[GENERATOR]
    items = table.microbatch(*microbatch)
    samples = meta.sample_id[table.sample[items]].tolist()
    places = table.position[items].tolist()
    keys = [
        ImageKey(recipe.train.seed, meta.step, sample, place) for sample, place in zip(samples, places, strict=True)
    ]
    kept = None
    if generator.context_dropout:
        dropped = draw_dropped_conditions(keys, generator.context_dropout)
        kept = torch.from_numpy((~dropped).astype(np.float32))
    if payload.cells is None:
        return GeneratorInput(payload.rows, payload.cols, kept_contexts=kept)
    lengths = [rows * cols for rows, cols in zip(payload.rows, payload.cols, strict=True)]
    image = clean_images(payload)
    noise = torch.from_numpy(draw_noise(keys, lengths, generator.cell_features))
    levels, timesteps = _draw_levels(generator, keys)
    image_of_cell = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    of_cells = levels.per_token(image_of_cell)
    return GeneratorInput(
        payload.rows,
        payload.cols,
        cells=add_noise(image, noise, of_cells),
        timesteps=timesteps,
        targets=prediction_target(generator.prediction, image, noise, of_cells),
        counted=counted_cells(payload, len(image)),
        kept_contexts=kept,
    )


def clean_images(payload: EncoderPayload) -> Tensor:
    """Return the images of a microbatch as numbers, (N, features of a cell): pixels from -1 to 1, or latents."""
    assert payload.cells is not None, "the rank does not read images to draw"
    image = torch.from_numpy(payload.cells.astype(np.float32))
    return image / HALF_RANGE - 1.0 if payload.cells.dtype == np.uint8 else image


def diffusion_schedule(generator: GeneratorSettings) -> DiffusionSchedule:
    """Return how noise grows for a generator that predicts noise or velocity."""
    return _SCHEDULES[generator.noise_schedule]


def flow_schedule(generator: GeneratorSettings) -> FlowSchedule:
    """Return the lines of a generator that learns flow matching."""
    return FlowSchedule(shift=generator.flow_shift)


def _draw_levels(generator: GeneratorSettings, keys: list[ImageKey]) -> tuple[Levels, Tensor]:
    """Draw how much noise each image gets; return that, and the timesteps that the generator reads: (images,)."""
    if generator.prediction == "flow":
        flow = flow_schedule(generator)
        times = flow.shifted(torch.from_numpy(draw_flow_times(keys, generator.flow_times)))
        return flow.levels(times), flow.timesteps(times)
    schedule = diffusion_schedule(generator)
    steps = torch.from_numpy(draw_steps(keys, schedule.num_steps))
    return schedule.levels(steps), steps


def counted_cells(payload: EncoderPayload, num_cells: int) -> Tensor | None:
    """Return 1 for cells of images that were decoded, 0 for others, (num_cells,); None if all were."""
    if not payload.blank_cells:
        return None
    counted = torch.ones(num_cells)
    for start, stop in payload.blank_cells:
        counted[start:stop] = 0.0
    return counted
