"""Give a command the three standard streams that it prints to, whatever it was started with."""

import os
import sys
from io import TextIOWrapper


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and let no character be unprintable.

    A closed descriptor is more than lost output: the next file or socket that is opened takes its number, and what is
    printed goes there. Characters that the encoding of a stream lacks, such as a bar's, become `?`.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
