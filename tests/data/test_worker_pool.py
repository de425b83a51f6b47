"""Steps built in worker processes are the same, whatever happens to the workers."""

import os
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mmtrain.data import Loader, StepData
from mmtrain.data.loader import choose_num_workers
from mmtrain.data.loading import worker_pool
from mmtrain.data.loading.batch_builder import ReadMonitor, StepBuilder, StepRequest
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.data.loading.step_format import unpack
from mmtrain.data.loading.worker_pool import HANG_TIMEOUT_S, MAX_DEATHS_PER_STEP, StepFailure, WorkerPool
from mmtrain.errors import DataError, RunError
from mmtrain.recipe.settings.data_settings import DataSettings
from tests.data.fake_step_builders import (
    CrashingAtOnceStepBuilder,
    CrashingStepBuilder,
    DeadlyStepBuilder,
    FailingStepBuilder,
    FakeStepBuilder,
    HangingStepBuilder,
    SlowStepBuilder,
    StuckStepBuilder,
    TellingStepBuilder,
    UnloadableStepBuilder,
    UnsendableStepBuilder,
)
from tests.data.steps import DP, EVERYTHING, Dataset, same
from tests.waiting import MAX_WAIT_S


def request(step: int) -> StepRequest:
    return StepRequest(step, {"llm": 1}, {"llm": 1}, ())


def hosts() -> list[psutil.Process]:
    """Return the hosts of our workers; other tests may have remaining servers running."""
    return [child for child in psutil.Process().children() if "mmtrain.data.loading.worker_process" in child.cmdline()]


def run(builder: Any, steps: int, workers: int = 2) -> tuple[dict[int, StepData | StepFailure], list[str]]:
    """Build steps [0, steps) in a pool; return the results and the notes."""
    notes: list[str] = []
    results: dict[int, StepData | StepFailure] = {}
    with WorkerPool[int](builder, workers, notes.append) as pool:
        remaining = list(range(steps))
        while len(results) < steps:
            while remaining and pool.num_idle:
                pool.submit(remaining[0], request(remaining.pop(0)))
            for pipe in wait(pool.pipes):
                if (received := pool.receive(pipe)) is not None:  # type: ignore[arg-type]
                    step, content = received
                    assert step not in results
                    results[step] = content if isinstance(content, StepFailure) else unpack(StepData, content)
    return results, notes


def test_the_step_of_a_killed_worker_is_built_again(tmp_path: Path) -> None:
    results, notes = run(DeadlyStepBuilder(3, str(tmp_path / "spent")), 8)
    assert [result.meta.step for _, result in sorted(results.items())] == list(range(8))  # type: ignore[union-attr]
    [note] = notes
    assert "was killed by SIGKILL while preparing step 3; another prepares it" in note


def test_a_step_that_kills_every_worker_is_given_up() -> None:
    results, notes = run(DeadlyStepBuilder(3), 6)
    failure = results.pop(3)
    assert isinstance(failure, StepFailure)
    assert isinstance(failure.error(3), RunError)
    assert f"preparing step 3 ended {MAX_DEATHS_PER_STEP} worker processes; the last one was killed by SIGKILL" in str(
        failure.error(3)
    )
    assert len(notes) == MAX_DEATHS_PER_STEP - 1
    assert all(isinstance(result, StepData) for result in results.values())


def test_errors_arrive_with_their_traceback() -> None:
    results, _ = run(FailingStepBuilder(), 2)
    ours, bug = (results[step].error(step) for step in range(2))  # type: ignore[union-attr]
    assert (type(ours), str(ours)) == (DataError, "data.seq_len is wrong")
    assert "raise DataError" in ours.__notes__[0]
    assert type(bug) is RunError
    assert "preparing step 1 failed: KeyError: 'lost'" in str(bug)
    assert 'raise KeyError("lost")' in str(bug)


def test_workers_have_no_torch_and_ignore_the_signals_of_launchers() -> None:
    results, _ = run(TellingStepBuilder(), 1, workers=1)
    assert str(results[0].error(0)) == "torch False, SIGTERM ignored True"  # type: ignore[union-attr]


def test_a_lost_host_is_replaced() -> None:
    notes: list[str] = []
    with WorkerPool[int](FakeStepBuilder(), 1, notes.append) as pool:
        [host] = hosts()
        [worker] = host.children()
        host.kill()
        host.wait()
        worker.kill()
        wait(pool.pipes)
        assert pool.receive(pool.pipes[0]) is None
        pool.submit(5, request(5))
        wait(pool.pipes)
        received = pool.receive(pool.pipes[0])
        assert received is not None
        assert received[0] == 5
    assert "was lost while idle" in notes[0]


