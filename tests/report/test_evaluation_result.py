"""The scores of an evaluation as JSON, and as a table with examples."""

import io
import json

import pytest
from rich.console import Console

from mmtrain.report import AnsweredQuestion, EvaluationResult, TemplateScore
from mmtrain.report.evaluation_result import print_evaluation

RESULT = EvaluationResult(
    step=400,
    templates=(
        TemplateScore("count shapes", 50, 40, 20, 18, ("images",)),
        TemplateScore("arithmetic", 20, 19, 2, None),
        TemplateScore("read digit", 30, 27, 3, 3, ("images", "clips")),
    ),
    examples=(
        AnsweredQuestion("How many red circles are there?", "3", "3", ("images/1.png", "images/2.png"), ("1.wav",)),
        AnsweredQuestion("What is [2 + 2]?", "4", "5", ()),
    ),
)


def test_json_holds_counts_and_shares() -> None:
    figures = json.loads(RESULT.to_json())
    assert figures["questions"] == 100
    assert figures["exact"] == pytest.approx(0.86)
    assert figures["baseline"] == pytest.approx(0.25)
    assert figures["gap_closed"] == pytest.approx(0.61 / 0.75)
    assert figures["exact_with_images"] == pytest.approx(67 / 80)
    assert figures["blanked_with_images"] == pytest.approx(21 / 80)
    assert figures["exact_with_clips"] == pytest.approx(27 / 30)
    assert figures["blanked_with_clips"] == pytest.approx(3 / 30)
    assert figures["templates"][1] == {
        "template": "arithmetic",
        "questions": 20,
        "exact": 19,
        "baseline": 2,
        "blanked": None,
        "modalities": [],
    }
    assert figures["examples"][1]["answered"] == "5"


def test_table_and_examples() -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in RESULT.to_text(100).splitlines()]
    assert [row for row in rows if row] == [
        ["arithmetic", "20", "95.0%", "10.0%", "-"],
        ["count shapes", "50", "80.0%", "40.0%", "36.0%"],
        ["read digit", "30", "90.0%", "10.0%", "10.0%"],
        ["all with media", "80", "83.8%", "28.7%", "26.2%"],
        ["all", "100", "86.0%", "25.0%", "-"],
    ]
    text = RESULT.to_text(100)
    assert "81.3% of the gap between the most frequent answers and 100% is closed." in text
    assert "Questions with images or clips: 83.8% right, 26.2% with blanked media." in text
    asked = "1. How many red circles are there?\n   images    images/1.png, images/2.png\n   clips     1.wav\n"
    assert f"{asked}   expected  3" in text
    assert "2. What is [2 + 2]?\n   expected  4\n   answered  5" in text


@pytest.mark.parametrize(
    ("templates", "rows"),
    [
        ([TemplateScore("all", 8, 6, 2, 1, ("images",))], ["all"]),
        (
            [TemplateScore("colour", 8, 6, 2, 1, ("images",)), TemplateScore("shape", 4, 3, 1, 1)],
            ["colour", "shape", "all"],
        ),
        ([TemplateScore("arithmetic", 8, 6, 2, None)], ["all"]),
    ],
)
def test_the_table_has_no_row_twice(templates: list[TemplateScore], rows: list[str]) -> None:
    lines = EvaluationResult(1, tuple(templates), ()).to_text().splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == rows


@pytest.mark.parametrize("width", [80, 120])
def test_the_printed_table_fits_the_terminal(width: int) -> None:
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    print_evaluation(RESULT, console)
    assert all(len(line.rstrip()) <= width for line in console.export_text().splitlines())


def test_results_without_media_without_gap_and_without_questions() -> None:
    text_only = EvaluationResult(1, (TemplateScore("arithmetic", 10, 5, 10, None),), ())
    assert text_only.gap_closed is None
    assert "blanked media." not in text_only.to_text()
    assert not any("with" in key for key in json.loads(text_only.to_json())), "no score for media that no question has"
    assert json.loads(EvaluationResult(1, (), ()).to_json())["exact"] is None
    assert "all" in EvaluationResult(1, (), ()).to_text()
