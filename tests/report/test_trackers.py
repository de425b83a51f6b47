"""Trackers that raise, hang or lose a disk cost the training nothing, and hold each step once in the end."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from mmtrain import process_end
from mmtrain.report import RunLog, read_metrics
from mmtrain.report.scalars import step_scalars
from mmtrain.report.trackers import ShownAnswer, TrackedRun, Tracker, TrackerFeeds
from mmtrain.report.trackers.feed import MAX_TRACKER_FAILURES, TrackerLimits
from mmtrain.report.trackers.mlflow_tracker import cut_metric_files
from mmtrain.report.trackers.tensorboard_tracker import TensorBoardTracker
from mmtrain.report.trackers.wandb_tracker import wandb_mode
from tests.full_disk import full_disk
from tests.report.conftest import metrics
from tests.tracked_steps import tensorboard_events, tensorboard_losses

LIMITS = TrackerLimits(first_retry_s=0.01, end_s=60.0, interrupted_end_s=60.0)
AFTER_ROOM = TrackerLimits(first_retry_s=60.0, end_s=60.0)  # closing ends the wait

IMPATIENT = TrackerLimits(first_retry_s=0.01, silent_s=0.0, end_s=0.2, interrupted_end_s=0.2)


def tracked(run_dir: Path, first_step: int = 1) -> TrackedRun:
    return TrackedRun(
        "abcd1234", "demo", run_dir, first_step, "name: demo\n", "{}", "a plan", {"train.steps": 6}, {"commit": "12ab"}
    )


class ListTracker:
    """Holds what it gets in memory. `fails_at` maps steps to how often they raise."""

    def __init__(self, held: int = 0, fails_at: dict[int, int] | None = None) -> None:
        self.steps: list[int] = list(range(1, held + 1))
        self.answers: list[tuple[int, int]] = []
        self.end, self.summary = "", {}
        self.fails_at = fails_at or {}
        self.num_starts = self.num_abandoned = 0

    def start(self, run: TrackedRun) -> int:
        self.num_starts += 1
        self.steps = [step for step in self.steps if step < run.first_step]
        return max(self.steps, default=0)

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.fails_at.get(step, 0) > 0:
            self.fails_at[step] -= 1
            raise ConnectionError("https://me:secret@tracker.invalid answered 503")
        self.steps.append(step)

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        self.answers.append((step, len(answers)))

    def flush(self) -> None: ...

    def finish(self, end: str, summary: Mapping[str, str | float]) -> None:
        self.end, self.summary = end, dict(summary)

    def abandon(self) -> None:
        self.num_abandoned += 1


def train(run_dir: Path, first: int, last: int, feeds: TrackerFeeds, num_steps: int = 6) -> None:
    with feeds, RunLog(run_dir, first, enabled=True) as log:
        for step in range(first, last + 1):
            has_answers = step % 2 == 0
            if has_answers:
                log.answers(step, [{"question": "q", "expected": "a", "answered": "b", "pictures": []}])
            log.step(metrics(step, val_exact=0.0 if has_answers else None))
            feeds.more(is_last=step == num_steps)


def feeds_of(
    run_dir: Path, tracker: Tracker, first: int = 1, limits: TrackerLimits = LIMITS
) -> tuple[TrackerFeeds, list[str]]:
    notes: list[str] = []
    feeds = TrackerFeeds(tracked(run_dir, first), {"list": lambda: tracker}, notes.append, lambda: {"x": 1.0}, limits)
    return feeds, notes


def test_a_tracker_hears_of_every_step_its_answers_and_the_summary(tmp_path: Path) -> None:
    tracker = ListTracker()
    feeds, _ = feeds_of(tmp_path, tracker)
    train(tmp_path, 1, 6, feeds)
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    assert tracker.answers == [(2, 1), (4, 1), (6, 1)]
    assert (tracker.end, tracker.summary) == ("done", {"x": 1.0})


def test_a_run_that_is_resumed_repeats_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    tracker = ListTracker()
    train(tmp_path, 1, 5, feeds_of(tmp_path, tracker)[0])
    assert tracker.end == "interrupted"
    train(tmp_path, 4, 6, feeds_of(tmp_path, tracker, first=4)[0])
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    assert tracker.answers == [(2, 1), (4, 1), (4, 1), (6, 1)], "the tracker's own start drops what is repeated"


def test_what_a_killed_run_did_not_show_is_shown_by_the_next_start(tmp_path: Path) -> None:
    tracker = ListTracker(held=1)
    with RunLog(tmp_path, 1, enabled=True) as log:
        for step in (1, 2, 3, 4, 5):
            log.step(metrics(step))
    train(tmp_path, 4, 6, feeds_of(tmp_path, tracker, first=4)[0])
    assert tracker.steps == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_raises_is_opened_again_and_catches_up(tmp_path: Path) -> None:
    tracker = ListTracker(fails_at={3: 2})
    feeds, notes = feeds_of(tmp_path, tracker)
    train(tmp_path, 1, 6, feeds)
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    assert (tracker.num_starts, tracker.num_abandoned) == (3, 2)
    [note] = notes
    assert note.startswith("tracker list: ConnectionError: https://***@tracker.invalid answered 503. The training")


def test_a_tracker_that_always_raises_is_left_alone(tmp_path: Path) -> None:
    tracker = ListTracker(fails_at={1: 10**6})
    feeds, notes = feeds_of(tmp_path, tracker)
    train(tmp_path, 1, 6, feeds)
    assert tracker.num_starts == MAX_TRACKER_FAILURES
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert notes[1:] == ["tracker list: it has the steps up to 0 at most; metrics.jsonl has every step"]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_tracker_that_hangs_stops_nothing(
    tmp_path: Path, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_end, "_may_hang", threading.Event())

    class Hanging(ListTracker):
        def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
            reached.set()
            release.wait()

    reached = threading.Event()
    feeds, notes = feeds_of(tmp_path, Hanging(), limits=IMPATIENT)
    with RunLog(tmp_path, 1, enabled=True) as log:
        log.step(metrics(1))
        feeds.more()
        assert reached.wait(60)
        for step in range(2, 7):
            log.step(metrics(step))
            feeds.more(is_last=step == 6)
        feeds.close()
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert process_end._may_hang.is_set(), "hooks of its library may hang at the end of the process"
    assert [note.split(".")[0] for note in notes] == [
        "tracker list: no answer for 0 s",
        "tracker list: it has the steps up to 0 at most; metrics",
    ]


def test_a_run_without_trackers_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    feeds = TrackerFeeds(None, {"list": ListTracker}, lambda _: None)
    feeds.more(is_last=True)
    assert threading.active_count() == before
    feeds.close()


# TensorBoard


def log(run_dir: Path, first: int, last: int, **changes: float) -> None:
    feeds = TrackerFeeds(tracked(run_dir, first), {"tensorboard": TensorBoardTracker}, lambda _: None, limits=LIMITS)
    with feeds, RunLog(run_dir, first, enabled=True) as run_log:
        for step in range(first, last + 1):
            run_log.step(metrics(step, **changes))
            feeds.more()


def age_events(run_dir: Path) -> None:
    """TensorBoard reads files in the order of the second in their names; a resumed run starts in a later second."""
    for number, path in enumerate(sorted((run_dir / "tensorboard").glob("events.*"))):
        path.rename(path.with_name(f"events.out.tfevents.{1000000000 + number}.host.1.0"))


def test_tensorboard_shows_the_last_attempt_of_each_step(tmp_path: Path) -> None:
    log(tmp_path, 1, 4)
    age_events(tmp_path)
    log(tmp_path, 3, 5, loss=0.25)
    assert [step for step, _ in tensorboard_losses(tmp_path)] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in tensorboard_losses(tmp_path)][2:] == [0.25] * 3
    events = tensorboard_events(tmp_path)
    assert "time_s/wait" in events.Tags()["tensors"]
    assert b"name: demo" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_events_that_a_kill_took_are_written_again(tmp_path: Path) -> None:
    """A kill may take the events of the last seconds, although their steps came before the checkpoint."""
    log(tmp_path, 1, 2)
    age_events(tmp_path)
    with RunLog(tmp_path, 3, enabled=True) as run_log:
        for step in (3, 4, 5):
            run_log.step(metrics(step))
    log(tmp_path, 5, 6)
    assert [step for step, _ in tensorboard_losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_after_a_full_disk_tensorboard_catches_up(tmp_path: Path) -> None:
    with RunLog(tmp_path, 1, enabled=True) as run_log:
        for step in range(1, 7):
            run_log.step(metrics(step))
    notes: list[str] = []
    told = threading.Event()
    feeds = TrackerFeeds(
        tracked(tmp_path, 7),
        {"tensorboard": TensorBoardTracker},
        lambda note: (notes.append(note), told.set())[0],
        limits=AFTER_ROOM,
    )
    with full_disk(600):
        feeds.more(is_last=True)
        assert told.wait(60)
    feeds.close()
    age_events(tmp_path)
    assert "File too large" in notes[0] or "OSError" in notes[0]
    assert [step for step, _ in tensorboard_losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


# W&B and MLflow


def test_wandb_is_offline_where_there_is_no_login(tmp_path: Path) -> None:
    assert wandb_mode({}, tmp_path) == "offline"
    assert wandb_mode({"WANDB_API_KEY": "x" * 40}, tmp_path) == "online"
    assert wandb_mode({"WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}, tmp_path) == "offline"
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {'x' * 40}\n")
    assert wandb_mode({}, tmp_path) == "online"
    assert wandb_mode({"WANDB_BASE_URL": "https://wandb.lab.example"}, tmp_path) == "offline"


def test_mlflow_points_after_a_step_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "train" / "loss"
    file.parent.mkdir(parents=True)
    file.write_text("1700000000000 2.5 1\n1700000000001 nan 2\n1700000000002 1.5 3\n17000")
    cut_metric_files(tmp_path / "metrics", 2)
    assert file.read_text() == "1700000000000 2.5 1\n1700000000001 nan 2\n"


def test_scalars_of_a_step(tmp_path: Path) -> None:
    """Only numbers are curves."""
    with RunLog(tmp_path, 1, enabled=True) as run_log:
        run_log.step(metrics(1, loss=float("nan"), slow_ranks=("rank 1",)))
    [entry] = read_metrics(tmp_path)
    scalars = step_scalars(entry)
    assert "train/loss" not in scalars
    assert scalars["train/grad_norm"] == 0.81
    assert scalars["time_s/compute"] == 0.355
    assert not [name for name in scalars if "slow" in name or name == "train/step"]
