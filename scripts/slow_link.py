"""A link that is slow on purpose: collectives take more time, in a background thread that leaves the core free.

On a CPU, gloo's collectives take the core that computes, so that nothing can hide them. Use this before Megatron-core
is imported, which keeps the collectives under names of its own.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# The last two are the same in torch 2.13.
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "all_gather_single",
)


@dataclass(frozen=True)
class LateWork:
    """A collective that ends when the link has carried it."""

    ended: Future[None]

    def wait(self, timeout: object = None) -> bool:
        """Wait for the late end."""
        self.ended.result()
        return True

    def is_completed(self) -> bool:
        """Return whether the late end is over."""
        return self.ended.done()


@dataclass
class SlowLink:
    """The thread of a process in which its collectives take their time, one after another."""

    delay_s: float = 0.0  # of each collective
    bytes_per_s: float | None = None  # None: bytes take no time
    seconds: float = 0.0  # that the link took since this was set to 0
    _threads: dict[int, ThreadPoolExecutor] = field(default_factory=dict)  # by process: threads do not survive a fork

    def carry(self, *names: str) -> None:
        """Let these collectives of torch.distributed go over this link, also in processes forked from now on."""
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, self._delayed(getattr(dist, name), 1 if name.startswith("reduce_scatter") else 0))

    def _delayed(self, collective: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Return the collective on this link; `position`: of the argument that is the whole tensor, or list of them.

        An all-reduce moves its tensor through the link twice, by halves: (n - 1) / n of it in both directions.
        """
        num_passes = 2 if collective.__name__ == "all_reduce" else 1

        def run(*tensors: Any, async_op: bool = False, **options: Any) -> LateWork | None:
            if not self.delay_s and self.bytes_per_s is None:
                return collective(*tensors, async_op=async_op, **options)  # type: ignore[no-any-return]
            work = collective(*tensors, async_op=True, **options)
            if work is None:  # of a group without this rank, or coalesced with others: whoever waits for those waits
                return None
            seconds = self.delay_s
            if self.bytes_per_s is not None:
                whole = tensors[position]
                nbytes = sum(part.nbytes for part in (whole if isinstance(whole, list) else [whole]))
                num_ranks = dist.get_world_size()
                seconds += num_passes * nbytes * (num_ranks - 1) / num_ranks / self.bytes_per_s
            self.seconds += seconds
            thread = self._threads.setdefault(os.getpid(), ThreadPoolExecutor(1))
            late = LateWork(thread.submit(_pass, work, seconds))
            if async_op:
                return late
            late.wait()
            return None

        return run


def _pass(work: Any, seconds: float) -> None:
    with torch.no_grad():  # gloo copies into what it gathers
        work.wait()
    time.sleep(seconds)
