"""Score the answers of a run's held-out evaluation by functions of other packages."""

from collections.abc import Sequence
from typing import Protocol

from mmtrain.errors import PluginError
from mmtrain.plugins import Plugin, find_plugin
from mmtrain.report.trackers import ShownAnswer
from mmtrain.runtime.evaluation.qa_eval import GivenAnswer, asked_text


class AnswerMetric(Protocol):
    """A score of answers, such as their mean edit distance."""

    def __call__(self, answers: Sequence[ShownAnswer]) -> float:
        """Return the score of all answers of an evaluation, without their pictures. Called on rank 0."""
        ...


def find_metrics(names: tuple[str, ...]) -> list[Plugin]:
    """Return the plug-ins that `train.metrics` names. Raises UserError and PluginError."""
    return [find_plugin("metrics", name, "train.metrics") for name in names]


def score_answers(metrics: Sequence[Plugin], answers: Sequence[GivenAnswer]) -> dict[str, float]:
    """Return the score of each metric, by `val_` and the name that the recipe has. Raises PluginError."""
    shown = tuple(ShownAnswer(asked_text(one.question), one.expected, one.answered) for one in answers)
    scores = {}
    for metric in metrics:
        with metric.errors_named(f"scoring {len(shown)} answers"):
            score = metric.value(shown)
        if not isinstance(score, int | float):
            raise PluginError(f"{metric}: returned {score!r}; allowed: a number")
        scores[f"val_{metric.name.rpartition(':')[2]}"] = float(score)
    return scores
