"""The loader: steps in order, prepared ahead of the one being trained."""

import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from mmtrain.data.index import DataIndex
from mmtrain.data.order import GroupStream
from mmtrain.data.prepare import BadSamples, Need, StepData, StepMaker, StepRequest
from mmtrain.data.window import Window
from mmtrain.errors import MmtrainError, RunError
from mmtrain.recipe.schema import Recipe


class Loader:
    """Iterates over the steps of a run from `start_step` on, without end.

    Keeps `data.prefetch` steps ready; what goes wrong while one is prepared is raised by the `next` that would have
    returned it. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        index: DataIndex,
        stream: GroupStream,
        recipe: Recipe,
        dp: Mapping[str, int],
        num_microbatches: int,
        needs: tuple[Need, ...],
        start_step: int = 0,
    ) -> None:
        """Start preparing. `dp` gives every unit's data-parallel size, "llm" included."""
        self._dp, self._num_microbatches, self._needs = dict(dp), num_microbatches, needs
        self._maker = StepMaker(index, stream, recipe)
        self._bad = BadSamples(index, recipe.data.max_bad_rate)
        self._step = start_step
        self._window = Window[StepData](start_step, recipe.data.prefetch + 1)  # one in the making, the others ready
        self._thread: threading.Thread | None = None
        if recipe.data.prefetch:
            self._thread = threading.Thread(target=self._prepare, name="mmtrain-loader", daemon=True)
            self._thread.start()
        self.wait_s = 0.0  # how long `next` kept its caller waiting, all together

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        start = time.perf_counter()
        try:
            made = self._window.take() if self._thread is not None else self._make(self._step)
            data = self._bad.first_time(made)
        except MmtrainError:
            raise
        except Exception as error:
            raise RunError(f"preparing step {self._step} failed: {type(error).__name__}: {error}") from error
        finally:
            self.wait_s += time.perf_counter() - start
        self._step += 1
        return data

    def _make(self, step: int) -> StepData:
        return self._maker.make(StepRequest(step, self._dp, self._num_microbatches, self._needs))

    def _prepare(self) -> None:
        while (step := self._window.claim(wait=True)) is not None:
            try:
                self._window.put(step, self._make(step))
            except Exception as error:
                self._window.put(step, error)

    def close(self) -> None:
        """Stop preparing and wait for that to end."""
        self._window.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
