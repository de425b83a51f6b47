"""How far planning is: told once it takes long, a bar on a terminal and a few lines elsewhere."""

import io
import itertools

import pytest

from mmtrain.cli import planning_bar as bar_module
from mmtrain.cli.planning_bar import planning_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]], seconds: float, stderr: io.StringIO) -> str:
    """What stands on stderr after these steps, each of which takes so long."""
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bar_module.sys, "stderr", stderr)
    with planning_bar() as bar:
        for done, total in steps:
            bar(done, total)
    return stderr.getvalue()


def test_a_search_that_stays_at_one_candidate_for_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much work may go into one candidate before the next is settled."""
    steps = [(0, 8), (1, 8), (1, 8), (1, 8), (2, 8), (2, 8), (4, 8), (8, 8)]
    shown = told(monkeypatch, steps, 0.4, Terminal())
    assert "planning" in shown
    assert "100%" in shown
    assert told(monkeypatch, steps, 0.01, Terminal()) == ""


def test_where_no_bar_can_be_drawn_a_few_lines_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(i, 40) for i in range(41)]
    lines = told(monkeypatch, steps, 2.0, io.StringIO()).splitlines()
    assert lines == ["planning: 25%", "planning: 50%", "planning: 75%", "planning: 100%"]
