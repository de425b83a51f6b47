"""The training loop and its hooks, without a model: what runs in which order, and when."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mmtrain.errors import CheckpointError, FolderTaken, RunError
from mmtrain.recipe.settings.train_settings import BestSettings, CheckpointSettings, TrainSettings
from mmtrain.report import RunLog, StepMetrics, TimeSplit, read_metrics
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.executor import StepInput, StepOutcome
from mmtrain.runtime.resilience.folder_lock import FolderLock
from mmtrain.runtime.run_folder import SKIPPED_STEPS_FILE, read_run_state
from mmtrain.runtime.training.hooks.best_checkpoint import BestCheckpoint, BestTracker
from mmtrain.runtime.training.hooks.checkpoints import Checkpointing, CheckpointWriter, FinishBackgroundSave
from mmtrain.runtime.training.hooks.guards import FolderGuard, NonFiniteGuard
from mmtrain.runtime.training.hooks.reports import MetricsLog
from mmtrain.runtime.training.loop import Loop
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.training.step_metrics import RankFlags
from mmtrain.runtime.world import World

METRICS = StepMetrics(1, 2.0, 1.0, 0.1, 0.5, 4, 100, 0.1, 0.2, 1e12, TimeSplit(0.4, 0.1, 0.0, 0.0), 1000)


class Notes:
    """A display that records its messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def records(tmp_path: Path, notes: Notes) -> RunRecords:
    return RunRecords(tmp_path, cast(Any, notes), is_first=True)


def context(
    step: int,
    *,
    num_steps: int = 10,
    stop: bool = False,
    no_rank_saves: bool = True,
    lost_folder: bool = False,
) -> StepContext:
    """Return the context of a step (from 0) whose ranks have exchanged their metrics."""
    ctx = StepContext(step, num_steps)
    reduction = SimpleNamespace(stop_requested=stop, no_rank_saves=no_rank_saves, lost_folder=lost_folder)
    ctx.reduction = cast(Any, reduction)
    return ctx


@pytest.mark.parametrize(("every", "due"), [(0, [10]), (1, [*range(1, 11)]), (4, [4, 8, 10]), (5, [5, 10]), (20, [10])])
def test_work_is_due_every_so_many_steps_and_after_the_last(every: int, due: list[int]) -> None:
    steps = [StepContext(step, 10) for step in range(10)]
    assert [ctx.step_number for ctx in steps if ctx.is_due(every)] == due


class _Journal(StepHook):
    def __init__(self, name: str, lines: list[str]) -> None:
        self._name, self._lines = name, lines

    def before_step(self, ctx: StepContext) -> None:
        self._lines.append(f"{ctx.step_number} before {self._name}")
        ctx.lr = 0.5

    def after_step(self, ctx: StepContext) -> None:
        self._lines.append(f"{ctx.step_number} after {self._name}")
        ctx.checkpoint = Path(f"checkpoint-{ctx.step_number}")


class _Steps:
    """A prefetcher, a rank and a reducer whose ranks are asked to stop in step `stop_in` (from 1)."""

    def __init__(self, lines: list[str], num_steps: int, stop_in: int | None) -> None:
        self.lines, self.stop_in, self.wait_s = lines, stop_in, 0.0
        self.recipe = SimpleNamespace(train=SimpleNamespace(num_steps=num_steps))
        self.activity, self.train_executor = Activity(), self

    def __next__(self) -> SimpleNamespace:
        self.lines.append(f"{self.activity.step} load")
        return SimpleNamespace(
            data=SimpleNamespace(quarantined=(), meta=None), input=StepInput({}, cast(Any, None), {})
        )

    def run(self, step: StepInput) -> StepOutcome:
        self.lines.append(f"{self.activity.step} train with lr {step.lr}")
        return StepOutcome()

    def write_state(self, status: str, step: int, ended_early: str | None = None) -> None:
        self.lines.append(f"{status} after {step}{f': {ended_early}' if ended_early else ''}")

    def note(self, text: str) -> None:
        self.lines.append(text)

    def reduce(self, outcome: object, data_wait_s: float, num_broken_samples: int, flags: RankFlags) -> object:
        self.lines.append(f"{self.activity.step} measure")
        return SimpleNamespace(stop_requested=self.activity.step == self.stop_in)

    def metrics(self, *_: object) -> None:
        return None


