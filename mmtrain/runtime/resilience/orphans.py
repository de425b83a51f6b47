"""Stop ranks whose launcher is gone: nobody would end or restart them, and a new start of the run finds them alive."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Self

from mmtrain.runtime.world import Address

LAUNCHER_POLL_S = 1.0


class LauncherMonitor:
    """Sends this process SIGTERM when the process that started it has ended, so that the run saves and stops.

    It runs in a thread, and notices that the parent of this process changed. The system's own notice of a parent's
    death (PR_SET_PDEATHSIG) must be asked for before the parent dies, and is lost when the parent's thread ends.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._launcher_pid = rank, os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mmtrain-launcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LAUNCHER_POLL_S):
            if os.getppid() != self._launcher_pid:
                stop_orphan(self._rank)
                return


def stop_orphan(rank: int) -> None:
    """Make this rank, whose launcher is gone, save and stop as after SIGTERM; so do the others with it."""
    with contextlib.suppress(OSError):  # the reader of this output may be gone too
        print(f"mmtrain: rank {rank}: its launcher is gone; stopping after this step, then saving", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def has_watching_launcher(address: Address, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank's parent stays as long as the run: torchrun's agent, or SLURM's step daemon.

    Anyone else may set torchrun's variables, start ranks in the background and leave.
    """
    return address.launcher == "slurm" or (address.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in env)
