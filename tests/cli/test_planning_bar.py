"""A long planning search shows its progress: a bar on a terminal, a few lines elsewhere."""

import io
import itertools

import pytest

from mmtrain.cli import run_plan as bar_module
from mmtrain.cli.run_plan import planning_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on_stderr(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]], seconds_per_step: float, stderr: io.StringIO
) -> str:
    """Report these steps as progress, each taking this long; return what is on stderr."""
    clock = itertools.count(step=seconds_per_step)
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bar_module.sys, "stderr", stderr)
    with planning_bar() as bar:
        for done, total in steps:
            bar(done, total)
    return stderr.getvalue()


def test_a_long_search_shows_a_bar_and_a_short_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count may stand still for long, since one candidate can take most of the work."""
    steps = [(0, 8), (1, 8), (1, 8), (1, 8), (2, 8), (2, 8), (4, 8), (8, 8)]
    shown = shown_on_stderr(monkeypatch, steps, 0.4, Terminal())
    assert "planning" in shown
    assert "100%" in shown
    assert shown_on_stderr(monkeypatch, steps, 0.01, Terminal()) == ""


def test_without_a_terminal_four_lines_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(i, 40) for i in range(41)]
    lines = shown_on_stderr(monkeypatch, steps, 2.0, io.StringIO()).splitlines()
    assert lines == ["planning: 25%", "planning: 50%", "planning: 75%", "planning: 100%"]


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"), [(6.0, ["planning: 100%", "planning: proving it"]), (0.1, [])]
)
def test_what_follows_the_search_is_said_after_a_long_one(
    monkeypatch: pytest.MonkeyPatch, seconds_per_step: float, expected: list[str]
) -> None:
    stderr = io.StringIO()
    clock = itertools.count(step=seconds_per_step)
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bar_module.sys, "stderr", stderr)
    with planning_bar() as bar:
        bar.announce("too early to say")
        bar(0, 1)
        bar(1, 1)
        bar.announce("proving it")
    assert stderr.getvalue().splitlines() == expected
