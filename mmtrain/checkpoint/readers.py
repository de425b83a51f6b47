"""Keep a checkpoint as long as someone reads it: a run removes old ones while `evaluate` and `export` work.

Who reads holds a shared lock on the manifest, and who removes needs it alone. Where a file system has no locks, a
reader may still lose what it reads.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mmtrain.checkpoint import folders as layout
from mmtrain.durable_files import take_lock


class Hold:
    """A checkpoint that is not removed as long as this object lives."""

    def __init__(self, file: int) -> None:
        """Own the open file of its manifest."""
        self._file = file

    def __del__(self) -> None:
        os.close(self._file)


def hold(folder: Path) -> Hold | None:
    """Hold a checkpoint; None if it is not there, or gone by now."""
    manifest = folder / layout.MANIFEST
    try:
        held = Hold(os.open(manifest, os.O_RDONLY))
    except OSError:
        return None
    with contextlib.suppress(OSError):  # reading it will tell what is wrong with the disk
        take_lock(held._file, wait=True, shared=True)
    return held if manifest.exists() else None


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[bool]:
    """Give whether a checkpoint may be removed now: nobody reads it, nor begins to in the body of the `with`."""
    try:
        file = os.open(folder / layout.MANIFEST, os.O_RDONLY)
    except OSError:  # there is nothing to read
        yield True
        return
    try:
        yield take_lock(file, wait=False) is not False
    finally:
        os.close(file)
