"""Ways to make the steps of a window on this machine: in a thread, or in worker processes."""

from collections.abc import Callable
from multiprocessing.connection import wait
from socket import socket

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import StepBuilder, StepData, StepRequest
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_format import unpack
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, StepFailure, WorkerPool

RequestOf = Callable[[int], StepRequest]


def build_steps_in_thread(window: PrefetchWindow[StepData], builder: StepBuilder, request_of: RequestOf) -> None:
    """Make steps in this thread until the window closes."""
    while (step := window.claim(wait=True)) is not None:
        try:
            result: StepData | Exception = builder.build(request_of(step))
        except Exception as error:
            result = error
        window.put(step, result)


def build_steps_in_workers(
    window: PrefetchWindow[StepData],
    builder: StepBuilder,
    request_of: RequestOf,
    size: int,
    notify: NotifyCallback,
) -> None:
    """Make steps in `size` worker processes until the window closes; `notify` is told of those that die."""
    with Waker() as waker, WorkerPool[int](builder, size, notify) as pool:
        window.add_waker(waker.wake)
        while not window.closed:
            while pool.num_idle and (step := window.claim()) is not None:
                pool.submit(step, request_of(step))
            pool.kill_hung_workers()
            for ready in wait([waker.fileno(), *pool.pipes], HANG_CHECK_INTERVAL_S):
                if not isinstance(ready, socket):
                    waker.drain()
                elif (received := pool.receive(ready)) is not None:
                    window.put(received[0], unpack_result(*received))


def unpack_result(step: int, made: memoryview | StepFailure) -> StepData | Exception:
    """What came from elsewhere, as a window takes it."""
    return made.error(step) if isinstance(made, StepFailure) else unpack(StepData, made)
