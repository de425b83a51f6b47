"""Give every command streams that it can write to, whatever the program that started it has left of them."""

import contextlib
import io
import os
import sys
from typing import TextIO, cast

from mmtrain.printed_text import escape_output

_DESCRIPTORS = (0, 1, 2)


def mend_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters that the output lacks or a terminal obeys.

    To be called before anything is opened: a checkpoint or a socket would get the number of a closed stream, and what
    libraries print would go there.
    """
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = _text_of(0, "r")
    if sys.stdout is None:
        sys.stdout = _text_of(1, "w")
    if sys.stderr is None:
        sys.stderr = _text_of(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="backslashreplace")
    escape_output()


def _text_of(descriptor: int, mode: str) -> TextIO:
    return cast(TextIO, open(descriptor, mode, encoding="utf-8", closefd=False))
