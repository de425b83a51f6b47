"""Scores of a trained model on held-out questions, compared with a baseline and with blanked media.

The *baseline* gives each question template its most frequent answer in the training data. *Blanked* scores are those of
the same model with gray images and silent clips. Only a score above both shows that the model uses the media.

Of a model with a generator: what it drew of held-out captions, and how well it tells noise from held-out images.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape

from rich.table import Table
from rich.text import Text

from mmtrain.report.console import Console

MEDIA_KINDS = ("images", "clips")


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


@dataclass(frozen=True)
class TemplateScore:
    """Counts for one question template. `blanked` is None if its questions have no media."""

    template: str
    questions: int
    exact: int  # answers that match exactly
    baseline: int  # exact matches of the most frequent answer
    blanked: int | None  # exact matches with gray images and silent clips
    modalities: tuple[str, ...] = ()  # those of MEDIA_KINDS that some of the questions have

    def share(self, count: int | None) -> float | None:
        """Return a count as a share of the questions; None if the count is None or there are no questions."""
        return None if count is None or not self.questions else count / self.questions

    def cells(self) -> list[str]:
        """Return the row of a table: template, questions, and the shares of exact answers."""
        shares = [_percent(self.share(count)) for count in (self.exact, self.baseline, self.blanked)]
        return [self.template, str(self.questions), *shares]


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question with the expected and the given answer."""

    question: str
    expected: str
    answered: str
    images: tuple[str, ...]
    clips: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a model at `step` on held-out questions, and what it drew of held-out captions."""

    step: int
    templates: tuple[TemplateScore, ...]
    examples: tuple[AnsweredQuestion, ...]
    drawings: DrawingResult | None = None  # of a model with a generator
    metrics: dict[str, float] = field(default_factory=dict)  # of all answers, by the names of `train.metrics`

    @property
    def total(self) -> TemplateScore:
        """The sum over all questions; `blanked` is None unless all have media."""
        return _sum("all", self.templates)

    @property
    def with_media(self) -> TemplateScore:
        """The sum over the questions that have images or clips."""
        return _sum("all with media", [score for score in self.templates if score.blanked is not None])

    @property
    def gap_closed(self) -> float | None:
        """The share of the gap between baseline and 100% that the model closes; None if the baseline is at 100%."""
        total = self.total
        gap = total.questions - total.baseline
        return (total.exact - total.baseline) / gap if gap else None

    def to_json(self) -> str:
        """Return the counts, the shares derived from them, and the examples as JSON text."""
        total = self.total
        figures = {
            "questions": total.questions,
            "exact": total.share(total.exact),
            "baseline": total.share(total.baseline),
            "gap_closed": self.gap_closed,
        }
        for modality in total.modalities:
            subtotal = _sum(modality, [score for score in self.templates if modality in score.modalities])
            figures[f"exact_with_{modality}"] = subtotal.share(subtotal.exact)
            figures[f"blanked_with_{modality}"] = subtotal.share(subtotal.blanked)
        if self.drawings is not None:
            figures["drawing_loss"] = self.drawings.loss
            figures["blanked_drawing_loss"] = self.drawings.blanked_loss
        return json.dumps({**figures, **asdict(self)}, indent=2, ensure_ascii=False)

    def to_text(self, width: int = 100) -> str:
        """Write what `print_evaluation` prints, without colors."""
        console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
        with console.capture() as capture:
            print_evaluation(self, console)
        return capture.get()

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        total = self.total
        return (
            f"EvaluationResult(step {self.step}: {total.exact} of {total.questions} answers are right, "
            f"{total.baseline} of the baseline)"
        )

    def _repr_html_(self) -> str:
        from mmtrain.report.html import table_html  # the page is long to import, and few show results so
        from mmtrain.report.notebook_html import notebook_view

        scores = [*(self.templates if len(self.templates) > 1 else ()), self.total]
        head = ("questions", "asked", "model", "most frequent answer", "blanked media")
        parts = [table_html(head, [score.cells() for score in scores])]
        if self.drawings is not None:
            parts = [f"<pre>{escape(self.to_text())}</pre>"]
        elif self.examples:
            rows = [(example.question, example.expected, example.answered) for example in self.examples]
            parts.append(table_html(("question", "expected", "answered"), rows, wrap_last=True))
        return notebook_view(f"Held-out questions after step {self.step}: share of exact answers", *parts)


def print_evaluation(result: EvaluationResult, console: Console) -> None:
    """Print what was drawn, then the table of scores, two sentences on what they mean, and the examples."""
    if result.drawings is not None:
        console.print(drawing_table(result.drawings))
        console.print(Text("\n".join(drawing_sentences(result.drawings)), overflow="fold"))
    if result.drawings is not None and not result.templates:
        return
    console.print(_table(result))
    console.print(Text("\n".join(_sentences(result))))
    for number, example in enumerate(result.examples, 1):
        right = example.expected == example.answered
        lines = [f"\n{number}. {example.question}"]
        for modality in MEDIA_KINDS:
            media = getattr(example, modality)
            if media:
                lines.append(f"   {modality:<10}{', '.join(media)}")
        lines.append(f"   expected  {example.expected}")
        console.print(Text("\n".join(lines)))
        console.print(Text.assemble("   answered  ", (example.answered, "green" if right else "red")))


def _table(result: EvaluationResult) -> Table:
    table = Table(title=f"Held-out questions after step {result.step}: share of exact answers", title_justify="left")
    table.add_column("questions")
    for column in ("asked", "model", "most frequent answer", "blanked media"):
        table.add_column(column, justify="right")
    if len(result.templates) > 1:  # a single one is the total
        for score in sorted(result.templates, key=lambda score: score.template):
            table.add_row(*score.cells())
        table.add_section()
    if 0 < result.with_media.questions < result.total.questions:
        table.add_row(*result.with_media.cells(), style="bold")
    table.add_row(*result.total.cells(), style="bold")
    return table


def _sentences(result: EvaluationResult) -> list[str]:
    sentences = []
    if result.gap_closed is not None:
        sentences.append(
            f"{_percent(result.gap_closed)} of the gap between the most frequent answers and 100% is closed."
        )
    if result.metrics:
        scores = ", ".join(f"{name} {score:.4f}" for name, score in result.metrics.items())
        sentences.append(f"Of all answers: {scores}.")
    with_media = result.with_media
    if with_media.questions:
        sentences.append(
            f"Questions with images or clips: {_percent(with_media.share(with_media.exact))} right, "
            f"{_percent(with_media.share(with_media.blanked))} with blanked media."
        )
    return sentences


def _sum(name: str, scores: Sequence[TemplateScore]) -> TemplateScore:
    blanked = [score.blanked for score in scores if score.blanked is not None]
    return TemplateScore(
        name,
        sum(score.questions for score in scores),
        sum(score.exact for score in scores),
        sum(score.baseline for score in scores),
        sum(blanked) if len(blanked) == len(scores) else None,
        tuple(name for name in MEDIA_KINDS if any(name in score.modalities for score in scores)),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
