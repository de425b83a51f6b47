"""Show text without credentials, and text of others without what a terminal would obey.

Names, messages and keys come from files of anyone. An escape sequence could rename the window, write to the clipboard
or move the cursor over what stands there, and a mark of writing direction could show a path as another one. All that a
command prints goes through here.
"""

import re
import sys
from typing import Any, TextIO, cast

from mmtrain.redaction import process_redactor

# Control characters but the newline and the tab, marks that change the direction of writing, and line separators.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Write what a terminal would obey as an escape sequence of Python.

    >>> print(escape_controls("red\x1b[2J \u202egnp.exe"))
    red\x1b[2J \u202egnp.exe
    """
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def shown_text(text: str) -> str:
    """Return a text as it is printed: without credentials, and with what a terminal would obey escaped."""
    return escape_controls(process_redactor()(text))


class _EscapingStream:
    """A text stream that masks credentials in what is written to it, and escapes what a terminal would obey."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # By this name Rich finds the stream that its own sequences go to. Its consoles are ours, which escape texts.
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self._stream.write(shown_text(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_output() -> None:
    """Make this process mask and escape what it prints from now on, by `shown_text`."""
    if not hasattr(sys.stdout, "rich_proxied_file"):
        sys.stdout = cast(TextIO, _EscapingStream(sys.stdout))
    if not hasattr(sys.stderr, "rich_proxied_file"):
        sys.stderr = cast(TextIO, _EscapingStream(sys.stderr))


def as_rendered(stream: TextIO) -> TextIO:
    """Return where text goes that one of our consoles has rendered with colors: its foreign parts are escaped."""
    return cast(TextIO, getattr(stream, "rich_proxied_file", stream))
