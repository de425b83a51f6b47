"""What a model with a generator drew of held-out captions, and how well it tells noise from held-out images."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class BucketLoss:
    """The mean squared error of predictions at the timesteps [start, stop)."""

    start: int
    stop: int
    loss: float
    blanked: float | None  # with blanked captions; None if these were blanked anyway


@dataclass(frozen=True)
class DrawingResult:
    """Images drawn of held-out captions, and losses on the images that belong to them."""

    samples: int
    images: int
    sampler: str  # "ddim" or "euler"
    steps: int
    guidance: float
    seed: int
    folder: str  # of the images
    grid: str
    losses: tuple[BucketLoss, ...]

    @property
    def loss(self) -> float:
        """The mean over all buckets."""
        return _mean([bucket.loss for bucket in self.losses])

    @property
    def blanked_loss(self) -> float | None:
        """The mean over all buckets with blanked captions."""
        losses = [bucket.blanked for bucket in self.losses if bucket.blanked is not None]
        return _mean(losses) if losses else None


def drawing_table(result: DrawingResult) -> Table:
    """Return the losses by bucket of timesteps, the least noisy first."""
    table = Table(title=f"Denoising loss on {result.images} held-out images", title_justify="left")
    table.add_column("timesteps")
    for column in ("model", "blanked captions"):
        table.add_column(column, justify="right")
    for bucket in result.losses:
        table.add_row(f"{bucket.start}-{bucket.stop - 1}", _number(bucket.loss), _number(bucket.blanked))
    table.add_section()
    table.add_row("all", _number(result.loss), _number(result.blanked_loss), style="bold")
    return table


def drawing_sentences(result: DrawingResult) -> list[str]:
    """Return how the images were drawn, and where they are."""
    guidance = f"guidance {result.guidance:g}" if result.guidance != 1.0 else "no guidance"
    sampler = {"ddim": "DDIM", "euler": "Euler's method"}[result.sampler]
    drawn = f"{result.images} images of {result.samples} held-out samples drawn in {result.steps} steps of {sampler}"
    return [f"{drawn}, {guidance}, seed {result.seed}: {result.folder}", f"Beside their targets: {result.grid}"]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
