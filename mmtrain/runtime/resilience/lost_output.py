"""Let a process go on when nobody reads its output any more: the terminal was closed, or the pipe has no reader."""

import contextlib
import sys
from typing import Any, TextIO, cast

from mmtrain.printed_text import as_rendered, escape_output


class _TolerantStream:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    @property
    def rich_proxied_file(self) -> TextIO:
        """Where consoles of Rich write to, which would pass by this stream otherwise."""
        return cast(TextIO, _TolerantStream(as_rendered(self._stream)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_lost_output() -> None:
    """Make failing writes to stdout and stderr harmless for the rest of this process.

    A closed ssh session sends SIGHUP, and from then on every write to the terminal fails: without this, the progress
    line would end the run before it has saved.
    """
    escape_output()
    if not isinstance(sys.stdout, _TolerantStream):
        sys.stdout = cast(TextIO, _TolerantStream(sys.stdout))
        sys.stderr = cast(TextIO, _TolerantStream(sys.stderr))