def _loop(lines: list[str], num_steps: int, stop_in: int | None = None, end_after: int | None = None) -> Loop:
    parts = cast(Any, _Steps(lines, num_steps, stop_in))
    hooks = (_Journal("a", lines), _Journal("b", lines))
    return Loop(
        rank_context=parts,
        steps=parts,
        reducer=parts,
        flags=lambda: RankFlags(False, False),
        memory_report=parts,
        records=parts,
        hooks=hooks,
        early_end=lambda: "it is enough" if end_after is not None and parts.activity.step == end_after else None,
    )


def test_hooks_run_in_their_order_before_and_after_each_step() -> None:
    lines: list[str] = []
    assert _loop(lines, num_steps=2).run(1) is None
    assert lines == [
        "2 before a", "2 before b", "2 load", "2 train with lr 0.5", "2 measure", "2 after a", "2 after b",
        "done after 2",
    ]  # fmt: skip


def test_a_run_that_is_asked_to_stop_ends_after_that_step_with_its_checkpoint() -> None:
    lines: list[str] = []
    assert _loop(lines, num_steps=5, stop_in=2).run(0) == Path("checkpoint-2")
    assert lines[-1] == "2 after b"  # and not that it is done
    assert _loop(lines, num_steps=2, stop_in=2).run(0) is None, "it has done all its steps"


def test_a_run_that_gains_no_more_ends_before_the_next_step_and_says_why() -> None:
    lines: list[str] = []
    assert _loop(lines, num_steps=5, end_after=2).run(0) is None
    assert lines[-3:] == [
        "2 after b", "the run ends early, after step 2 of 5: it is enough", "done after 2: it is enough",
    ]  # fmt: skip


class _Saver:
    """Saves nothing; fails the given number of times."""

    def __init__(self, failures: int = 0) -> None:
        self.pending, self.step, self.failures = False, 0, failures
        self.starts: list[tuple[int, bool]] = []

    def start(self, next_step: int, copy: bool) -> None:
        assert not self.pending
        self.pending, self.step = True, next_step
        self.starts.append((next_step, copy))

    def finish(self) -> Path:
        self.pending = False
        if self.failures:
            self.failures -= 1
            raise CheckpointError("disk full")
        return Path(f"step-{self.step}")


@pytest.fixture
def make_hooks(records: RunRecords) -> Callable[..., tuple[FinishBackgroundSave, Checkpointing]]:
    def make(saver: _Saver, background: bool = True) -> tuple[FinishBackgroundSave, Checkpointing]:
        settings = CheckpointSettings(every=4, async_save=background, max_failures=2)
        writer = CheckpointWriter(cast(Any, saver), settings, records, Activity())
        return FinishBackgroundSave(writer), Checkpointing(writer, records, settings)

    return make


def test_a_background_save_is_finished_when_no_rank_is_writing(
    make_hooks: Callable[..., Any], records: RunRecords, notes: Notes
) -> None:
    saver = _Saver()
    finish, save = make_hooks(saver)
    save.after_step(context(3))
    assert saver.starts == [(4, True)]
    finish.after_step(context(4, no_rank_saves=False))
    assert saver.pending
    assert not notes.texts
    finish.after_step(context(5))
    assert not saver.pending
    assert notes.texts == ["saved step-4"]
    assert read_run_state(records.run_dir) == {"status": "running", "step": 4, "error": None}


def test_a_stopped_run_saves_at_once_and_a_finished_one_waits_for_its_save(
    make_hooks: Callable[..., Any], records: RunRecords
) -> None:
    saver = _Saver()
    _, save = make_hooks(saver)
    save.after_step(context(5, stop=True))
    assert (saver.starts, saver.pending) == ([(6, False)], False)
    assert read_run_state(records.run_dir)["status"] == "stopped"
    last = context(9)
    save.after_step(last)
    assert last.checkpoint == Path("step-10")
    assert read_run_state(records.run_dir) == {"status": "running", "step": 10, "error": None}


