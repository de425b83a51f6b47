"""The loader: yields the steps of a run in order, built ahead of the one that is being trained."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from socket import socket
from typing import Self

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.loading.batch_builder import (
    NO_MONITOR,
    BadSampleTracker,
    ReadMonitor,
    RequestOf,
    StepBuilder,
    StepData,
    StepRequest,
)
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.storage_outage import OutageReport
from mmtrain.data.loading.watched_reads import WatchedReads
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, WorkerPool, unpack_result
from mmtrain.data.service.protocol import require_zmq, step_facts
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.errors import MmtrainError, RunError
from mmtrain.machine_limits import num_available_cores
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.schema import Recipe

MAX_DEFAULT_WORKERS = 4  # of a rank where `data.workers` is not set


class Loader:
    """Iterates over the steps of a run, without end.

    Keeps `data.prefetch` steps ready. They are built in a thread, in worker processes or by producers on other
    machines, and are the same in all cases. An error while a step is built is raised by the `next` that would have
    returned it. Close the loader, or use it as a context manager.
    """

    def __init__(
        self,
        index: DataIndex,
        stream: GroupStream,
        recipe: Recipe,
        first: StepRequest,
        num_local_ranks: int = 1,
        notify: NotifyCallback = print,
        on_outage: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start building.

        Args:
            index: the samples.
            stream: the groups in which they train.
            recipe: the settings.
            first: what this rank needs of the first step; of later steps it needs the same.
            num_local_ranks: ranks that share this machine's processors.
            notify: called from another thread when workers or producers died, with what became of their steps.
            on_outage: called from another thread with the storage that is waited for, and with "" when it is back.
        """
        if recipe.data.producers:
            require_zmq("data.producers")
        self._request = first
        self._builder = StepBuilder(index, stream, recipe)
        self._bad_samples = BadSampleTracker(index, recipe.data.max_bad_rate)
        self._step = first.step
        self._notify = notify
        self._outages = OutageReport(notify, recipe.data.storage_patience_s, on_outage)
        self._data = recipe.data
        self._num_workers = choose_num_workers(recipe.data, first.needs, num_local_ranks, num_available_cores())
        self._facts = step_facts(recipe, index) if recipe.data.producers else {}
        num_being_built = max(1, self._num_workers, len(recipe.data.producers))
        self._window = PrefetchWindow[StepData](first.step, recipe.data.prefetch + num_being_built)
        self._thread: threading.Thread | None = None
        if recipe.data.prefetch or recipe.data.producers:
            self._thread = threading.Thread(target=self._build_ahead, name="mmtrain-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        try:
            if self._thread is not None:
                built = self._window.take()
            else:
                with WatchedReads(self._builder.find_outage, self._outages) as reads:
                    built = self._builder.build(self._request_for(self._step), reads.monitor)
            data = replace(built, quarantined=self._bad_samples.record_new(built.quarantined))
        except MmtrainError:
            raise
        except Exception as error:
            raise RunError(f"preparing step {self._step} failed: {type(error).__name__}: {error}") from error
        self._step += 1
        return data

    def _request_for(self, step: int) -> StepRequest:
        return replace(self._request, step=step)

    def _build_ahead(self) -> None:
        try:
            if self._data.producers:
                self._build_with_producers()
            elif self._num_workers:
                build_steps_in_workers(
                    self._window, self._builder, self._request_for, self._num_workers, self._notify, self._outages.tell
                )
            else:
                with WatchedReads(self._builder.find_outage, self._outages) as reads:
                    build_steps_in_thread(self._window, self._builder, self._request_for, reads.monitor)
        except Exception as error:  # not the error of a step: the loader itself is broken, and `next` must raise it
            self._window.fail(error)

    def _build_with_producers(self) -> None:
        from mmtrain.data.service.keys import load_keys  # ZeroMQ is an optional package
        from mmtrain.data.service.remote_steps import ProducerAccess, RemoteStepBuilder

        def start_local_pool() -> WorkerPool[int]:
            size = max(1, self._num_workers)
            return WorkerPool(self._builder, size, self._notify, tell_outage=self._outages.tell)

        data = self._data
        keys = load_keys(data.producer_secret)
        RemoteStepBuilder(
            self._window,
            ProducerAccess(data.producers, data.producer_timeout_s, data.producer_step_timeout_s, keys),
            self._request_for,
            self._facts,
            start_local_pool,
            self._notify,
        ).run()

    def close(self) -> None:
        """Stop building and wait until that has ended."""
        self._window.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def choose_num_workers(data: DataSettings, needs: tuple[PayloadNeed, ...], num_local_ranks: int, num_cores: int) -> int:
    """Return the worker processes of a rank: those that the recipe sets, else one for each spare core.

    A rank without media gets none: text takes less time to encode than to pass on, so a thread is enough.
    """
    if data.workers is not None:
        return data.workers if data.prefetch else 0
    if not data.prefetch or not any(need.media for need in needs):
        return 0
    num_spare_cores = num_cores // num_local_ranks - 1
    return max(0, min(MAX_DEFAULT_WORKERS, num_spare_cores))


def build_steps_in_thread(
    window: PrefetchWindow[StepData], builder: StepBuilder, request_of: RequestOf, monitor: ReadMonitor = NO_MONITOR
) -> None:
    """Build steps in the calling thread until the window closes."""
    while (step := window.claim(wait=True)) is not None:
        try:
            result: StepData | Exception = builder.build(request_of(step), monitor)
        except Exception as error:
            result = error
        window.put(step, result)


def build_steps_in_workers(
    window: PrefetchWindow[StepData],
    builder: StepBuilder,
    request_of: RequestOf,
    num_workers: int,
    notify: NotifyCallback,
    tell_outage: Callable[[str], None] = lambda _: None,
) -> None:
    """Build steps in worker processes until the window closes.

    `notify` is called when a worker dies, and `tell_outage` again and again with the storage that is waited for.
    """
    with Waker() as waker, WorkerPool[int](builder, num_workers, notify, tell_outage=tell_outage) as pool:
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
