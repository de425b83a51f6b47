"""Ranks as threads, and a storage that fails at a chosen operation."""

import errno
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from mmtrain.checkpoint import FileSum, LocalStorage, Ranks, Shard, ShardSpec
from tests.waiting import MAX_WAIT_S

T = TypeVar("T")


class Crash(BaseException):
    """The process dies here: no handler catches this, and nothing is cleaned up."""


@dataclass
class FailingStorage(LocalStorage):
    """Counts operations and lets number `fail_at` raise `error`; a write counts several times, also inside a chunk."""

    fail_at: int = -1
    error: Callable[[], BaseException] = Crash
    done: list[str] = field(default_factory=list)

    def _count(self, name: str) -> None:
        self.done.append(name)
        if len(self.done) - 1 == self.fail_at:
            raise self.error()

    def make_folder(self, path: Path) -> None:
        self._count("make_folder")
        super().make_folder(path)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        def cut_short() -> Iterable[bytes | memoryview]:
            for chunk in chunks:
                yield chunk[: len(chunk) // 2]
                self._count(f"write {path.name} half a chunk")
                yield chunk[len(chunk) // 2 :]

        self._count(f"write {path.name}")
        written = super().write(path, cut_short())
        self._count(f"wrote {path.name}")
        return written

    def rename(self, source: Path, target: Path) -> None:
        self._count(f"rename to {target.name}")
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        self._count(f"remove {path.name}")
        super().remove(path)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def in_threads(world_size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Run `work` on `world_size` ranks, each a thread; return each rank's result, or the exception it raised."""
    barrier = threading.Barrier(world_size, timeout=MAX_WAIT_S)
    slots: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size

    def exchange(rank: int, value: Any) -> list[Any]:
        barrier.wait()  # all ranks have read the slots of the previous collective
        slots[rank] = value
        barrier.wait()
        return list(slots)

    def gather(rank: int) -> Callable[[Any], list[Any] | None]:
        def gathered(value: Any) -> list[Any] | None:
            values = exchange(rank, value)
            return values if rank == 0 else None

        return gathered

    def run(rank: int) -> None:
        try:
            results[rank] = work(Ranks(rank, world_size, gather(rank), lambda value: exchange(rank, value)[0]))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def weights(step: int) -> torch.Tensor:
    """Make a tensor whose values depend on the step."""
    return torch.arange(24, dtype=torch.float32).reshape(4, 6) + 100 * step


def shards_of(step: int, rank: int, world_size: int) -> list[Shard]:
    """Return this rank's rows of the weights; rank 0 also owns a counter."""
    per_rank = 4 // world_size
    spec = ShardSpec((4, 6), 0, rank * per_rank, (rank + 1) * per_rank)
    shards = [Shard("llm.w", spec, weights(step)[spec.start : spec.stop])]
    return [*shards, Shard("count", ShardSpec(()), torch.tensor(step))] if rank == 0 else shards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
