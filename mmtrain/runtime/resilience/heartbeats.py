"""Notice that another rank's process does not run, in phases that may take any time."""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from mmtrain.runtime.world import World

_KEY = "heartbeats of rank"


class Heartbeats:
    """Counts the heartbeats of every rank in the job's store; rank 0 watches all others, and these watch rank 0.

    A thread of the watchdog calls `beat`, so the beats of a process that is dead or stopped cease, and those of one
    that computes do not. A store that does not answer counts as silence: rank 0 or the launcher holds it.
    """

    def __init__(self, store: Store, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._rank, self._clock = store, world.rank, clock
        watched = range(1, world.size) if world.is_first else [0]
        self._counts = dict.fromkeys(watched, 0)  # rank -> beats
        self._heard_s = dict.fromkeys(watched, clock())  # rank -> when its count last changed

    def beat(self) -> None:
        """Send one beat and read those of the watched ranks. Raises what the store raises, and may block."""
        self._store.add(f"{_KEY} {self._rank}", 1)
        for rank, count in self._counts.items():
            new_count = self._store.add(f"{_KEY} {rank}", 0)
            if new_count != count:
                self._counts[rank] = new_count
                self._heard_s[rank] = self._clock()

    def silent_s(self) -> float:
        """Return how long the watched rank that was heard of least recently has been silent."""
        return self._clock() - min(self._heard_s.values())
