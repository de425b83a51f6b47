"""Storage that is away is waited for, and no sample is taken for bad; a single bad file is not waited for."""

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import Loader
from mmtrain.data.formats.sample import Sample
from mmtrain.data.loading import storage_outage
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.storage_outage import (
    PROBE_TIMEOUT_S,
    SLOW_READ_S,
    OutageReport,
    PatientReader,
    ReadWatch,
    StorageProbe,
    _mount_of,
)
from mmtrain.data.loading.watched_reads import WatchedReads
from mmtrain.data.loading.worker_pool import HANG_TIMEOUT_S, StepFailure, WorkerPool
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia
from mmtrain.errors import StorageAwayError
from tests.data.fake_step_builders import HangingStepBuilder
from tests.data.steps import DP, EVERYTHING, ONE, Dataset, same
from tests.waiting import MAX_WAIT_S

FIRST = StepRequest(0, DP, ONE, EVERYTHING)


class Clock:
    """A clock that a test sets, and that moves when someone sleeps by it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def samples_of(folder: Path, count: int = 6) -> list[Sample]:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(b"picture")
    return [
        Sample(f"s{number}", "train.json", number, (), (FileMedia(str(folder / f"{number}.png")),))
        for number in range(count)
    ]


def test_a_file_that_is_gone_is_no_outage_and_a_folder_that_is_gone_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    probe = StorageProbe(samples_of(folder))
    (folder / "2.png").unlink()
    assert probe.find_outage(2) == ""
    folder.rename(tmp_path / "elsewhere")
    assert probe.find_outage(2).startswith(f"4 of 4 other files of {folder} (")
    assert probe.find_outage(2).endswith("No such file or directory")
    folder.mkdir()  # a mount point with nothing mounted
    assert "4 of 4 other files" in probe.find_outage(2)


@pytest.mark.parametrize("how", ["gone", "empty", "there"])
def test_the_only_file_of_a_source_is_judged_by_its_folder(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "images"
    probe = StorageProbe(samples_of(folder, count=1))
    (folder / "0.png").unlink()
    if how == "gone":
        folder.rmdir()
    elif how == "there":
        (folder / "another.png").write_bytes(b"")
    outage = probe.find_outage(0)
    assert (
        outage
        == {
            "gone": f"its folder {folder} cannot be read: No such file or directory",
            "empty": f"its folder {folder} is empty",
            "there": "",
        }[how]
    )


def test_files_that_do_not_answer_are_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    def block(self: FileMedia) -> Any:
        threads.append(threading.current_thread())
        release.wait(MAX_WAIT_S)
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(storage_outage, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(FileMedia, "open", block)
    probe = StorageProbe(samples_of(tmp_path / "images"))
    assert [probe.find_outage(0).partition(" (")[0] for _ in range(2)] == [str(tmp_path / "images")] * 2
    assert "does not answer in 0.05 s" in probe.find_outage(0)
    assert len(set(threads)) == 1, "a blocked question is not asked again"
    release.set()
    threads[0].join(MAX_WAIT_S)


def test_mounts_name_the_server(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:20 / / rw - ext4 /dev/sda1 rw\n"
        "36 22 0:30 / /data rw,noatime master:1 - nfs4 files:/export rw\n"
        "37 22 0:31 / /data2 rw - nfs4 other:/export rw\n"
    )
    assert _mount_of("/data/images", table) == "files:/export, nfs4"
    assert _mount_of("/data", table) == "files:/export, nfs4"
    assert _mount_of("/home", table) == "/dev/sda1, ext4"
    assert _mount_of("/data", tmp_path / "none") == ""


class Reads:
    """A patient reader of a file, with a clock of its own; `outages` are what the probe finds, one after another."""

    def __init__(self, path: Path, outages: list[str], patience_s: float = 100.0) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        self.heartbeats_s: list[float] = []
        answers: Iterator[str] = itertools.chain(outages, itertools.repeat(""))
        self._medium = FileMedia(str(path))
        self._reader = PatientReader(
            lambda _: next(answers),
            patience_s,
            lambda _: self.heartbeats_s.append(self.clock.now_s),
            self.told.append,
            self.clock.sleep,
            self.clock,
        )

    def __call__(self, load: Callable[[], int]) -> int:
        return self._reader.read(7, self._medium, load)


def failing(*errors: Exception | None) -> Callable[[], int]:
    """Return a function that raises these errors one after another, and answers 5 where there is none."""
    remaining = iter(errors)

    def load() -> int:
        error = next(remaining)
        if error is not None:
            raise error
        return 5

    return load


BAD = BadMediaError("undecodable", "broken")


def test_bad_data_is_bad_at_once_and_a_passing_fault_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "there.png"
    path.write_bytes(b"x")
    with pytest.raises(BadMediaError, match="broken"):
        Reads(path, [])(failing(BAD, BAD))
    reads = Reads(path, [])
    assert reads(failing(BAD, None)) == 5
    assert reads.clock.now_s == 0


def test_a_file_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    reads = Reads(tmp_path / "gone.png", [])
    with pytest.raises(BadMediaError, match="broken"):
        reads(failing(BAD))
    assert reads.clock.now_s == 0
    assert reads.told == []


def test_a_file_that_cannot_be_read_on_healthy_storage_is_tried_once_more_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FileMedia) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileMedia, "open", fail)
    reads = Reads(tmp_path / "bad_sector.png", [])
    with pytest.raises(BadMediaError, match=r"bad_sector.png: .*Input/output error") as raised:
        reads(failing(BAD, BAD))
    assert raised.value.kind == "unreadable"
    assert reads.clock.now_s == 60
    assert max(b - a for a, b in itertools.pairwise(reads.heartbeats_s)) <= 1, "a watcher would take it for stuck"


def test_an_outage_is_waited_for_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "away.png"
    reads = Reads(path, ["the server is away"] * 3)
    assert reads(failing(BAD, None)) == 5
    assert reads.told == [f"{path} cannot be read, and the server is away"] * 3 + [""]
    assert reads.clock.now_s == 15


def test_patience_ends(tmp_path: Path) -> None:
    reads = Reads(tmp_path / "away.png", ["the server is away"] * 99, patience_s=60.0)
    with pytest.raises(StorageAwayError, match=r"waited for 60 s \(data.storage_patience_s\)"):
        reads(failing(BAD))
    assert reads.clock.now_s == 60
    assert reads.told[-1] == ""
    at_once = Reads(tmp_path / "away.png", ["the server is away"], patience_s=0.0)
    with pytest.raises(StorageAwayError):
        at_once(failing(BAD))


def test_a_server_that_denies_or_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    reads = Reads(tmp_path / "remote.png", ["no answer"])
    assert reads(failing(StorageAwayError("status 503"), None)) == 5


class Status:
    """A reader that shows what a test says."""

    def __init__(self) -> None:
        self.num_changes, self.sample, self.waits_for = 1, 3, ""

    def read(self) -> tuple[int, int | None]:
        return self.num_changes, self.sample

    def outage(self) -> str:
        return self.waits_for


def test_a_watch_tells_readers_that_are_stuck_from_those_whose_storage_is_away() -> None:
    watch, status, outage = ReadWatch(), Status(), ""
    find = lambda sample: outage  # noqa: E731
    assert watch.look(status, 0.0, find) == 0
    assert watch.look(status, SLOW_READ_S + 1, find) == SLOW_READ_S + 1
    outage = "away"
    assert watch.look(status, 100.0, find) == 0
    assert (watch.outage, watch.outage_s(130.0)) == ("away", 30.0)
    outage = ""
    assert watch.look(status, 140.0, find) == 0, "it gets time to come back"
    assert watch.look(status, 141.0, find) == 1
    assert watch.outage == ""
    status.num_changes, status.waits_for = 2, "away, says the reader"
    assert watch.look(status, 150.0, find) == 0
    assert watch.outage == "away, says the reader"


def test_a_thread_that_blocks_is_reported_within_a_minute_and_once() -> None:
    clock, notes, changes = Clock(), list[str](), list[str]()
    outages = ["", "server files is away", "server files is away", ""]
    report = OutageReport(notes.append, 3600.0, changes.append, clock)
    with WatchedReads(lambda sample: outages.pop(0), report, clock) as reads:
        reads.monitor.on_read(3)
        reads.look()
        for _ in range(4):
            clock.now_s += SLOW_READ_S + 1
            reads.look()
    waits = "Training waits for it, 3600 s at most (data.storage_patience_s), and quarantines nothing"
    assert notes == [f"server files is away. {waits}", "storage is back after 62 s"]
    assert changes == ["server files is away", ""]
    assert SLOW_READ_S + PROBE_TIMEOUT_S + 5 < 60, "a blocked read is reported within a minute"


class AwayStepBuilder(HangingStepBuilder):
    """Hangs as its base does, over storage that is away while `outage` says so; only the watching process asks."""

    outage = ""

    def find_outage(self, sample_id: int) -> str:
        return self.outage


def test_a_worker_that_waits_for_storage_is_not_killed(tmp_path: Path) -> None:
    reached, clock, notes = tmp_path / "reached", Clock(), list[str]()
    os.mkfifo(reached)
    builder = AwayStepBuilder(str(reached))
    told = list[str]()
    with WorkerPool[int](builder, 1, notes.append, clock, told.append) as pool:  # type: ignore[arg-type]
        pool.submit(3, replace(FIRST, step=3))
        reached.open().close()
        pool.kill_hung_workers()

        def pass_time(seconds: float) -> None:
            for _ in range(int(seconds / 30)):
                clock.now_s += 30
                pool.kill_hung_workers()

        builder.outage = "server files is away"
        pass_time(600)
        assert (told[-1], notes) == ("server files is away", [])
        builder.outage = ""
        pass_time(60)
        assert (told[-1], notes) == ("", []), "it has a minute to come back"
        builder.outage = "server files is away"
        pass_time(builder.patience_s + HANG_TIMEOUT_S + 60)
        wait(pool.pipes)
        received = pool.receive(pool.pipes[0])
    assert received is not None
    failure = received[1]
    assert isinstance(failure, StepFailure)
    assert isinstance(failure.error(3), StorageAwayError)
    assert "server files is away. The run waited for 3600 s" in failure.message


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_are_the_same_through_an_outage(
    made: Dataset, tmp_path: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures go away while steps are made, and come back when that was told."""
    monkeypatch.setattr(storage_outage, "POLL_S", 0.01)
    monkeypatch.setattr("mmtrain.data.loading.watched_reads.WATCH_INTERVAL_S", 0.01)
    recipe, index, stream = made(prefetch=prefetch)
    check_outage(Loader(index, stream, made(prefetch=0)[0], FIRST), recipe, index, stream, tmp_path)


