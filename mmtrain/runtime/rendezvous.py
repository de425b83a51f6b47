"""Wait until all ranks have come to one store: say who is missing, and give up after a limit.

torch waits in C++, where it hears no signal and says nothing of use. So a rank asks here, a few times a second, and
enters torch's own calls only when they need no waiting.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from mmtrain.errors import LaunchError

RENDEZVOUS_LIMIT_S = 120.0  # without one more rank that comes
FIRST_NOTE_S = 10.0
NOTE_EVERY_S = 60.0
POLL_S = 0.1
CONNECT_TIMEOUT_S = 2.0  # of one try; a packet that a firewall drops gets no answer
MAX_RANKS_NAMED = 8
_ARRIVED, _OUTCOME = "arrived", "outcome"
_ALL_CAME = "all came"


@dataclass(frozen=True)
class MeetingPlace:
    """Where one rank meets the others, and what it has that from."""

    rank: int
    world_size: int
    host: str
    port: int
    origin: str = ""  # the variables that say so

    def to_text(self) -> str:
        """Name the place as the user may have set it."""
        return f"MASTER_ADDR:MASTER_PORT {self.host}:{self.port}"


def print_note(text: str) -> None:
    """Print a line for the user."""
    print(f"mmtrain: {text}", file=sys.stderr, flush=True)


class Patience:
    """Says what a rank waits for, after ten seconds and then each minute, and knows when it has waited too long."""

    def __init__(
        self,
        note: Callable[[str], None] = print_note,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        limit_s: float = RENDEZVOUS_LIMIT_S,
    ) -> None:
        self.sleep, self.limit_s = sleep, limit_s
        self._note, self._clock = note, clock
        self._start_s = self._progress_s = clock()
        self._next_note_s = self._start_s + FIRST_NOTE_S
        self.has_noted = False

    def waited_s(self) -> float:
        """Return the seconds since the wait began."""
        return self._clock() - self._start_s

    def made_progress(self) -> None:
        """Let the limit start again."""
        self._progress_s = self._clock()

    def is_over(self) -> bool:
        """Return whether nothing has come for too long."""
        return self._clock() - self._progress_s >= self.limit_s

    def note(self, awaited: str) -> None:
        """Say what is waited for, if it is time to."""
        if self._clock() < self._next_note_s:
            return
        self._next_note_s = self._clock() + NOTE_EVERY_S
        left_s = max(0.0, self.limit_s - (self._clock() - self._progress_s))
        self._note(f"waiting for {self.waited_s():.0f} s: {awaited}; giving up in {left_s:.0f} s")
        self.has_noted = True

    def end(self) -> None:
        """Say that the wait is over, if it was said that there is one."""
        if self.has_noted:
            self._note(f"all ranks have come, after {self.waited_s():.0f} s")


def reach_first_rank(
    place: MeetingPlace, patience: Patience, connect: Callable[[tuple[str, int], float], socket.socket] | None = None
) -> None:
    """Return when something listens at the meeting place. Raises LaunchError after the limit."""
    connect = connect or socket.create_connection
    while True:
        try:
            connect((place.host, place.port), CONNECT_TIMEOUT_S).close()
            return
        except socket.gaierror as error:
            reason = f"MASTER_ADDR {place.host!r} cannot be resolved ({error.strerror})"
        except OSError as error:
            reason = f"rank 0 does not answer at {place.to_text()} ({error.strerror or error})"
        missing = f"rank {place.rank} of {place.world_size}: {reason}"
        if patience.is_over():
            raise LaunchError(
                f"{missing}, for {patience.waited_s():.0f} s. Start rank 0 on that node, with the same port, and let "
                f"this node reach it{_way_out(place)}"
            )
        patience.note(missing)
        patience.sleep(POLL_S)


def await_all_ranks(store: Store, place: MeetingPlace, patience: Patience, may_repeat: bool = False) -> None:
    """Return when all ranks have come to `store`; rank 0 says for all who is missing.

    `may_repeat`: the store outlives its ranks, so one that came before may come again. Raises LaunchError after the
    limit, and for two processes with one rank.
    """
    if store.add(f"{_ARRIVED}/{place.rank}", 1) > 1 and not may_repeat:
        raise LaunchError(
            f"two processes are rank {place.rank} of {place.world_size} at {place.to_text()}; give each process a rank "
            f"of its own{_way_out(place)}"
        )
    try:
        if place.rank == 0:
            _wait_as_first(store, place, patience)
        else:
            _wait_for_first(store, place, patience)
    except RuntimeError as error:  # of the store
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} lost rank 0, which left while ranks were missing at "
            f"{place.to_text()} ({str(error).splitlines()[0]})"
        ) from error
    patience.end()


def _wait_as_first(store: Store, place: MeetingPlace, patience: Patience) -> None:
    missing = list(range(place.world_size))
    while True:
        now_missing = [rank for rank in missing if not store.check([f"{_ARRIVED}/{rank}"])]
        if not now_missing:
            store.set(_OUTCOME, _ALL_CAME)
            return
        if len(now_missing) < len(missing):
            missing = now_missing
            patience.made_progress()
        num_here = place.world_size - len(missing)
        if patience.is_over():
            text = (
                f"{ranks_text(missing)} of {place.world_size} did not come to {place.to_text()} within "
                f"{patience.limit_s:.0f} s. Check that all ranks were started and reach this port{_way_out(place)}"
            )
            store.set(_OUTCOME, text)
            patience.sleep(1.0)  # the others read it, while this process holds the store
            raise LaunchError(text)
        patience.note(
            f"{num_here} of {place.world_size} ranks have come to {place.to_text()}; missing: {ranks_text(missing)} "
            f"({place.origin})"
        )
        patience.sleep(POLL_S)


def _wait_for_first(store: Store, place: MeetingPlace, patience: Patience) -> None:
    """Wait for what rank 0 decides. It waits as long as ranks come, so this rank has no limit while rank 0 is there."""
    while not store.check([_OUTCOME]):
        patience.sleep(POLL_S)
    outcome = store.get(_OUTCOME).decode()
    if outcome != _ALL_CAME:
        raise LaunchError(outcome)


@contextmanager
def noting_progress(patience: Patience, awaited: str) -> Iterator[None]:
    """Say what is waited for, from a thread, while the body waits in C++."""
    closed = threading.Event()

    def note() -> None:
        while not closed.wait(POLL_S):
            patience.note(awaited)

    thread = threading.Thread(target=note, name="mmtrain-rendezvous", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 3`, `ranks 1, 2, 5`, or the first of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:MAX_RANKS_NAMED]))}{more}"


def _way_out(place: MeetingPlace) -> str:
    return f". This process has its place from {place.origin}" if place.origin else ""
