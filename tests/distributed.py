"""Start several ranks for a test, as processes of this machine joined by gloo.

Ranks are forked from a server process that has imported torch and Megatron-core once: importing takes seconds and
forking milliseconds. The server is not pytest's own process, because a process that has once run an autograd backward
or started threads cannot safely be forked.

`fork_ranks` forks new processes for every call. `run_ranks` reuses its ranks as long as nothing fails, since starting a
process and running torch for the first time takes longer than most tests.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.waiting import MAX_WAIT_S

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "tests.uncollected",
        "torch",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "mmtrain.models.build_stage",
        "mmtrain.runtime.training.train",
        # Imported by the first block that is built, image and line; slower than most runs of a test.
        "megatron.core.transformer.moe.experts",
        "PIL.PngImagePlugin",
        "PIL.JpegImagePlugin",
        "pillow_heif",
        "rich._emoji_codes",
    ]
)


class RanksFailed(AssertionError):  # noqa: N818 - the outcome of a test, not an error of the program
    """A rank raised, died or did not finish in time; the message holds every rank's traceback or stacks."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = MAX_WAIT_S) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks of a gloo world; return the results in rank order.

    `fn` is a module-level function that leaves no state behind: the processes serve later calls. Arguments and
    results are pickled. Raises RanksFailed, and then leaves no process.
    """
    try:
        return _reused_ranks.call(world_size, _in_world, fn, args, timeout, timeout=timeout)
    except BaseException:
        _reused_ranks.close()
        raise


def fork_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = MAX_WAIT_S) -> list[Any]:
    """Call `fn(rank, world_size, folder, *args)` in `world_size` new processes without torch.distributed.

    `folder` is empty and common to all of them; environment variables are those of the caller. Raises RanksFailed, and
    leaves no process.
    """
    ranks = _Ranks(environment=dict(os.environ))  # that of the fork server is as old as the first test
    try:
        return ranks.call(world_size, fn, *args, timeout=timeout)
    finally:
        ranks.close()


@dataclass
class _Ranks:
    """Processes that serve one call after another; as many as the largest call needed."""

    ranks: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    environment: dict[str, str] | None = None  # None: as it was when the first process of all started

    def call(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Call `fn(rank, world_size, folder, *args)` in the first `world_size` processes; return the results."""
        while len(self.ranks) < world_size:
            self.ranks.append(_start(self.environment))
        ranks = self.ranks[:world_size]
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for rank, (_, pipe) in enumerate(ranks):
                pipe.send((fn, rank, world_size, Path(folder), args))
            return _collect(ranks, Path(folder), time.monotonic() + timeout)

    def close(self) -> None:
        """Kill all processes."""
        for process, pipe in self.ranks:
            process.kill()
            process.join()
            pipe.close()
        self.ranks.clear()


_reused_ranks = _Ranks()
atexit.register(_reused_ranks.close)


def _start(environment: dict[str, str] | None) -> tuple[BaseProcess, Connection]:
    ours, theirs = _SERVER.Pipe()
    process = _SERVER.Process(target=_serve, args=(theirs, environment))
    process.start()
    theirs.close()
    return process, ours


def _collect(ranks: list[tuple[BaseProcess, Connection]], folder: Path, deadline: float) -> list[Any]:
    """Wait for all results; when one rank fails, wait shortly for the others' errors, then raise RanksFailed."""
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                ok, value = False, "died without a word"
            (results if ok else failed)[rank] = value
        if failed:
            deadline = min(deadline, time.monotonic() + 2.0)
    if not waiting and not failed:
        return [results[rank] for rank in range(len(ranks))]
    for rank in waiting.values():
        failed[rank] = "did not finish; its stacks:\n" + _stacks(ranks[rank][0], folder)
    raise RanksFailed("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(failed.items())))


def _stacks(process: BaseProcess, folder: Path) -> str:
    """Make a hanging rank write its stacks, and return them."""
    path = folder / f"stacks-{process.pid}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGUSR2)
    for _ in range(20):
        process.join(0.05)
        if path.exists() and path.stat().st_size:
            break
    return path.read_text() if path.exists() else "(none)"


def _serve(pipe: Connection, environment: dict[str, str] | None) -> None:
    """Serve the calls that arrive, until the other end closes."""
    import torch

    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    gc.freeze()  # never collect what was imported before the fork: scanning it takes longer than most calls
    gc.enable()
    while True:
        try:
            fn, rank, world_size, folder, args = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(fn, rank, world_size, folder, args)))


def _answer(
    fn: Callable[..., Any], rank: int, world_size: int, folder: Path, args: Sequence[Any]
) -> tuple[bool, object]:
    with (folder / f"stacks-{os.getpid()}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        try:
            return True, fn(rank, world_size, folder, *args)
        except BaseException:
            return False, traceback.format_exc()
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            gc.collect()  # process groups in reference cycles would keep their sockets and threads


def _in_world(
    rank: int, world_size: int, folder: Path, fn: Callable[..., Any], args: Sequence[Any], timeout: float
) -> Any:
    import torch
    import torch.distributed as dist

    from mmtrain.runtime.gloo_threads import calm_gloo_threads

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-ups, no other machine
    torch.manual_seed(0)  # independent of earlier calls
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    calm_gloo_threads()
    result = fn(*args)
    dist.barrier()  # a rank that has finished must not close connections that others still open
    dist.destroy_process_group()
    return result
