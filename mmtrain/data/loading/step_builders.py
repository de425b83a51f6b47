"""Ways to make the steps of a window on this machine: in a thread, or in worker processes."""

from collections.abc import Callable
from multiprocessing.connection import wait
from socket import socket

from mmtrain.data.loading.batch_builder import StepData, StepMaker, StepRequest
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import Window
from mmtrain.data.loading.step_format import unpack
from mmtrain.data.loading.worker_pool import LOOK_S, Failure, Note, Pool

RequestOf = Callable[[int], StepRequest]


def make_here(window: Window[StepData], maker: StepMaker, request_of: RequestOf) -> None:
    """Make steps in this thread until the window closes."""
    while (step := window.claim(wait=True)) is not None:
        try:
            result: StepData | Exception = maker.make(request_of(step))
        except Exception as error:
            result = error
        window.put(step, result)


def make_in_workers(window: Window[StepData], maker: StepMaker, request_of: RequestOf, size: int, note: Note) -> None:
    """Make steps in `size` worker processes until the window closes; `note` is told of those that die."""
    with Waker() as waker, Pool[int](maker, size, note) as pool:
        window.watch(waker.wake)
        while not window.closed:
            while pool.idle and (step := window.claim()) is not None:
                pool.submit(step, request_of(step))
            pool.look()
            for ready in wait([waker.fileno(), *pool.pipes], LOOK_S):
                if not isinstance(ready, socket):
                    waker.drain()
                elif (received := pool.receive(ready)) is not None:
                    window.put(received[0], opened(*received))


def opened(step: int, made: memoryview | Failure) -> StepData | Exception:
    """What came from elsewhere, as a window takes it."""
    return made.error(step) if isinstance(made, Failure) else unpack(StepData, made)
