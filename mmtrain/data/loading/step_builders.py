"""Fill a prefetch window on this machine: in a thread, or in worker processes."""

from collections.abc import Callable
from multiprocessing.connection import wait
from socket import socket

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import StepBuilder, StepData, StepRequest
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_format import unpack
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, StepFailure, WorkerPool

RequestOf = Callable[[int], StepRequest]  # step -> what to build


def build_steps_in_thread(window: PrefetchWindow[StepData], builder: StepBuilder, request_of: RequestOf) -> None:
    """Build steps in the calling thread until the window closes."""
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
    num_workers: int,
    notify: NotifyCallback,
) -> None:
    """Build steps in worker processes until the window closes; `notify` is called when a worker dies."""
    with Waker() as waker, WorkerPool[int](builder, num_workers, notify) as pool:
        window.add_waker(waker.wake)
        while not window.closed:
            while pool.num_idle and (step := window.claim()) is not None:
                pool.submit(step, request_of(step))
            pool.kill_hung_workers()
            for ready in wait([waker.fileno(), *pool.pipes], HANG_CHECK_INTERVAL_S):
                if not isinstance(ready, socket):
                    waker.drain()
                    continue
                received = pool.receive(ready)
                if received is not None:
                    step, content = received
                    window.put(step, unpack_result(step, content))


def unpack_result(step: int, content: memoryview | StepFailure) -> StepData | Exception:
    """Turn what another process sent for a step into what a window accepts."""
    return content.error(step) if isinstance(content, StepFailure) else unpack(StepData, content)
