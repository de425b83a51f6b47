"""The part of `mmtrain evaluate` that lets a model with a generator draw."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mmtrain.data import Quarantined
from mmtrain.data.callbacks import ProgressCallback
from mmtrain.data.media.target_images import TargetImageReader
from mmtrain.errors import UserError
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.report.evaluation_result import BucketLoss, DrawingResult
from mmtrain.runtime.evaluation.drawer import (
    NUM_LOSS_BUCKETS,
    NUM_TIMESTEPS,
    Drawer,
    DrawnBatch,
    SamplingOptions,
)
from mmtrain.runtime.evaluation.drawn_files import GRID_FILE, DrawnImage, require_own_folder, write_images
from mmtrain.runtime.evaluation.qa_eval import evenly_spaced
from mmtrain.runtime.execution.unit import UnitRunner

CountingBar = Callable[[str], AbstractContextManager[ProgressCallback]]  # of a label
DEFAULT_IMAGES, DEFAULT_STEPS, DEFAULT_GUIDANCE = 64, 50, 3.0
SAMPLES_FOLDER = "samples"  # in the folder of a run


@dataclass(frozen=True)
class DrawingRequest:
    """How held-out images are drawn, as the command line asks for it; None: the default."""

    samples: int | None = None  # held-out samples to draw, at most
    steps: int | None = None  # calls of the generator for an image, twice as many with guidance
    guidance: float | None = None
    seed: int | None = None
    folder: Path | None = None


DEFAULT_DRAWING = DrawingRequest()


def choose_options(request: DrawingRequest, settings: GeneratorSettings | None) -> SamplingOptions | None:
    """Return how a model draws; None for one without a generator. Raises UserError for what it cannot do."""
    if settings is None:
        if request != DEFAULT_DRAWING:
            raise UserError(
                "this run has no model.generator, so there is nothing to draw; leave out --draw, --steps, --guidance, "
                "--seed and --samples"
            )
        return None
    steps = DEFAULT_STEPS if request.steps is None else request.steps
    if steps > NUM_TIMESTEPS:
        raise UserError(f"--steps: found {steps}, allowed: 1 to {NUM_TIMESTEPS}, the timesteps that were trained")
    has_dropout = settings.context_dropout > 0
    guidance = request.guidance
    if guidance is None:
        guidance = DEFAULT_GUIDANCE if has_dropout else 1.0
    if guidance != 1.0 and not has_dropout:
        raise UserError(
            f"--guidance: found {guidance:g}, allowed for this run: 1, because it never learned to draw without a "
            "caption; train with model.generator.context_dropout, such as 0.1"
        )
    return SamplingOptions(steps, guidance, request.seed or 0)


def single_stages(units: Mapping[str, UnitRunner]) -> dict[str, StageModule]:
    """Return the only stage of every unit."""
    stages = {}
    for name, unit in units.items():
        [stage] = unit.stages.values()
        stages[name] = stage
    return stages


def draw_held_out(
    drawer: Drawer, request: DrawingRequest, folder: Path, counting: CountingBar, *, blank: bool
) -> tuple[DrawingResult | None, list[Quarantined]]:
    """Draw held-out samples into a folder, on all ranks together; None if no sample has an image to draw.

    With `blank`, captions are blanked, else both are drawn; `counting` opens a bar for each. Samples whose images
    cannot be decoded are left out, and returned with the reason. The first rank writes. Raises UserError for a folder
    that cannot be written.
    """
    world = drawer.world
    options = choose_options(request, drawer.settings)
    assert options is not None, "a drawer has a generator"
    with_targets = [
        number for number, sample in enumerate(drawer.index.samples) if sample.target_images and sample.cut is None
    ]
    numbers = evenly_spaced(with_targets, request.samples or DEFAULT_IMAGES)
    if not numbers:
        return None, []
    world.on_first(lambda: require_own_folder(folder))
    with counting("drawing") as show:
        drawn = _draw_together(drawer, numbers, options, show, blank=blank)
    blanked = None
    if not blank:
        with counting("drawing blanked captions") as show:
            blanked = _draw_together(drawer, numbers, options, show, blank=True)
    return world.on_first(lambda: _write_drawn(drawer, drawn, blanked, options, folder))


def _draw_together(
    drawer: Drawer, numbers: Sequence[int], options: SamplingOptions, show: ProgressCallback, *, blank: bool
) -> DrawnBatch:
    """Draw all images of these samples, shared by all ranks; return them on the first rank, and none on others."""
    parts = drawer.world.gather_to_first(drawer.draw(numbers, options, blank=blank, show=show))
    return DrawnBatch.joined(cast(list[DrawnBatch], parts))


def _write_drawn(
    drawer: Drawer, drawn: DrawnBatch, blanked: DrawnBatch | None, options: SamplingOptions, folder: Path
) -> tuple[DrawingResult, list[Quarantined]]:
    """Write what all ranks drew beside its targets; return the result, and what cannot be decoded."""
    images = _with_targets(drawer, drawn, blanked)
    write_images(folder, images)
    result = DrawingResult(
        samples=len({image.number for image in images}),
        images=len(images),
        sampler="euler" if drawer.settings.prediction == "flow" else "ddim",
        steps=options.steps,
        guidance=options.guidance,
        seed=options.seed,
        folder=str(folder),
        grid=str(folder / GRID_FILE),
        losses=_losses(drawn, blanked),
    )
    return result, [*drawn.bad]


def _with_targets(drawer: Drawer, drawn: DrawnBatch, blanked: DrawnBatch | None) -> list[DrawnImage]:
    """Return drawn images in the order of the samples, each with its target."""
    reader = TargetImageReader(drawer.settings, drawer.recipe.data)
    images = []
    for number, place in sorted(drawn.images):
        sample = drawer.index.samples[number]
        target = reader.load_pixels(sample.target_images[place])
        without = None if blanked is None else blanked.images[number, place]
        images.append(DrawnImage(number, place, sample, target, drawn.images[number, place], without))
    return images


def _losses(drawn: DrawnBatch, blanked: DrawnBatch | None) -> tuple[BucketLoss, ...]:
    width = NUM_TIMESTEPS // NUM_LOSS_BUCKETS
    elements = max(drawn.num_elements, 1)
    return tuple(
        BucketLoss(
            bucket * width,
            (bucket + 1) * width,
            squares / elements,
            None if blanked is None else blanked.squared_errors[bucket] / elements,
        )
        for bucket, squares in enumerate(drawn.squared_errors)
    )
