"""Work that is counted in items shows a bar on a terminal, and a few lines elsewhere."""

import io

import pytest

from mmtrain.cli import counting_bar as bar_module
from mmtrain.cli.counting_bar import counting_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on_stderr(monkeypatch: pytest.MonkeyPatch, counts: list[int], stderr: io.StringIO) -> str:
    """Count up to 40 through these numbers; return what is on stderr."""
    monkeypatch.setattr(bar_module.sys, "stderr", stderr)
    with counting_bar("answering", "answered") as show:
        for count in counts:
            show(count, 40)
    return stderr.getvalue()


def test_a_terminal_shows_a_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on_stderr(monkeypatch, [7, 25, 40], Terminal())
    assert "answering" in shown
    assert "100%" in shown
    assert "answered" not in shown


def test_elsewhere_four_lines_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_on_stderr(monkeypatch, list(range(1, 41)), io.StringIO()).splitlines()
    assert lines == [f"answered {count} of 40" for count in (10, 20, 30, 40)]
    assert shown_on_stderr(monkeypatch, [3, 25, 40], io.StringIO()).splitlines() == [
        "answered 25 of 40",
        "answered 40 of 40",
    ]
