"""Sample lengths and grouping methods as text and as a figure."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.balance.grouping.imbalance import ImbalanceBound
from mmtrain.balance.grouping.summary import GroupingScore, summarize_lengths
from mmtrain.errors import UserError
from mmtrain.report.data_view import grouping_text, stats_picture, stats_text

VALUES = np.array([[10.0, 0.0, 1.0], [30.0, 5000.0, 1.0], [20.0, 3.0, 1.0], [20.0, 4.0, 1.0]])
SUMMARY = summarize_lengths(("LLM tokens", "pixels", "images"), VALUES)


def test_stats_show_a_histogram_for_each_measure_and_quarantined_samples() -> None:
    text = stats_text(SUMMARY, {"missing_image": 1, "too_long": 2})
    assert "LLM tokens: 80 in total, mean 20, median 20, 95% below 28.5, largest 30" in text
    assert "pixels in 3 of 4 samples" in text
    assert "images: 1 in each of 4 samples" in text
    fullest = max((line for line in text.splitlines() if "█" in line), key=lambda line: line.count("█"))
    assert fullest.split()[0] == "20"
    assert fullest.endswith("█ 2")
    assert "4 samples, 3 others quarantined: too_long 2, missing_image 1" in text
    titled = text.partition("Correlation over samples")[2]
    measures = [line.split("│")[1].strip() for line in titled.splitlines() if line.startswith("│")]
    assert measures == ["LLM tokens", "pixels"], "images do not vary"
    assert "Correlation" not in stats_text(summarize_lengths(("LLM tokens", "images"), VALUES[:, [0, 2]]), {})
    assert stats_text(summarize_lengths(("a",), np.zeros((0, 1))), {}) == "a: none\n\n0 samples, none quarantined"


BOUNDS = {"llm": ImbalanceBound(0.0, 0.0, None), "vision": ImbalanceBound(0.01, 0.12, 7)}


def test_the_table_marks_the_recipes_method() -> None:
    rows = [
        GroupingScore("matched", 10, 4.0, 0.98, None, {"llm": 0.001, "vision": 0.02}, BOUNDS, 1.01, 0.5),
        GroupingScore("random", 12, 3.3, 0.8, 0.4, {"llm": 0.3, "vision": 0.4}, BOUNDS, 1.5, 0.01),
    ]
    text = grouping_text(rows, "matched", 8, lambda i: f"sample number {i}")
    assert "load imbalance of vision: in 12% of steps a single sample exceeds the mean load" in text
    assert "the largest is sample number 7), so dist cannot be below 0.0100" in " ".join(text.split())
    assert "load imbalance of llm" not in text
    matched, random = (line for line in text.splitlines() if "│" in line)
    cells = [cell.strip() for cell in matched.split("│")[1:-1]]
    assert cells == ["matched *", "10", "4.00", "0.980", "-", "0.0010", "0.0200", "1.0100", "0.50"]
    assert "0.400" in random
    assert "8 replicas side by side" in text


def test_the_figure_has_a_panel_for_each_measure_that_varies(tmp_path: Path) -> None:
    stats_picture(SUMMARY, tmp_path / "a.png")
    stats_picture(summarize_lengths(("LLM tokens",), VALUES[:, :1]), tmp_path / "b.png")
    with Image.open(tmp_path / "a.png") as two_panels, Image.open(tmp_path / "b.png") as one_panel:
        assert two_panels.format == "PNG"
        assert two_panels.height > 1.5 * one_panel.height
        dark = np.asarray(two_panels.convert("L")) < 128
    assert 0.01 < dark.mean() < 0.5, "something is drawn"


def test_a_figure_that_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--png .*: cannot write the figure: No such file"):
        stats_picture(SUMMARY, tmp_path / "no" / "a.png")
    imported = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'mmtrain\[report\]'"):
        stats_picture(SUMMARY, tmp_path / "a.png")
