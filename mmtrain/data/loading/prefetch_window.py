"""Which steps are under way: a bounded stretch of the run, made by makers of any kind, taken in order by one reader."""

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from mmtrain.errors import RunError

T = TypeVar("T")


class PrefetchWindow(Generic[T]):
    """At most `depth` steps from the next to be taken on, each claimed by a maker, finished, or waiting for one.

    A maker claims a step and puts its result, or releases it, so that another makes it. Results come out in the order
    of steps; the first result of a step counts and later ones are dropped, so a step may be made twice but never
    arrives twice. Safe for threads.
    """

    def __init__(self, first: int, depth: int) -> None:
        self._depth = depth
        self._next = first  # to be taken
        self._fresh = first  # never claimed
        self._released: set[int] = set()
        self._done: dict[int, T | Exception] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._failed: Exception | None = None
        self._wakers: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether nobody will take another step."""
        return self._closed

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Have `wake` called whenever there may be a step to claim, and when the window closes. It must not block."""
        with self._changed:
            self._wakers.append(wake)

    def claim(self, wait: bool = False) -> int | None:
        """The lowest step that nobody makes; None if there is no such step, or, waiting for one, the window closes."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._claimable() is not None)
            step = None if self._closed else self._claimable()
            if step is not None:
                self._released.discard(step)
                self._fresh = max(self._fresh, step + 1)
            return step

    def put(self, step: int, result: T | Exception) -> None:
        """Finish a step; an exception is raised to whoever takes it."""
        with self._changed:
            if self._next <= step < self._fresh:
                self._released.discard(step)
                self._done.setdefault(step, result)
                self._notify()

    def release(self, steps: Iterable[int]) -> None:
        """Hand steps back that were claimed and will not be put; those that are done stay done."""
        with self._changed:
            self._released |= {s for s in steps if self._next <= s < self._fresh and s not in self._done}
            self._notify()

    def take(self) -> T:
        """The next step's result, as soon as it is there; an exception stays, and is raised again next time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next in self._done or self._failed is not None)
            if self._closed:
                raise RunError("the loader is closed")
            if self._next not in self._done:
                assert self._failed is not None
                raise self._failed
            result = self._done[self._next]
            if isinstance(result, Exception):
                raise result
            del self._done[self._next]
            self._next += 1
            self._notify()
            return result

    def fail(self, error: Exception) -> None:
        """Say that no step will be put any more, and why; what is done can still be taken."""
        with self._changed:
            self._failed = error
            self._notify()

    def close(self) -> None:
        """Drop all results and let everybody who waits come back."""
        with self._changed:
            self._closed = True
            self._done.clear()
            self._notify()

    def _claimable(self) -> int | None:
        if self._released:
            return min(self._released)
        return self._fresh if self._fresh < self._next + self._depth else None

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
