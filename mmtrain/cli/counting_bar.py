"""Progress of work that is counted in items, on stderr: a bar on a terminal, a few lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from mmtrain.printed_text import as_rendered

NUM_LINES = 4  # where stderr is no terminal


@contextmanager
def counting_bar(label: str, done_word: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many items of how many are done; close the bar at the end of the context.

    label: in front of the bar, such as `decoding`; done_word: of the lines in its place, such as `decoded`.
    """
    with typer.progressbar(length=1, label=label, file=as_rendered(sys.stderr), hidden=not sys.stderr.isatty()) as bar:
        done_before = 0

        def show(done: int, total: int) -> None:
            nonlocal done_before
            bar.length = total
            bar.update(done - done_before)
            is_next_line = done * NUM_LINES // total > done_before * NUM_LINES // total
            if is_next_line and not sys.stderr.isatty():
                print(f"{done_word} {done:,} of {total:,}", file=sys.stderr, flush=True)
            done_before = done

        yield show
