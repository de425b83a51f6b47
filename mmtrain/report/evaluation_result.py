"""What a trained model answers right, and what that is worth.

Two figures stand beside the share of exactly right answers: a *baseline* that gives each question template its
most frequent answer of the training data, without a look at anything, and the same model with *blanked* images and
clips. Only what lies above both was learned from these.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

MEDIA_KINDS = ("images", "clips")


@dataclass(frozen=True)
class TemplateScore:
    """Counts for one kind of question. `blanked` is None where the questions have no media."""

    template: str
    questions: int
    exact: int  # answered exactly right
    baseline: int  # right if always answered with the most frequent answer
    blanked: int | None  # answered exactly right without seeing the images or hearing the clips
    modalities: tuple[str, ...] = ()  # of MODALITIES, those that some of the questions have

    def share(self, count: int | None) -> float | None:
        """A count as part of the questions asked; None when there is none, or nothing was asked."""
        return None if count is None or not self.questions else count / self.questions


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question as it was asked and answered."""

    question: str
    expected: str
    answered: str
    images: tuple[str, ...]
    clips: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a model at `step` on held-out questions."""

    step: int
    templates: tuple[TemplateScore, ...]
    examples: tuple[AnsweredQuestion, ...]

    @property
    def total(self) -> TemplateScore:
        """All questions together; `blanked` only if all have media."""
        return _sum("all", self.templates)

    @property
    def with_media(self) -> TemplateScore:
        """The questions that have images or clips, together."""
        return _sum("all with media", [score for score in self.templates if score.blanked is not None])

    @property
    def gap_closed(self) -> float | None:
        """How far the model came on the way from the baseline to 1; None when the baseline is already there."""
        total = self.total
        room = total.questions - total.baseline
        return (total.exact - total.baseline) / room if room else None

    def to_json(self) -> str:
        """The counts, the figures drawn from them and the examples."""
        total = self.total
        figures = {
            "questions": total.questions,
            "exact": total.share(total.exact),
            "baseline": total.share(total.baseline),
            "gap_closed": self.gap_closed,
        }
        for modality in total.modalities:
            having = _sum(modality, [score for score in self.templates if modality in score.modalities])
            figures[f"exact_with_{modality}"] = having.share(having.exact)
            figures[f"blanked_with_{modality}"] = having.share(having.blanked)
        return json.dumps({**figures, **asdict(self)}, indent=2, ensure_ascii=False)

    def to_text(self, width: int = 100) -> str:
        """What `print_evaluation` shows, without colours."""
        console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
        with console.capture() as capture:
            print_evaluation(self, console)
        return capture.get()


def print_evaluation(result: EvaluationResult, console: Console) -> None:
    """Print the table of scores, what they mean in two sentences, and the examples."""
    console.print(_table(result))
    console.print(Text("\n".join(_sentences(result))))
    for number, example in enumerate(result.examples, 1):
        right = example.expected == example.answered
        lines = [f"\n{number}. {example.question}"]
        for modality in MEDIA_KINDS:
            if media := getattr(example, modality):
                lines.append(f"   {modality:<10}{', '.join(media)}")
        lines.append(f"   expected  {example.expected}")
        console.print(Text("\n".join(lines)))
        console.print(Text.assemble("   answered  ", (example.answered, "green" if right else "red")))


def _table(result: EvaluationResult) -> Table:
    table = Table(
        title=f"Held-out questions after step {result.step}: share answered exactly right", title_justify="left"
    )
    table.add_column("questions")
    for column in ("asked", "model", "most frequent answer", "blanked media"):
        table.add_column(column, justify="right")
    for score in sorted(result.templates, key=lambda score: score.template):
        table.add_row(*_cells(score))
    table.add_section()
    for score in (result.with_media, result.total):
        table.add_row(*_cells(score), style="bold")
    return table


def _cells(score: TemplateScore) -> list[str]:
    shares = [_percent(score.share(count)) for count in (score.exact, score.baseline, score.blanked)]
    return [score.template, str(score.questions), *shares]


def _sentences(result: EvaluationResult) -> list[str]:
    said = []
    if result.gap_closed is not None:
        said.append(f"{_percent(result.gap_closed)} of the gap from the most frequent answers to 100% is closed.")
    seeing = result.with_media
    if seeing.questions:
        said.append(
            f"Questions with images or clips: {_percent(seeing.share(seeing.exact))} right, "
            f"{_percent(seeing.share(seeing.blanked))} when these are blanked."
        )
    return said


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
