"""Show on stderr how far a planning search is."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mmtrain.plan.search.best_first_search import Progress

BAR_DELAY_S = 1.0  # a search that is over by then shows no bar
LINE_DELAY_S = 10.0  # and where no bar can be drawn, says nothing before
NUM_LINES = 4  # lines where no bar can be drawn


@contextmanager
def planning_bar() -> Iterator["Progress"]:
    """Shows on stderr how far a search is that takes longer than a moment: a bar on a terminal, else a few lines."""
    with ExitStack() as shown:
        bar = _PlanningBar(shown)
        yield bar.told


class _PlanningBar:
    def __init__(self, shown: ExitStack) -> None:
        self._shown, self._done = shown, 0
        self._began: float | None = None
        self._bar: Any = None

    def told(self, done: int, total: int) -> None:
        """Candidate `done` of `total` is settled; a new search begins at 0."""
        before, self._done = self._done, done
        if self._began is None or done < before:
            self._shown.close()
            self._began, self._bar = time.monotonic(), None
        passed = time.monotonic() - self._began
        if not sys.stderr.isatty():
            if passed > LINE_DELAY_S and done * NUM_LINES // total > before * NUM_LINES // total:
                print(f"planning: {done * 100 // total}%", file=sys.stderr, flush=True)
            return
        if passed < BAR_DELAY_S:
            return
        if self._bar is None:
            self._bar = self._shown.enter_context(typer.progressbar(length=total, label="planning", file=sys.stderr))
            before = 0
        self._bar.update(done - before)