@pytest.mark.slow  # 15 s: workers look for their storage every five seconds
def test_steps_of_workers_are_the_same_through_an_outage(made: Dataset, tmp_path: Path) -> None:
    recipe, index, stream = made(prefetch=2, workers=2)
    check_outage(Loader(index, stream, made(prefetch=0, workers=0)[0], FIRST), recipe, index, stream, tmp_path)


def check_outage(reference: Loader, recipe: Any, index: Any, stream: Any, folder: Path) -> None:
    with reference:
        expected = [next(reference) for _ in range(30)]
    pictures = [path for path in folder.iterdir() if path.suffix == ".png"]
    away = folder / "away"
    notes: list[str] = []

    def notify(note: str) -> None:
        notes.append(note)
        if "Training waits for it" in note:
            for path in away.iterdir():
                shutil.move(path, folder)

    with Loader(index, stream, recipe, FIRST, notify=notify) as loader:
        found = [next(loader) for _ in range(5)]
        away.mkdir()
        for path in pictures:
            shutil.move(path, away)
        found += [next(loader) for _ in range(25)]
    assert all(same(left, right) for left, right in zip(found, expected, strict=True))
    assert [note.partition(" after ")[0] for note in notes][1:] == ["storage is back"]
    assert f"other files of {folder} (" in notes[0]


def test_the_watched_builder_names_the_sample(made: Dataset) -> None:
    recipe, index, stream = made()
    builder = StepBuilder(index, stream, recipe)
    victim = next(number for number, sample in enumerate(index.samples) if sample.images)
    folder = Path(str(index.samples[victim].images[0])).parent
    assert builder.find_outage(victim) == ""
    folder.rename(folder.with_name("away"))
    assert builder.find_outage(victim).startswith(f"media of {index.samples[victim]} cannot be read, and 4 of 4 other")
    folder.with_name("away").rename(folder)
