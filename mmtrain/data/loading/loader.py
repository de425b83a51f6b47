"""The loader: steps in order, prepared ahead of the one being trained."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Self

from mmtrain.balance.assign import NO_TARGETS
from mmtrain.balance.step_targets import StepTargets
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.loading.batch_builder import BadSampleTracker, PayloadNeed, StepBuilder, StepData, StepRequest
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_builders import build_steps_in_thread, build_steps_in_workers
from mmtrain.data.loading.worker_pool import WorkerPool, num_available_cores
from mmtrain.data.service.protocol import require_zmq, step_facts
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.errors import MmtrainError, RunError
from mmtrain.recipe.schema import DataSettings, Recipe

MAX_DEFAULT_WORKERS = 4  # that a rank gets without asking


class Loader:
    """Iterates over the steps of a run from `start_step` on, without end.

    Keeps `data.prefetch` steps ready, made in a thread, in worker processes or by producers on other machines; what
    goes wrong while one is prepared is raised by the `next` that would have returned it. Whoever makes them, the steps
    are the same. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        index: DataIndex,
        stream: GroupStream,
        recipe: Recipe,
        dp: Mapping[str, int],
        num_microbatches: Mapping[str, int],
        needs: tuple[PayloadNeed, ...],
        start_step: int = 0,
        local_ranks: int = 1,
        notify: NotifyCallback = print,
        step_targets: StepTargets = NO_TARGETS,
    ) -> None:
        """Start preparing.

        Args:
            index: the samples.
            stream: the groups they train in.
            recipe: the settings.
            dp: every unit's data-parallel size, "llm" included.
            num_microbatches: of each replica of every unit, in a step.
            needs: what this rank computes on.
            start_step: the first step to return.
            local_ranks: ranks that share this machine's processors.
            notify: told, from another thread, of workers and producers that died, and of what became of their steps.
            step_targets: what to arrange a step's samples for; the same on all ranks.
        """
        if recipe.data.producers:
            require_zmq("data.producers")
        self._dp, self._num_microbatches, self._needs, self._step_targets = (
            dict(dp),
            dict(num_microbatches),
            needs,
            step_targets,
        )
        self._builder = StepBuilder(index, stream, recipe)
        self._bad = BadSampleTracker(index, recipe.data.max_bad_rate)
        self._step = start_step
        self._notify = notify
        self._num_workers = num_workers(recipe.data, needs, local_ranks, num_available_cores())
        self._data = recipe.data
        self._facts = step_facts(recipe, index) if recipe.data.producers else {}
        in_the_making = max(1, self._num_workers, len(recipe.data.producers))
        self._window = PrefetchWindow[StepData](start_step, recipe.data.prefetch + in_the_making)
        self._thread: threading.Thread | None = None
        if recipe.data.prefetch or recipe.data.producers:
            self._thread = threading.Thread(target=self._prepare, name="mmtrain-loader", daemon=True)
            self._thread.start()
        self.wait_s = 0.0  # how long `next` kept its caller waiting, all together

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        start = time.perf_counter()
        try:
            made = self._window.take() if self._thread is not None else self._builder.build(self._request(self._step))
            data = replace(made, quarantined=self._bad.record_new(made.quarantined))
        except MmtrainError:
            raise
        except Exception as error:
            raise RunError(f"preparing step {self._step} failed: {type(error).__name__}: {error}") from error
        finally:
            self.wait_s += time.perf_counter() - start
        self._step += 1
        return data

    def _request(self, step: int) -> StepRequest:
        return StepRequest(step, self._dp, self._num_microbatches, self._needs, self._step_targets)

    def _prepare(self) -> None:
        try:
            if self._data.producers:
                self._prepare_elsewhere()
            elif self._num_workers:
                build_steps_in_workers(self._window, self._builder, self._request, self._num_workers, self._notify)
            else:
                build_steps_in_thread(self._window, self._builder, self._request)
        except Exception as error:  # not a step's: the machinery broke, and whoever waits must know
            self._window.fail(error)

    def _prepare_elsewhere(self) -> None:
        from mmtrain.data.service.remote_steps import RemoteStepBuilder  # ZeroMQ is not everybody's

        def workers_here() -> WorkerPool[int]:
            return WorkerPool(self._builder, max(1, self._num_workers), self._notify)

        addresses, timeout_s = self._data.producers, self._data.producer_timeout_s
        RemoteStepBuilder(
            self._window, addresses, self._request, self._facts, timeout_s, workers_here, self._notify
        ).run()

    def close(self) -> None:
        """Stop preparing and wait for that to end."""
        self._window.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def num_workers(data: DataSettings, needs: tuple[PayloadNeed, ...], local_ranks: int, cores: int) -> int:
    """Worker processes of a rank: what the recipe says, or as many as there are cores to spare for one with media.

    Text alone is quicker to prepare than to pass on, and a thread on a core that nobody else wants is enough for it.
    """
    if data.workers is not None:
        return data.workers if data.prefetch else 0
    if not data.prefetch or not any(need.media for need in needs):
        return 0
    return max(0, min(MAX_DEFAULT_WORKERS, cores // local_ranks - 1))
