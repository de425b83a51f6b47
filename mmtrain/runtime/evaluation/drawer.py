"""Draw the images of held-out samples, and measure how well the model predicts the noise in them.

The LLM reads each conversation as in training. Its outputs at the queries condition the generator, which starts from
noise that depends on seed, sample and place alone. So ranks that each run the whole model share the samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmtrain.balance import IntArray, SampleLengths, assign
from mmtrain.data import (
    BatchBuilder,
    DataIndex,
    EncodedSample,
    PayloadNeed,
    Quarantined,
    Sample,
    SampleTokenizer,
    StepData,
)
from mmtrain.data.callbacks import ProgressCallback
from mmtrain.data.formats.sample import MEDIA_ROLES
from mmtrain.data.media.images import CellArray
from mmtrain.data.text.sample_tokenizer import find_marks
from mmtrain.models.generator.generator_stage import GeneratorStage
from mmtrain.models.generator.keyed_noise import ImageKey, draw_noise
from mmtrain.models.generator.noise_schedules import Levels, add_noise, prediction_target
from mmtrain.models.generator.sampling import (
    SamplingStep,
    denoise,
    diffusion_sampling_steps,
    flow_sampling_steps,
    guide,
)
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.program import LLM, Microbatch
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.evaluation.qa_eval import batch_by_length
from mmtrain.runtime.execution.noisy_images import (
    HALF_RANGE,
    clean_images,
    counted_cells,
    diffusion_schedule,
    flow_schedule,
)
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.world import World
from mmtrain.weights.encode_latents import load_latent_decoder

NUM_LOSS_BUCKETS = 10  # of timesteps, equally wide
NUM_TIMESTEPS = 1000  # that a generator reads: those of DDPM, or a thousandth of a time of flow matching each
_MAX_BATCH_TOKENS = 8192  # of the LLM and of the generator together
ImageId = tuple[int, int]  # number of the sample in the index, place among the images that it draws
Uint8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SamplingOptions:
    """How images are drawn."""

    steps: int
    guidance: float  # 1: none
    seed: int


@dataclass(frozen=True)
class DrawnBatch:
    """What one pass over held-out samples made, on one rank or on all together."""

    images: Mapping[ImageId, Uint8Array]  # (rows, columns, 3)
    squared_errors: tuple[float, ...]  # of predictions, summed over all elements; by bucket of timesteps
    num_elements: int  # of images, each of which counts once in every bucket
    bad: tuple[Quarantined, ...]  # samples whose images cannot be decoded; the others are above

    @classmethod
    def joined(cls, parts: "Iterable[DrawnBatch]") -> "DrawnBatch":
        """Return what ranks made that shared the samples."""
        images: dict[ImageId, Uint8Array] = {}
        squared_errors, num_elements = np.zeros(NUM_LOSS_BUCKETS), 0
        bad: list[Quarantined] = []
        for part in parts:
            images |= part.images
            squared_errors += part.squared_errors
            num_elements += part.num_elements
            bad += part.bad
        return cls(images, tuple(squared_errors.tolist()), num_elements, tuple(bad))


class Drawer:
    """Draws this rank's share of samples, with a model whose units each lie on this rank as one stage."""

    def __init__(
        self,
        stages: Mapping[str, StageModule],
        recipe: Recipe,
        index: DataIndex,
        tokenizer: SampleTokenizer,
        world: World,
    ) -> None:
        """Draw images of samples of `index`, which must be equal on all ranks. stages: of every unit.

        Raises ModelFolderError or DataError for a generator of latents whose autoencoder is not as in training.
        """
        settings, generator = recipe.model.generator, stages[GENERATOR]
        assert settings is not None, "only a model with a generator draws"
        assert isinstance(generator, GeneratorStage)
        self.settings, self._generator = settings, generator
        self._stages, self._tokenizer = stages, tokenizer
        self.recipe, self.index, self.world = recipe, index, world
        self._device = next(generator.parameters()).device
        self._autoencoder = None if settings.vae is None else load_latent_decoder(settings).to(self._device)

    @torch.no_grad()
    def draw(
        self,
        numbers: Sequence[int],
        options: SamplingOptions,
        *,
        blank: bool,
        show: ProgressCallback = lambda done, total: None,
    ) -> DrawnBatch:
        """Draw all images of this rank's share of these samples; with `blank` without what users wrote and showed.

        show: hears after each step how many images all ranks have drawn, and of how many; a part of the steps counts as
            that part of the images.
        """
        encoded = {number: self._encode(number, blank) for number in numbers}
        lengths = self._lengths(encoded)
        once = dict.fromkeys(self._stages, 1)
        builder = _DrawingBuilder(self.index, self.recipe, self._stages, self._tokenizer, encoded, blank)
        images: dict[ImageId, Uint8Array] = {}
        squared_errors, num_elements = np.zeros(NUM_LOSS_BUCKETS), 0
        bad: dict[int, Quarantined] = {}
        num_done, num_all = 0, self._num_images(numbers)
        for samples, num_in_round in self._batches(numbers, lengths):
            data = builder.build(assign(0, 0, [samples], lengths, once, once))
            bad |= {entry.index: entry for entry in data.quarantined}
            batch = _Batch.of(data, options.seed, self.settings)
            outputs = self._llm_outputs(data)
            squared_errors += self._squared_errors(batch, outputs)
            num_elements += batch.num_counted_elements
            show_share = partial(_show_share, show, num_done, num_in_round, num_all)
            drawn = self._sample(batch, outputs, options, show_share)
            images |= zip(batch.ids, drawn, strict=True)
            num_done += num_in_round
        bad_samples = {(entry.source, entry.index) for entry in bad.values()}
        usable = {
            image_id: image
            for image_id, image in images.items()
            if _place_of(self.index.samples[image_id[0]]) not in bad_samples
        }
        return DrawnBatch(usable, tuple(squared_errors.tolist()), num_elements, tuple(bad.values()))

    def _encode(self, number: int, blank: bool) -> EncodedSample:
        sample = self.index.samples[number]
        features = self.index.media_features(number, self._tokenizer.writes_rows_apart)
        return self._tokenizer.encode(without_user_text(sample) if blank else sample, features)

    def _lengths(self, encoded: Mapping[int, EncodedSample]) -> SampleLengths:
        """Return the lengths of the samples as they are encoded here; samples that are not have length 0."""
        tokens = np.zeros(len(self.index.samples), dtype=np.int64)
        tokens[list(encoded)] = [len(sample.ids) for sample in encoded.values()]
        return SampleLengths(tokens, np.zeros_like(tokens), self.index.lengths.items)

    def _num_images(self, numbers: Iterable[int]) -> int:
        return sum(len(self.index.samples[number].target_images) for number in numbers)

    def _batches(self, numbers: Sequence[int], lengths: SampleLengths) -> Iterator[tuple[IntArray, int]]:
        """Divide samples into batches of about equal work for all ranks; yield those of this rank.

        Beside each is the number of images that all ranks draw meanwhile.
        """
        of_generator = self.index.lengths.items[GENERATOR]
        bounds = of_generator.first
        sizes = [
            int(lengths.tokens[number] + of_generator.tokens[bounds[number] : bounds[number + 1]].sum())
            for number in numbers
        ]
        for batches in batch_by_length(sizes, self.world.size, _MAX_BATCH_TOKENS):
            # Empty ones, too: ranks that hold shards of the model run it equally often.
            num_images = self._num_images(numbers[i] for batch in batches for i in batch)
            yield np.array([numbers[i] for i in batches[self.world.rank]], dtype=np.int64), num_images

    def _llm_outputs(self, data: StepData) -> Tensor:
        """Return what the LLM says at the queries of all images: (I * context tokens, llm_hidden)."""
        read = {unit: payloads for unit, payloads in data.encoders.items() if unit != GENERATOR}
        stages = {unit: [stage] for unit, stage in self._stages.items()}
        inputs = unit_inputs(replace(data, encoders=read), stages, self.recipe)
        features = {unit: self._stages[unit](None, inputs[Microbatch(unit, 0, 0)]) for unit in read}
        text = inputs[Microbatch(LLM, 0, 0)]
        assert isinstance(text, TextInput)
        llm = self._stages[LLM]
        outputs, _ = llm.run_to_queries(llm.context(text, features), None, llm.indices)
        return outputs

    def _squared_errors(self, batch: "_Batch", outputs: Tensor) -> npt.NDArray[np.float64]:
        """Return the squared errors of predictions in the middle of every bucket of timesteps, summed: (buckets,)."""
        sums = np.zeros(NUM_LOSS_BUCKETS)
        image, noise = batch.image.to(self._device), batch.noise.to(self._device)
        for bucket in range(NUM_LOSS_BUCKETS):
            timestep = (2 * bucket + 1) * NUM_TIMESTEPS // (2 * NUM_LOSS_BUCKETS)
            levels = _levels_at(self.settings, timestep)
            inputs = batch.input(add_noise(image, noise, levels), torch.tensor(float(timestep)))
            target = prediction_target(self.settings.prediction, image, noise, levels)
            squares = (self._generator.predict(inputs, outputs) - target).square()
            if batch.counted is not None:
                squares = squares * batch.counted.to(self._device)[:, None]
            sums[bucket] = squares.double().sum().item()
        return sums

    def _sample(
        self, batch: "_Batch", outputs: Tensor, options: SamplingOptions, show_share: Callable[[float], None]
    ) -> list[Uint8Array]:
        """Draw the images of a batch from their noise; return their pixels (rows, columns, 3).

        show_share: hears which share of the steps is done.
        """
        noisy = batch.noise.to(self._device)
        steps = sampling_steps(self.settings, options.steps)
        for number, step in enumerate(steps, 1):
            inputs = batch.input(noisy, step.timestep)
            prediction = self._generator.predict(inputs, outputs)
            if options.guidance != 1.0:
                without = replace(inputs, kept_contexts=torch.zeros(len(batch.rows), device=self._device))
                prediction = guide(prediction, self._generator.predict(without, outputs), options.guidance)
            noisy = denoise(self.settings.prediction, prediction, noisy, step)
            show_share(number / len(steps))
        return [to_bytes(self._pixels(image)) for image in batch.unpack(noisy, self.settings)]

    def _pixels(self, image: Tensor) -> Tensor:
        """Return the pixels (3, rows, columns) of an image that the generator drew, in which it may be latent."""
        if self._autoencoder is not None:
            [image] = self._autoencoder.decode(image[None])
        return image.cpu()


