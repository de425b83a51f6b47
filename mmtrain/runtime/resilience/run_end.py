"""The end of a run: ranks leave each other, and none that is stopped or hangs keeps a run that is finished."""

import contextlib
import os
import sys
import threading

from torch._C._distributed_c10d import Store

from mmtrain.runtime.rendezvous import POLL_S, Patience, print_note, ranks_text
from mmtrain.runtime.world import World, leave

_AT_END_KEY = "at the end: rank"


def leave_in_time(world: World, limit_s: float, exit_code: int) -> None:
    """Leave the default process group at the end of a run, in `limit_s` at most; 0: without a limit.

    Rank 0, which may hold the store of the others, waits for them and names those that do not come. A process that
    hangs while it leaves ends with `exit_code`: its work is done, and only its launcher waits for it.
    """
    if not limit_s or world.store is None:
        leave()
        return
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone: it is done too
        world.store.set(f"{_AT_END_KEY} {world.rank}", "")
        if world.is_first:
            _await_end(world.store, world.size, Patience(limit_s=limit_s))
    timer = threading.Timer(limit_s, _end_hanging, (world.rank, limit_s, exit_code))
    timer.daemon = True
    timer.start()
    leave()
    timer.cancel()


def _await_end(store: Store, world_size: int, patience: Patience) -> None:
    """Return when all ranks have come to the end; say who has not within the limit."""
    missing = list(range(1, world_size))
    while missing := [rank for rank in missing if not store.check([f"{_AT_END_KEY} {rank}"])]:
        if patience.is_over():
            print_note(
                f"the run is finished, but {ranks_text(missing)} did not come to its end within {patience.limit_s:g} "
                "s: dead, stopped by the system, or hanging"
            )
            return
        patience.sleep(POLL_S)


def _end_hanging(rank: int, limit_s: float, exit_code: int) -> None:
    print_note(f"the run is finished, but rank {rank} could not leave the others within {limit_s:g} s: it ends now")
    sys.stdout.flush()
    os._exit(exit_code)
