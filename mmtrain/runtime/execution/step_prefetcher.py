"""Prepare steps ahead: while one computes, the input of the next comes to the device."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from mmtrain.data.loading.batch_builder import StepData
from mmtrain.runtime.execution.executor import StepInput
from mmtrain.runtime.execution.input_arena import ArenaCopier, InputArena
from mmtrain.runtime.execution.unit_inputs import map_tensors

_NUM_ARENAS = 2  # one for the step that computes, one for the next


@dataclass(frozen=True)
class PreparedStep:
    """A step whose input is on the device, or on its way there."""

    data: StepData
    input: StepInput


class StepPrefetcher:
    """Iterates over prepared steps. A call of `next` ends the step before: its input must not be read any more.

    With `ahead` a thread takes steps from `steps` and prepares them, one more than was asked for. Without, they are
    prepared when they are asked for. An error is raised by the `next` that would have returned its step, and by all
    later ones. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        steps: Iterator[StepData],
        host_input: Callable[[StepData], StepInput],
        copier: ArenaCopier,
        ahead: bool,
        stop: Callable[[], None] = lambda: None,
        explain: Callable[[Exception, StepData], Exception] = lambda error, _: error,
    ) -> None:
        """Prepare what `steps` yields; `host_input` makes a step's input, with tensors on the host.

        `stop` makes a `next(steps)` that waits raise an error. `explain` returns what is raised where the input of a
        step cannot be made or brought to the device.
        """
        self._steps, self._host_input, self._stop, self._explain = steps, host_input, stop, explain
        self._free = deque(InputArena(copier) for _ in range(_NUM_ARENAS))
        self._computing: InputArena | None = None  # arena of the step that was returned last
        self._prepared: deque[tuple[PreparedStep, InputArena]] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self.wait_s = 0.0  # how long all calls of `next` together kept their caller waiting
        self._thread: threading.Thread | None = None
        if ahead:
            self._thread = threading.Thread(target=self._prepare_ahead, name="mmtrain-input", daemon=True)
            self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PreparedStep:
        start_s = time.perf_counter()
        try:
            self._end_step()
            step, arena = self._prepare(self._free.popleft()) if self._thread is None else self._take()
            arena.start_step()
            self._computing = arena
            return step
        finally:
            self.wait_s += time.perf_counter() - start_s

    def close(self) -> None:
        """Stop preparing, and wait until that has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._stop()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_step(self) -> None:
        """Let the arena of the step before be filled again."""
        if self._computing is not None:
            self._computing.end_step()
            with self._changed:
                self._free.append(self._computing)
                self._changed.notify_all()
            self._computing = None

    def _take(self) -> tuple[PreparedStep, InputArena]:
        with self._changed:
            self._changed.wait_for(lambda: self._prepared or self._error is not None)
            if self._prepared:
                return self._prepared.popleft()
            assert self._error is not None
            raise self._error

    def _prepare_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._is_closed)
                if self._is_closed:
                    return
                arena = self._free.popleft()
            try:
                prepared = self._prepare(arena)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._prepared.append(prepared)
                self._changed.notify_all()

    def _prepare(self, arena: InputArena) -> tuple[PreparedStep, InputArena]:
        data = next(self._steps)
        try:
            return PreparedStep(data, bring_to_device(self._host_input(data), arena)), arena
        except (RuntimeError, MemoryError) as error:
            explained = self._explain(error, data)
            if explained is error:
                raise
            raise explained from error


def bring_to_device(step: StepInput, arena: InputArena) -> StepInput:
    """Fill the arena with all tensors of a step's input; return the input as it will be on the device."""
    on_host: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        on_host.append(tensor)
        return tensor

    map_tensors(step, collect)
    on_device = iter(arena.fill(on_host))
    return map_tensors(step, lambda _: next(on_device))
