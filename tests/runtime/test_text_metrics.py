"""Metrics of answers: rows that lmms-eval scored, brute force for the edit distance, and names that are refused."""

import doctest
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.english_normalizer import BasicTextNormalizer

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.metric_names import TEXT_METRICS
from mmtrain.runtime.evaluation import text_metrics
from mmtrain.runtime.evaluation.metrics import find_metrics
from mmtrain.runtime.evaluation.text_metrics import METRICS, TextMetric, edit_distance, regex
from tests.runtime.models import evaluated, run_folder
from tests.runtime.taught import Taught, asking, row
from tests.runtime.test_answers_file import lines_of

GOLDEN = json.loads(Path(__file__).with_name("golden_metrics.json").read_text(encoding="utf-8"))  # names its source
ALL_METRICS = {**METRICS, "regex": regex(GOLDEN["pattern"])}


@pytest.mark.parametrize("name", ALL_METRICS)
def test_fifty_answers_are_scored_as_lmms_eval_scores_them(name: str) -> None:
    rows = GOLDEN["rows"]
    assert len(rows) == 50
    assert len({row[name] for row in rows}) > 1
    metric = TextMetric(name, ALL_METRICS[name])
    scores = {(row["expected"], row["answered"]): metric.score([(row["expected"], row["answered"])]) for row in rows}
    expected = {(row["expected"], row["answered"]): row[name] for row in rows}
    assert scores == pytest.approx(expected)


def test_the_word_errors_of_all_answers_are_divided_by_their_words() -> None:
    pairs = [(row["expected"], row["answered"]) for row in GOLDEN["rows"]]
    assert TextMetric("wer", METRICS["wer"]).score(pairs) == pytest.approx(GOLDEN["wer_of_all"])
    mean = sum(row["wer"] for row in GOLDEN["rows"]) / 50
    assert mean != pytest.approx(GOLDEN["wer_of_all"])


@given(st.text("abc", max_size=7), st.text("abcd", max_size=7))
def test_the_edit_distance_is_that_of_brute_force(first: str, second: str) -> None:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        replaced = distance(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, replaced)

    assert edit_distance(first, second) == distance(len(first), len(second))


@given(st.text("aB é'-.,()[]<>\n½ﬁ", max_size=20))
def test_spoken_words_are_those_of_whisper(text: str) -> None:
    assert text_metrics._spoken_words(text) == BasicTextNormalizer()(text).split()


def test_the_examples_of_the_definitions_hold() -> None:
    assert doctest.testmod(text_metrics).failed == 0
    assert tuple(METRICS) == TEXT_METRICS


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["regex"], r"metrics.0: found 'regex' without a pattern; write it behind: 'regex=answer is (\w+)'"),
        (["anls", "regex=("], "metrics.1: found 'regex=(', whose pattern cannot be read: missing ), unterminated"),
        (["regex=x*"], "metrics.0: found 'regex=x*', whose pattern matches the empty text, and so any"),
        (["word error"], "metrics.0: found 'word error'; allowed: exact, contains, anls, f1, wer, regex=PATTERN"),
        (["regex=a", "regex=b"], "metrics: found 2 patterns, 'regex=a' and 'regex=b'; allowed: one"),
    ],
)
def test_a_name_that_is_none_is_refused(taught: Taught, names: list[str], says: str) -> None:
    plain = taught.settings.model_dump()
    plain["train"]["metrics"] = names
    with pytest.raises(ValueError, match="metrics") as refused:
        Recipe.model_validate(plain)
    key, _, message = says.partition(": ")
    assert message in str(refused.value)
    assert f"train.{key}\n" in str(refused.value)


def test_a_name_that_nothing_has_is_refused_with_what_is_there() -> None:
    allowed = r"allowed: exact, contains, anls, f1, wer, regex=PATTERN, module:function, or a plug-in of the group"
    with pytest.raises(UserError, match=rf"--metric: found 'rouge'; {allowed} mmtrain\.metrics \(none is installed\)"):
        find_metrics(["rouge"], "--metric")
    with pytest.raises(UserError, match="--metric: found 'regex' without a pattern"):
        find_metrics(["regex"], "--metric")


def test_an_evaluation_scores_by_the_metrics_of_its_recipe(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metric.py").write_text(
        "def reds(answers):\n    return sum(a.answered == 'red' for a in answers)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [*taught.rows, asking("colour", row("<image>What colour?", "Red!", "red.png"))]
    plain = taught.recipe(taught.rows, rows).model_dump()
    plain["train"]["metrics"] = ["anls", "f1", "wer", "own_metric:reds"]
    folder = run_folder(tmp_path / "run", Recipe.model_validate(plain), taught.model)
    out = tmp_path / "answers.jsonl"
    result = evaluated(folder, out=out)
    sys.modules.pop("own_metric")
    assert result.metrics == pytest.approx({"anls": (4 + 0.75) / 5, "f1": 1, "wer": 0, "reds": 2})
    scores = {line["expected"]: line["score"] for line in lines_of(out)}
    assert scores["Red!"] == {"exact": 0, "anls": 0.75, "f1": 1, "wer": 0}
    assert json.loads(result.to_json())["metrics"] == result.metrics
    assert "Of all answers: anls 0.9500, f1 1.0000, wer 0.0000, reds 2.0000." in result.to_text()
    asked = evaluated(folder, metrics=("contains", "regex=([a-z]+)"))
    assert asked.metrics == {"contains": 0.8, "regex": 0.6}, "it finds nothing in 3, and ed in the expected Red!"
