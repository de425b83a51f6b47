"""Whole runs whose data comes from worker processes, or turns out bad on the way."""

import contextlib
import os
import shutil
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from mmtrain.data import read_quarantine
from mmtrain.program import Action
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.run_folder import QUARANTINE_FILE
from tests.data.producers import Served, ServedInTerminal
from tests.flow.runs import request_for, run_all
from tests.waiting import poll


def test_a_run_with_workers_is_the_run_without(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "data.workers=2")
    assert run_all(request, request) == ["", ""]
    assert [s["loss"] for s in read_metrics(tmp_path)] == [s["loss"] for s in read_metrics(unbroken)]


@pytest.mark.slow
def test_what_several_ranks_and_epochs_find_broken_is_quarantined_once(data: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "data"
    shutil.copytree(data, spoiled)
    for image in (spoiled / "images").rglob("*.png"):
        content = bytearray(image.read_bytes())
        content[len(content) // 2] ^= 255  # header and end are whole: only decoding can tell
        image.write_bytes(content)
    settings = ("parallel.placement=unified", "parallel.llm.dp=2", "data.workers=1", "data.max_bad_rate=1")
    request = request_for(spoiled, tmp_path / "run", *settings, "train.steps=2")
    assert run_all(request, request) == ["", ""]
    first = read_quarantine(tmp_path / "run" / QUARANTINE_FILE)
    again = replace(request_for(spoiled, tmp_path / "run", *settings, "train.steps=6"), resume=True)
    assert run_all(again, again) == ["", ""]
    found = read_quarantine(tmp_path / "run" / QUARANTINE_FILE)
    assert len({(q.source, q.index) for q in found}) == len(found)
    assert found[: len(first)] == first, "resuming forgets nothing"
    assert len(first) < len(found)


@dataclass
class TakeAwayImages(FaultPoints):
    """Makes a folder of images disappear when rank 0 begins step `step`, for `outage_s` seconds."""

    images: Path
    step: int
    outage_s: float
    rank: int = -1

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self.rank = rank

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        away = self.images.with_name("away")
        if step == self.step and self.images.exists() and self.rank == 0:
            self.images.rename(away)
            threading.Timer(self.outage_s, away.rename, [self.images]).start()


@pytest.mark.slow  # 40 s: an outage that is longer than the watchdog's patience
@pytest.mark.parametrize("settings", [("data.prefetch=0",), ("data.workers=0",), ("data.workers=1",)], ids=str)
def test_a_run_whose_images_go_away_waits_and_is_the_run_without(
    data: Path, unbroken: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    watchdog_s = 8
    shutil.copytree(data, tmp_path / "data")
    request = request_for(tmp_path / "data", tmp_path / "run", *settings, f"train.watchdog_s={watchdog_s}")
    faults = TakeAwayImages(tmp_path / "data" / "images", 1, 20.0)
    assert run_all(request, request, faults=faults) == ["", ""]
    assert [s["loss"] for s in read_metrics(tmp_path / "run")] == [s["loss"] for s in read_metrics(unbroken)]
    assert read_quarantine(tmp_path / "run" / QUARANTINE_FILE) == ()
    assert max(s["step_time_s"] for s in read_metrics(tmp_path / "run")) > 2 * watchdog_s, "it waited for its images"


@dataclass
class KillProducer(FaultPoints):
    """Kills a process when step `step` begins."""

    pid: int
    step: int

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if step == self.step:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@pytest.mark.slow  # 5 s
def test_a_run_whose_producer_is_killed_is_the_run_without(data: Path, unbroken: Path, tmp_path: Path) -> None:
    alone = request_for(data, tmp_path)
    served = alone.loaded.recipe
    with Served(served, tmp_path) as one, Served(served, tmp_path) as two:
        addresses = f"data.producers=[{one.address},{two.address}]"
        request = request_for(data, tmp_path / "run", addresses)
        assert run_all(request, request, faults=KillProducer(one.process.pid, 2)) == ["", ""]
    assert [s["loss"] for s in read_metrics(tmp_path / "run")] == [s["loss"] for s in read_metrics(unbroken)]


@pytest.mark.slow
@pytest.mark.parametrize("hang_up", ["kill -HUP $!", ""], ids=["ends", "goes on"])
def test_a_run_whose_producer_loses_its_terminal_is_the_run_without(
    data: Path, unbroken: Path, tmp_path: Path, hang_up: str
) -> None:
    with ServedInTerminal(request_for(data, tmp_path).loaded.recipe, tmp_path, hang_up) as producer:
        request = request_for(data, tmp_path / "run", f"data.producers=[{producer.address}]")
        assert run_all(request, request, faults=KillProducer(producer.process.pid, 2)) == ["", ""]
        if not hang_up:  # as after `disown`: it prints that the trainers have left, and nobody reads that
            again = request_for(data, tmp_path / "again", f"data.producers=[{producer.address}]")
            assert run_all(again, again) == ["", ""]
            assert not producer.has_ended()
            producer.end_producer()
        poll(producer.has_ended)
        assert producer.exit_code == 0
    assert [s["loss"] for s in read_metrics(tmp_path / "run")] == [s["loss"] for s in read_metrics(unbroken)]


@dataclass
class StopWorkersOf(FaultPoints):
    """Stops the workers of a producer when step `step` begins: it still answers, and makes nothing."""

    pid: int
    step: int

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if step == self.step:
            for process in psutil.Process(self.pid).children(recursive=True):
                process.suspend()


@pytest.mark.slow
def test_a_run_whose_producer_answers_and_makes_nothing_is_the_run_without(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    with Served(request_for(data, tmp_path).loaded.recipe, tmp_path) as producer:
        addresses = f"data.producers=[{producer.address}]"
        request = request_for(data, tmp_path / "run", addresses, "data.producer_step_timeout_s=0.5")
        workers = psutil.Process(producer.process.pid).children(recursive=True)
        try:
            assert run_all(request, request, faults=StopWorkersOf(producer.process.pid, 2)) == ["", ""]
        finally:
            for worker in workers:  # stopped, they would not notice that the producer ends
                worker.kill()
    assert [s["loss"] for s in read_metrics(tmp_path / "run")] == [s["loss"] for s in read_metrics(unbroken)]
