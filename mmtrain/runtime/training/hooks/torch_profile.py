"""Profile the steps that `train.profile` names with torch's own profiler, on every rank."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mmtrain.recipe.settings.train_settings import ProfileSettings
from mmtrain.runtime.execution.activity import TRACING, Activity
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook

PROFILE_FOLDER = "profile"
MAX_MEMORY_EVENTS = 200_000  # allocations of a snapshot: some hundred MB, as torch's pages on it set


class TorchProfiling(StepHook):
    """Writes a Chrome trace of operators and kernels for each rank, and on CUDA a snapshot of its memory.

    Only the named steps are slower. A profiler that fails costs the run its trace and nothing else.
    """

    def __init__(
        self, settings: ProfileSettings, rank: int, device: torch.device, activity: Activity, records: RunRecords
    ) -> None:
        self._first, self._last = settings.steps
        self._records_memory = settings.memory
        self._rank, self._device, self._activity, self._records = rank, device, activity, records
        self._profiler: Any = None

    def before_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if ctx.step_number == self._first:
            self._guarded(ctx.step_number, self._start)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if self._profiler is None:
            return
        if ctx.step_number < self._last and not ctx.is_last and not ctx.reduction.stop_requested:
            self._profiler.step()
            return
        self._activity.start(TRACING)
        self._guarded(ctx.step_number, self._write)

    def close(self) -> None:
        """See `StepHook`."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if self._records_memory:
                torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self._profiler = profile(activities=activities, profile_memory=self._records_memory, record_shapes=True)
        self._profiler.start()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self._records.run_dir / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        trace = folder / f"rank-{self._rank}.json"
        profiler.export_chrome_trace(str(trace))
        _compress(trace)
        if self._device.type == "cuda" and self._records_memory:
            snapshot = str(folder / f"memory-rank-{self._rank}.pickle")
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._records.is_first:
            self._records.note(f"steps {self._first} to {self._last} are profiled in {folder} (for Perfetto)")

    def _guarded(self, step: int, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, RuntimeError) as error:  # a full disk, or tools of the GPU that another profiler holds
            self._profiler = None
            self._records.note(f"step {step}: train.profile: {error}")


def _compress(path: Path) -> None:
    """Replace a trace by its compressed form, which viewers open too and which is ten times smaller."""
    with path.open("rb") as source, gzip.open(path.with_name(f"{path.name}.gz"), "wb", compresslevel=4) as target:
        shutil.copyfileobj(source, target)
    path.unlink()
