"""A link that is slow on purpose: collectives take more time, in a background thread that leaves the core free.

On a CPU, gloo's collectives take the core that computes, so that nothing can hide them. Use this before Megatron-core
is imported, which keeps the collectives under names of its own.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

# The last two are the same in torch 2.13.
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "all_gather_single",
    "all_to_all_single",
)


class LinkClock(Protocol):
    """A clock of its own, on which a link takes its time too."""

    def carry(self, seconds: float) -> float:
        """Let the link carry something for so long; return when that ends."""
        ...

    def reach(self, end_s: float) -> None:
        """Wait for a moment."""
        ...


@dataclass(frozen=True)
class LateWork:
    """A collective that ends when the link has carried it."""

    ended: Future[None]
    reach: Callable[[], None] | None = None  # waits for the end on a clock of the link's own

    def wait(self, timeout: object = None) -> bool:
        """Wait for the late end."""
        self.ended.result()
        if self.reach is not None:
            self.reach()
        return True

    def is_completed(self) -> bool:
        """Return whether the late end is over."""
        return self.ended.done()


@dataclass
class CoalescedWork:
    """Collectives that were started together, and end when the link has carried all of them."""

    late: LateWork | None = None

    def wait(self) -> None:
        """Wait for the late end."""
        assert self.late is not None, "the collectives have not been started"
        self.late.wait()


@dataclass
class SlowLink:
    """The thread of a process in which its collectives take their time, one after another."""

    delay_s: float = 0.0  # of each collective
    bytes_per_s: float | None = None  # None: bytes take no time
    seconds: float = 0.0  # that the link took since this was set to 0
    clock: LinkClock | None = None  # None: the link takes its time on the clock of the wall alone
    _threads: dict[int, ThreadPoolExecutor] = field(default_factory=dict)  # by process: threads do not survive a fork
    _coalesced: list[float] | None = None  # seconds of the collectives of an open `dist._coalescing_manager`

    def carry(self, *names: str) -> None:
        """Let these collectives of torch.distributed go over this link, also in processes forked from now on."""
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, self._delayed(getattr(dist, name), 1 if name.startswith("reduce_scatter") else 0))

    def carry_coalesced(self) -> None:
        """Let collectives that torch.distributed starts together, as Megatron-core has it, go over this link too."""
        manager = dist._coalescing_manager

        @contextmanager
        def run(*arguments: Any, **options: Any) -> Iterator[CoalescedWork]:
            together = CoalescedWork()
            self._coalesced = []
            with manager(*arguments, **options) as works:
                yield together
            seconds, self._coalesced = sum(self._coalesced), None
            together.late = self._start(works, seconds)
            if not options.get("async_ops"):
                together.wait()

        dist._coalescing_manager = run

    @property
    def _thread(self) -> ThreadPoolExecutor:
        return self._threads.setdefault(os.getpid(), ThreadPoolExecutor(1))

    def _start(self, work: Any, seconds: float) -> LateWork:
        """Let the link carry a collective that has been started."""
        self.seconds += seconds
        reach = None if self.clock is None else partial(self.clock.reach, self.clock.carry(seconds))
        return LateWork(self._thread.submit(_pass, work, seconds), reach)

    def _delayed(self, collective: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Return the collective on this link; `position`: of the argument that is the whole tensor, or list of them.

        An all-reduce moves its tensor through the link twice, by halves: (n - 1) / n of it in both directions.
        """
        num_passes = 2 if collective.__name__ == "all_reduce" else 1

        def run(*tensors: Any, async_op: bool = False, **options: Any) -> LateWork | None:
            whole = [*tensors, *options.values()][position]  # FSDP2 names its tensors
            if self._coalesced is not None:
                self._coalesced.append(self._seconds_of(whole, num_passes))
                return collective(*tensors, async_op=async_op, **options)  # type: ignore[no-any-return]
            if not self.delay_s and self.bytes_per_s is None:
                return collective(*tensors, async_op=async_op, **options)  # type: ignore[no-any-return]
            work = collective(*tensors, async_op=True, **options)
            if work is None:  # of a group without this rank, or coalesced with others: whoever waits for those waits
                return None
            late = self._start(work, self._seconds_of(whole, num_passes))
            if async_op:
                return late
            late.wait()
            return None

        return run

    def _seconds_of(self, whole: Any, num_passes: int) -> float:
        """Return how long a collective takes that moves a whole tensor, or list of them, so often."""
        if self.bytes_per_s is None:
            return self.delay_s
        nbytes = sum(part.nbytes for part in (whole if isinstance(whole, list) else [whole]))
        num_ranks = dist.get_world_size()
        return self.delay_s + num_passes * nbytes * (num_ranks - 1) / num_ranks / self.bytes_per_s


def _pass(work: Any, seconds: float) -> None:
    with torch.no_grad():  # gloo copies into what it gathers
        work.wait()
    time.sleep(seconds)
