"""A gloo that behaves like NCCL, on which plans that would hang on GPUs hang on a CPU.

* A communicator is made at the first use of a group by a pair of ranks, and blocks the host until both have come. Where
  a group was connected eagerly, which blocks until all of its members do that, it has one communicator for everything.
* The messages of a communicator run one after another, in a thread that stands for its stream, and each after what the
  compute stream had before it. A send ends when its receiver has the data.
* Waiting for a message returns at once. Only what computes after it waits for the data.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from mmtrain.runtime.execution import process_groups

ACKNOWLEDGEMENT_TAG = 1


class _ComputeStream(TorchDispatchMode):
    """What the rank computes: it runs at once, but after the messages that it was made to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[Future[None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.catch_up()
        return func(*args, **(kwargs or {}))

    def catch_up(self) -> None:
        """Wait for the messages that the stream was made to wait for."""
        for message in self.awaited:
            message.result()
        self.awaited.clear()


class _Message:
    """Stands for `dist.Work`."""

    def __init__(self, done: "Future[None]", compute: _ComputeStream) -> None:
        self._done, self._compute = done, compute

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._compute.awaited.append(self._done)
        else:  # NCCL blocks the host only for a timeout
            self._done.result(timeout.total_seconds())


class _Nccl:
    def __init__(self, timeout: timedelta) -> None:
        self.compute = _ComputeStream()
        self._timeout = timeout
        self._streams: dict[tuple[str, frozenset[int]], ThreadPoolExecutor] = {}  # of communicators
        self._eager: set[str] = set()  # names of groups
        self._isend, self._irecv = dist.isend, dist.irecv

    def close(self) -> None:
        for stream in self._streams.values():
            stream.shutdown(wait=False, cancel_futures=True)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Make a communicator of the whole group."""
        members = dist.get_process_group_ranks(group)
        self._meet(group, members)
        self._eager.add(group.group_name)

    def isend(self, tensor: Tensor, dst: int, group: dist.ProcessGroup) -> _Message:
        def run() -> None:
            _wait(self._isend(tensor, dst, group=group))
            _wait(self._irecv(torch.empty(1), dst, group=group, tag=ACKNOWLEDGEMENT_TAG))

        return self._launch(group, dst, run)

    def irecv(self, tensor: Tensor, src: int, group: dist.ProcessGroup) -> _Message:
        def run() -> None:
            _wait(self._irecv(tensor, src, group=group))
            _wait(self._isend(torch.zeros(1), src, group=group, tag=ACKNOWLEDGEMENT_TAG))

        return self._launch(group, src, run)

    def _launch(self, group: dist.ProcessGroup, peer: int, run: Callable[[], None]) -> _Message:
        pair = [dist.get_rank(), peer]
        is_eager = group.group_name in self._eager
        key = (group.group_name, frozenset() if is_eager else frozenset(pair))
        if key not in self._streams:
            if not is_eager:
                self._meet(group, pair)
            self._streams[key] = ThreadPoolExecutor(max_workers=1)
        before = list(self.compute.awaited)

        def run_in_order() -> None:
            for message in before:
                message.result()
            run()

        return _Message(self._streams[key].submit(run_in_order), self.compute)

    def _meet(self, group: dist.ProcessGroup, members: list[int]) -> None:
        """Block until all members make this communicator."""
        rank, store = dist.get_rank(), c10d._get_default_store()
        key = f"nccl/{group.group_name}/{sorted(members)}"
        store.set(f"{key}/{rank}", "")
        try:
            store.wait([f"{key}/{other}" for other in members if other != rank], self._timeout)
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} waits for a communicator of ranks {sorted(members)}") from error


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


@contextlib.contextmanager
def like_nccl(eager: bool, timeout_s: float) -> Iterator[None]:
    """Make messages between ranks behave like NCCL's; `eager`: whether groups can be connected before their first use.

    A rank that waits longer than `timeout_s` for a communicator raises RuntimeError.
    """
    nccl = _Nccl(timedelta(seconds=timeout_s))
    real = {name: getattr(dist, name) for name in ("isend", "irecv")}
    real_connect = process_groups._communicate_eagerly
    dist.isend, dist.irecv = nccl.isend, nccl.irecv  # type: ignore[assignment]
    process_groups._communicate_eagerly = lambda group, _: nccl.connect(group) if eager else None
    try:
        with nccl.compute:
            yield
            nccl.compute.catch_up()
    finally:
        dist.isend, dist.irecv = real["isend"], real["irecv"]
        process_groups._communicate_eagerly = real_connect
        nccl.close()
