"""The steps that are being built: a bounded window of the run, filled by builders of any kind, read in order."""

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from mmtrain.errors import RunError

T = TypeVar("T")


class PrefetchWindow(Generic[T]):
    """At most `depth` steps from the next one to be taken; each is unclaimed, claimed by a builder, or finished.

    A builder claims a step and puts its result, or releases the step for another builder. Results are taken in the
    order of steps. The first result of a step counts and later ones are dropped, so a step may be built twice but never
    arrives twice. Thread-safe.
    """

    def __init__(self, first: int, depth: int) -> None:
        self._depth = depth
        self._next_taken = first
        self._next_unclaimed = first
        self._released: set[int] = set()
        self._finished: dict[int, T | Exception] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        self._wakers: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether the window is closed: no further step will be taken."""
        return self._closed

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there may be a step to claim, and when the window closes. It must not block."""
        with self._changed:
            self._wakers.append(wake)

    def claim(self, wait: bool = False) -> int | None:
        """Claim the lowest step that no builder has.

        None if there is no such step; with `wait`, block until there is one, and None if the window closes meanwhile.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._claimable() is not None)
            step = None if self._closed else self._claimable()
            if step is not None:
                self._released.discard(step)
                self._next_unclaimed = max(self._next_unclaimed, step + 1)
            return step

    def put(self, step: int, result: T | Exception) -> None:
        """Finish a step; an exception is raised by the `take` of this step."""
        with self._changed:
            if self._next_taken <= step < self._next_unclaimed:
                self._released.discard(step)
                self._finished.setdefault(step, result)
                self._notify()

    def release(self, steps: Iterable[int]) -> None:
        """Give back claimed steps that will not be put; finished ones among them stay finished."""
        with self._changed:
            claimed = {step for step in steps if self._next_taken <= step < self._next_unclaimed}
            self._released |= claimed - self._finished.keys()
            self._notify()

    def take(self) -> T:
        """Wait for the next step and return its result; an exception stays, and is raised again next time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._next_taken in self._finished or self._error is not None
            )
            if self._closed:
                raise RunError("the loader is closed")
            if self._next_taken not in self._finished:
                assert self._error is not None
                raise self._error
            result = self._finished[self._next_taken]
            if isinstance(result, Exception):
                raise result
            del self._finished[self._next_taken]
            self._next_taken += 1
            self._notify()
            return result

    def fail(self, error: Exception) -> None:
        """Declare that no further step will be put, because of `error`; finished steps can still be taken."""
        with self._changed:
            self._error = error
            self._notify()

    def close(self) -> None:
        """Drop all results and wake all threads that wait."""
        with self._changed:
            self._closed = True
            self._finished.clear()
            self._notify()

    def _claimable(self) -> int | None:
        if self._released:
            return min(self._released)
        return self._next_unclaimed if self._next_unclaimed < self._next_taken + self._depth else None

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
