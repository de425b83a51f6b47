"""Show on stderr how far a planning search is: a progress bar on a terminal, else a few lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import typer

BAR_DELAY_S = 1.0  # a shorter search shows no bar
LINE_DELAY_S = 10.0  # where stderr is no terminal, a shorter search prints no line
NUM_LINES = 4  # lines of progress where stderr is no terminal


@contextmanager
def planning_bar() -> Iterator["PlanningBar"]:
    """Give a progress callback for the planner; close the bar at the end of the context."""
    with ExitStack() as stack:
        yield PlanningBar(stack)


class PlanningBar:
    """Shows candidates that are decided, and what the planner does after them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack  # closes the bar on screen
        self._done = 0
        self._started: float | None = None  # seconds of the monotonic clock
        self._bar: Any = None
        self._shown_since: float | None = None  # start of the whole planning, in seconds of the monotonic clock

    def announce(self, text: str) -> None:
        """Say what is done where no candidates are counted, once planning takes long enough to show anything."""
        if self._shown_since is None:
            return
        delay_s = BAR_DELAY_S if sys.stderr.isatty() else LINE_DELAY_S
        if time.monotonic() - self._shown_since > delay_s:
            self._stack.close()
            self._bar = None
            print(f"planning: {text}", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` candidates are decided. A smaller number than before starts a new search."""
        done_before = self._done
        self._done = done
        if self._started is None or done < done_before:
            self._stack.close()
            self._started = time.monotonic()
            self._shown_since = self._shown_since or self._started
            self._bar = None
        elapsed_s = time.monotonic() - self._started
        if not sys.stderr.isatty():
            is_next_line = done * NUM_LINES // total > done_before * NUM_LINES // total
            if elapsed_s > LINE_DELAY_S and is_next_line:
                print(f"planning: {done * 100 // total}%", file=sys.stderr, flush=True)
            return
        if elapsed_s < BAR_DELAY_S:
            return
        if self._bar is None:
            self._bar = self._stack.enter_context(typer.progressbar(length=total, label="planning", file=sys.stderr))
            done_before = 0
        self._bar.update(done - done_before)