def test_a_host_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="ends at once"):
        WorkerPool[int](UnloadableStepBuilder(), 1, print)
    assert "invalid literal for int()" in capfd.readouterr().err
    assert hosts() == []


def test_a_step_builder_that_cannot_be_sent_is_an_error_that_names_the_part() -> None:
    with pytest.raises(RunError, match=r"tuple\[0\]\.readers\['video'\].* cannot be sent to loader workers: "):
        WorkerPool[int](UnsendableStepBuilder(), 1, print)
    assert hosts() == []


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_hung_worker_is_replaced_and_after_two_hangs_the_sample_is_not_read(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    clock = Clock()
    notes = list[str]()
    os.mkfifo(reached)
    with WorkerPool[int](HangingStepBuilder(str(reached)), 1, notes.append, clock) as pool:
        pool.submit(3, request(3))
        pool.kill_hung_workers()
        clock.now_s += 10 * HANG_TIMEOUT_S
        pool.kill_hung_workers()  # a pause of the checking process is not a hang
        for times in (1, 2):
            reached.open().close()
            pool.kill_hung_workers()
            clock.now_s += HANG_TIMEOUT_S
            pool.kill_hung_workers()
            assert len(notes) == times - 1, "not yet too long"
            clock.now_s += 1
            pool.kill_hung_workers()
            wait(pool.pipes)
            assert pool.receive(pool.pipes[0]) is None
        wait(pool.pipes)
        received = pool.receive(pool.pipes[0])
    assert received is not None
    assert received[0] == 3
    assert not isinstance(received[1], StepFailure)
    assert [note.partition("hung for 60 s and was killed while reading media of ")[2] for note in notes] == [
        "sample 7; another tries it once more",
        "sample 7; it is not read again",
    ]


def test_a_worker_that_makes_progress_is_not_killed(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    go = tmp_path / "go"
    clock = Clock()
    os.mkfifo(reached)
    os.mkfifo(go)
    with WorkerPool[int](SlowStepBuilder(str(reached), str(go)), 1, pytest.fail, clock) as pool:
        pool.submit(0, request(0))
        for _ in range(3):
            reached.open().close()
            pool.kill_hung_workers()
            clock.now_s += HANG_TIMEOUT_S - 1
            pool.kill_hung_workers()
            go.open("w").close()
        wait(pool.pipes)
        assert pool.receive(pool.pipes[0]) is not None
        clock.now_s += 10 * HANG_TIMEOUT_S
        pool.kill_hung_workers()  # an idle worker does not hang
        pool.submit(1, request(1))
        pool.kill_hung_workers()
        reached.open().close()


def test_a_sample_that_crashes_two_workers_is_not_read_again() -> None:
    results, notes = run(CrashingStepBuilder(), 2, workers=1)
    assert all(isinstance(result, StepData) for result in results.values())
    assert [note.partition("was killed by SIGSEGV while reading media of ")[2] for note in notes] == [
        "sample 7; another tries it once more",
        "sample 7; it is not read again",
    ]


def test_a_crash_before_the_first_read_is_no_fault_of_a_sample() -> None:
    results, notes = run(CrashingAtOnceStepBuilder(), 1, workers=1)
    failure = results[0]
    assert isinstance(failure, StepFailure)
    assert f"preparing step 0 ended {MAX_DEATHS_PER_STEP} worker processes" in failure.message
    assert len(notes) == MAX_DEATHS_PER_STEP - 1


def test_media_of_a_deadly_sample_become_zeros_and_it_is_quarantined(made: Dataset) -> None:
    recipe, index, stream = made()
    builder = StepBuilder(index, stream, recipe)
    read = list[int | None]()
    asked = StepRequest(0, DP, dict.fromkeys(DP, 1), EVERYTHING)
    complete = builder.build(asked, ReadMonitor(read.append))
    with_images = [int(complete.meta.sample_id[s]) for s in complete.meta.items["vision"].sample]
    assert set(with_images) <= set(read) <= {*with_images, None}
    victim = with_images[0]
    read.clear()
    without = builder.build(asked, ReadMonitor(read.append, frozenset([victim])))
    assert victim not in read
    [named] = without.quarantined
    assert (named.id, named.kind) == (index.samples[victim].id, "deadly")
    patches = [
        (payload.cells, without.encoders["vision"][key].cells) for key, payload in complete.encoders["vision"].items()
    ]
    assert any(not np.array_equal(a, b) for a, b in patches if a is not None and b is not None)
    assert all(np.all((b == a) | (b == 0)) for a, b in patches if a is not None and b is not None)


def test_closing_ends_workers_that_never_finish() -> None:
    with WorkerPool[int](StuckStepBuilder(), 2, print) as pool:
        pool.submit(0, request(0))
        [host] = hosts()
        processes = [host, *host.children()]
        assert len(processes) == 3
    assert psutil.wait_procs(processes, timeout=MAX_WAIT_S)[1] == []


def test_closing_ends_a_host_that_is_stopped_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_HOST_END_S", 0.1)
    notes: list[str] = []
    with WorkerPool[int](StuckStepBuilder(), 2, notes.append):
        [host] = hosts()
        processes = [host, *host.children()]
        host.suspend()
    assert psutil.wait_procs(processes, timeout=MAX_WAIT_S)[1] == []
    assert notes == ["the process that starts loader workers did not end in 0.1 s; it is killed"]


TRAINER = """
import sys, threading
import psutil
from mmtrain.data.loading.batch_builder import StepRequest
from mmtrain.data.loading.worker_pool import WorkerPool
from tests.data.fake_step_builders import StuckStepBuilder

pool = WorkerPool(StuckStepBuilder(), 2, print)
pool.submit(0, StepRequest(0, {"llm": 1}, {"llm": 1}, ()))
print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
threading.Event().wait()
"""


def test_workers_take_no_module_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the user has a script of this name')")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    # As from the command `mmtrain`, which does not look for modules in the working folder.
    command = [sys.executable, "-P", "-c", TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as trainer:
        assert trainer.stdout is not None
        started = trainer.stdout.readline().split()
        trainer.kill()
    assert len(started) == 3


def test_workers_end_with_a_trainer_that_is_killed() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # the folder of tests is not installed
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, env=env) as trainer:
        assert trainer.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(processes) == 3
    assert psutil.wait_procs(processes, timeout=MAX_WAIT_S)[1] == []


def test_steps_equal_those_of_a_thread_while_workers_are_killed(made: Dataset) -> None:
    recipe, index, stream = made(workers=2, prefetch=2)
    in_line = made(workers=0, prefetch=0)[0]
    notes: list[str] = []
    with (
        Loader(index, stream, in_line, StepRequest(3, DP, dict.fromkeys(DP, 1), EVERYTHING)) as reference,
        Loader(
            index, stream, recipe, StepRequest(3, DP, dict.fromkeys(DP, 1), EVERYTHING), notify=notes.append
        ) as loader,
    ):
        for step in range(24):
            assert same(next(loader), next(reference))
            if step in (5, 11):
                [host] = hosts()
                for worker in host.children():
                    worker.kill()
    assert len(notes) >= 2
    assert hosts() == []


def test_samples_that_workers_find_bad_are_quarantined_once_and_in_the_same_step(made: Dataset) -> None:
    recipe, index, stream = made(workers=2, max_bad_rate=1.0)
    victims = [sample for sample in index.samples if sample.images][:3]
    for victim in victims:
        Path(str(victim.images[0])).write_bytes(b"gone bad")
    quarantined_by_step = []
    for settings in (recipe, made(workers=0, max_bad_rate=1.0)[0]):
        for victim in victims:
            Path(str(victim.images[0])).write_bytes(b"gone bad")  # `made` has written them again
        with Loader(index, stream, settings, StepRequest(0, DP, dict.fromkeys(DP, 1), EVERYTHING)) as loader:
            quarantined_by_step.append([[q.id for q in next(loader).quarantined] for _ in range(30)])
    assert quarantined_by_step[0] == quarantined_by_step[1]
    assert sorted(q for step in quarantined_by_step[0] for q in step) == sorted(victim.id for victim in victims)


@pytest.mark.parametrize(
    ("settings", "media", "local_ranks", "cores", "expected"),
    [
        ({}, True, 1, 1, 0),
        ({}, True, 2, 2, 0),
        ({}, True, 2, 8, 3),
        ({}, True, 8, 128, 4),
        ({}, False, 1, 64, 0),
        ({"prefetch": 0}, True, 1, 64, 0),
        ({"workers": 7}, False, 8, 1, 7),
        ({"workers": 7, "prefetch": 0}, True, 1, 64, 0),
        ({"workers": 0}, True, 1, 64, 0),
    ],
)
def test_the_number_of_workers_depends_on_spare_cores(
    settings: dict[str, Any], media: bool, local_ranks: int, cores: int, expected: int
) -> None:
    data = DataSettings(sources=[{"path": "x.json"}], tokenizer="t.json", seq_len=8, **settings)
    assert choose_num_workers(data, (PayloadNeed("vision", 0, media=media),), local_ranks, cores) == expected
