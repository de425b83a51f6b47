"""Schedule the threads in which gloo listens for messages, so that none of them spins on a core that others need.

Each process group over gloo has one such thread. It polls its connections, skips one whose lock another thread holds,
and polls again at once. Where it wakes up on the core of the thread that holds the lock, which a message just sent
does to it, it spins until its time slice ends: about 4 ms, where a small all-reduce takes 0.1. Linux' policy
`SCHED_BATCH` takes nothing from a thread but the right to interrupt another one when it wakes up.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NAME = "gloo_tcp_loop"  # that gloo gives these threads from torch 2.13 on
_THREADS = Path("/proc/self/task")


def calm_gloo_threads() -> None:
    """Schedule the listening threads of this process as batch work; to be called whenever groups were created.

    Where that is not possible, without Linux, inside some sandboxes and before torch 2.13, collectives are slower.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in listening_threads():
            with contextlib.suppress(OSError):  # the thread has ended since, or may not be changed
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def listening_threads() -> Iterator[int]:
    """Yield the numbers by which Linux knows the listening threads of this process."""
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text(encoding="utf-8").strip() == _NAME:
                yield int(thread.name)
