"""A disk that is full, for writes of this process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `max_bytes`.

    Not a fixture: that would stop pytest's own log as well, and so end it without a word.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