def test_failed_saves_end_the_run_when_too_many_or_when_nothing_comes_after(
    make_hooks: Callable[..., Any], notes: Notes
) -> None:
    _, save = make_hooks(_Saver(failures=1), background=False)
    save.after_step(context(3))
    assert notes.texts == ["not saved (1 of 2 in a row): disk full"]
    save.after_step(context(7))
    _, save = make_hooks(_Saver(failures=2), background=False)
    save.after_step(context(3))
    with pytest.raises(RunError, match="2 checkpoints in a row could not be saved"):
        save.after_step(context(7))
    _, save = make_hooks(_Saver(failures=1), background=False)
    with pytest.raises(CheckpointError, match="disk full"):
        save.after_step(context(9))


def test_steps_without_a_finite_gradient_end_the_run_when_too_many_come_in_a_row(
    records: RunRecords, notes: Notes
) -> None:
    index = cast(Any, SimpleNamespace(samples=[SimpleNamespace(id=name) for name in "abc"]))
    guard = NonFiniteGuard(index, records, max_nonfinite_steps=2)

    def run(step: int, stepped: bool) -> None:
        ctx = context(step)
        ctx.outcome = StepOutcome(grad_norm=1.0 if stepped else float("nan"), stepped=stepped)
        ctx.data = cast(Any, SimpleNamespace(meta=SimpleNamespace(sample_id=np.array([0, 2]))))
        guard.after_step(ctx)

    for step, stepped in enumerate([True, False, True, False]):
        run(step, stepped)
    assert notes.texts[0] == "step 2: the gradient norm is nan; no weight was changed, samples in skipped.jsonl"
    with pytest.raises(RunError, match=r"step 5: the gradient norm was not finite in 2 steps in a row"):
        run(4, stepped=False)
    lines = (records.run_dir / SKIPPED_STEPS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 5]
    assert json.loads(lines[0]) == {"step": 2, "grad_norm": "nan", "samples": ["a", "c"]}


def test_a_run_ends_on_all_ranks_when_its_folder_was_taken(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock, FolderLock(tmp_path) as other:
        guard = FolderGuard(lock.claim())
        guard.after_step(context(1))
        other.claim(force=True)
        with pytest.raises(FolderTaken, match="This run ends without saving"):
            guard.after_step(context(2, lost_folder=True))


def test_the_checkpoint_of_the_best_step_is_saved_and_that_of_an_early_end_waited_for(
    make_hooks: Callable[..., Any],
) -> None:
    saver = _Saver()
    _, save = make_hooks(saver)
    best = context(1)
    best.is_best = True
    save.after_step(best)
    assert saver.starts == [(2, True)]
    last = context(2)
    last.ends_early = True
    save.after_step(last)
    assert saver.starts == [(2, True), (3, False)]
    assert last.checkpoint == Path("step-3")


def test_what_a_stopped_step_left_out_is_added_to_its_entry_once(tmp_path: Path, records: RunRecords) -> None:
    with RunLog(tmp_path, 1, enabled=True) as log:
        log.step(METRICS)
        log.step(replace(METRICS, step=2, extra={"of_a_plugin": 1.0}))
        tracker = BestTracker(BestSettings(metric="val_loss"))
        train = TrainSettings.model_construct(best=BestSettings(metric="val_loss"), validate_every=2)
        hooks = (
            BestCheckpoint(tracker, train, World(0, 1, torch.device("cpu")), records),
            MetricsLog(log, cast(Any, None), records),
        )
        logged = read_metrics(tmp_path)[-1]
        ctx = StepContext(1, 10)
        ctx.metrics = replace(METRICS, step=2, val_loss=0.5, extra={"val_anls": 0.25})
        for hook in hooks:
            hook.catch_up(ctx, logged)
        log.step(replace(METRICS, step=3))
    first, second, third = read_metrics(tmp_path)
    assert (first["step"], third["step"], "val_loss" in first) == (1, 3, False)
    assert second == {**logged, "val_loss": 0.5, "extra": {"of_a_plugin": 1.0, "val_anls": 0.25}}
    assert (tracker.best_step, tracker.best_value) == (2, 0.5)
    hooks[0].catch_up(ctx, second)
    assert tracker.state()["best"]["num_without_gain"] == 0, "it was measured, and is not observed twice"
