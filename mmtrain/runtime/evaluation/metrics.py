"""Score answers to held-out questions by the metrics of a recipe: those of texts, and functions of other packages."""

from collections.abc import Sequence
from typing import Protocol

from mmtrain.errors import PluginError, UserError
from mmtrain.plugins import Plugin, find_plugin, installed_plugins
from mmtrain.recipe.settings.metric_names import METRICS_ALLOWED, REGEX_PREFIX, check_metric_name, shown_metric_name
from mmtrain.report.trackers import ShownAnswer
from mmtrain.runtime.evaluation.qa_eval import GivenAnswer, asked_text
from mmtrain.runtime.evaluation.text_metrics import METRICS, TextMetric, regex


class AnswerMetric(Protocol):
    """A score of answers, such as their mean edit distance."""

    def __call__(self, answers: Sequence[ShownAnswer]) -> float:
        """Return the score of all answers of an evaluation, without their pictures. Called on rank 0."""
        ...


Metric = TextMetric | Plugin


def find_metrics(names: Sequence[str], setting: str = "train.metrics") -> list[Metric]:
    """Return the metrics of these names, which `setting` has. Raises UserError and PluginError.

    A metric of mmtrain goes before a plug-in of the same name.
    """
    return [_find_metric(name, setting) for name in names]


def _find_metric(name: str, setting: str) -> Metric:
    try:
        check_metric_name(name)
    except ValueError as error:
        raise UserError(f"{setting}: {error}") from None
    if name in METRICS:
        return TextMetric(name, METRICS[name])
    if name.startswith(REGEX_PREFIX):
        return TextMetric(shown_metric_name(name), regex(name.removeprefix(REGEX_PREFIX)))
    plugins = installed_plugins("metrics")
    if ":" not in name and name not in plugins:
        known = f"installed: {', '.join(sorted(plugins))}" if plugins else "none is installed"
        raise UserError(
            f"{setting}: found {name!r}; allowed: {METRICS_ALLOWED}, module:function, or a plug-in of the group "
            f"mmtrain.metrics ({known})"
        )
    return find_plugin("metrics", name, setting)


def score_answers(metrics: Sequence[Metric], answers: Sequence[GivenAnswer]) -> dict[str, float]:
    """Return the score of each metric, by its name without what is before a colon. Raises PluginError."""
    pairs = [(one.expected, one.answered) for one in answers]
    shown = tuple(ShownAnswer(asked_text(one.question), one.expected, one.answered) for one in answers)
    scores = {}
    for metric in metrics:
        if isinstance(metric, TextMetric):
            scores[metric.name] = metric.score(pairs)
            continue
        with metric.errors_named(f"scoring {len(shown)} answers"):
            score = metric.value(shown)
        if not isinstance(score, int | float):
            raise PluginError(f"{metric}: returned {score!r}; allowed: a number")
        scores[shown_metric_name(metric.name)] = float(score)
    return scores