@dataclass(frozen=True)
class _Batch:
    """The images of one batch, packed one after another, and their noise."""

    ids: tuple[ImageId, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    image: Tensor  # (N, features of a cell)
    noise: Tensor  # likewise
    counted: Tensor | None  # (N,) 0 for cells of images that cannot be decoded

    @classmethod
    def of(cls, data: StepData, seed: int, settings: GeneratorSettings) -> "_Batch":
        payload = data.encoders[GENERATOR][0, 0]
        table = data.meta.items[GENERATOR]
        items = table.microbatch(0, 0)
        numbers = data.meta.sample_id[table.sample[items]].tolist()
        ids = tuple(zip(numbers, table.position[items].tolist(), strict=True))
        keys = [ImageKey(seed, 0, number, place) for number, place in ids]
        lengths = [rows * cols for rows, cols in zip(payload.rows, payload.cols, strict=True)]
        image = clean_images(payload)
        noise = torch.from_numpy(draw_noise(keys, lengths, settings.cell_features))
        return cls(ids, payload.rows, payload.cols, image, noise, counted_cells(payload, len(image)))

    @property
    def num_counted_elements(self) -> int:
        """Elements of the images that can be decoded."""
        num_cells = len(self.image) if self.counted is None else int(self.counted.sum())
        return num_cells * self.image.shape[1]

    def input(self, noisy: Tensor, timestep: Tensor) -> GeneratorInput:
        """Return what the generator reads of noisy images (N, features of a cell) that are at one timestep."""
        timesteps = timestep.to(noisy.device).expand(len(self.rows))
        return GeneratorInput(self.rows, self.cols, cells=noisy, timesteps=timesteps)

    def unpack(self, cells: Tensor, settings: GeneratorSettings) -> Iterator[Tensor]:
        """Yield each image (channels, rows, columns) of packed cells: pixels, or latents."""
        patch = settings.patch
        lengths = [rows * cols for rows, cols in zip(self.rows, self.cols, strict=True)]
        for rows, cols, part in zip(self.rows, self.cols, torch.split(cells, lengths), strict=True):
            by_side = part.view(rows, cols, settings.channels, patch, patch).permute(2, 0, 3, 1, 4)
            yield by_side.reshape(settings.channels, rows * patch, cols * patch)


class _DrawingBuilder(BatchBuilder):
    """Builds batches of whole conversations for one rank; with `blank`, images and clips to read are zeros."""

    def __init__(
        self,
        index: DataIndex,
        recipe: Recipe,
        units: Mapping[str, StageModule],
        tokenizer: SampleTokenizer,
        encoded: Mapping[int, EncodedSample],
        blank: bool,
    ) -> None:
        llm = units[LLM]
        needs = [PayloadNeed(unit, 0, media=True) for unit in units if unit != LLM]
        text = PayloadNeed(
            LLM, 0, ids=True, labels=True, position_ids=llm.needs_position_ids, image_spans=llm.units_with_spans
        )
        super().__init__(index, recipe, (*needs, text), dict.fromkeys(units, 1), tokenizer)
        self._encoded, self._blank = encoded, blank

    def _encode(self, sample_id: int) -> EncodedSample:
        return self._encoded[sample_id]

    def _load_cells(self, unit: str, sample_id: int, position: int, rows: int, cols: int) -> CellArray | None:
        if self._blank and unit != GENERATOR:
            return None
        return super()._load_cells(unit, sample_id, position, rows, cols)


def _show_share(show: ProgressCallback, num_before: int, num_in_round: int, num_all: int, share: float) -> None:
    """Show a part of a round as that part of its images."""
    show(num_before + int(share * num_in_round), num_all)


def sampling_steps(settings: GeneratorSettings, num_steps: int) -> tuple[SamplingStep, ...]:
    """Return the steps from noise to image: of Euler's method for flow matching, else of DDIM."""
    if settings.prediction == "flow":
        return flow_sampling_steps(flow_schedule(settings), num_steps)
    return diffusion_sampling_steps(diffusion_schedule(settings), num_steps)


def to_bytes(image: Tensor) -> Uint8Array:
    """Return the pixels (rows, columns, 3) of an image (3, rows, columns) of numbers from -1 to 1."""
    scaled = ((image.clamp(-1.0, 1.0) + 1.0) * HALF_RANGE).round()
    pixels: Uint8Array = scaled.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return pixels


def _levels_at(settings: GeneratorSettings, timestep: int) -> Levels:
    """Return the levels of noise that belong to what the generator reads as its timestep: two scalars."""
    if settings.prediction == "flow":
        schedule = flow_schedule(settings)
        return schedule.levels(torch.tensor(timestep / schedule.num_steps))
    return diffusion_schedule(settings).levels(torch.tensor(timestep))


def without_user_text(sample: Sample) -> Sample:
    """Return a sample whose users, tools and system prompts say nothing; the marks of their media stay."""
    marks = find_marks(sample)

    def without_text(text: str) -> str:
        places = sorted((at, mark) for mark in marks for at in _occurrences(text, mark))
        return "".join(mark for _, mark in places)

    silent = (*MEDIA_ROLES, "system")
    turns = tuple(replace(turn, text=without_text(turn.text)) if turn.role in silent else turn for turn in sample.turns)
    return replace(sample, turns=turns)


def _occurrences(text: str, mark: str) -> Iterator[int]:
    """Yield where a mark stands in a text."""
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + len(mark))


def _place_of(sample: Sample) -> tuple[str, int]:
    """Return what names a sample among all files."""
    return sample.source, sample.index
