import threading
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from mmtrain.program import Action, Step
from mmtrain.runtime.execution.activity import (
    AWAITING_PLAN,
    ENDING,
    LOADING,
    MEASURING,
    PLANNING,
    SAVING,
    Activity,
    ProcessorProgress,
)
from mmtrain.runtime.resilience import watchdog
from mmtrain.runtime.resilience.failures import (
    Failure,
    read_failures,
    read_living,
    stacks_path,
    write_failure,
)
from mmtrain.runtime.resilience.watchdog import Heartbeats, PeerProgress, Watchdog
from mmtrain.runtime.run_folder import read_run_state
from mmtrain.runtime.world import World
from tests.waiting import MAX_WAIT_S, poll


class _End:
    """Records the end of the process instead of ending it."""

    def __init__(self) -> None:
        self.report, self.came = "", threading.Event()

    def __call__(self, report: str) -> None:
        self.report = report
        self.came.set()


def _world(rank: int, size: int, store: Store | None = None) -> World:
    return World(rank, size, torch.device("cpu"), store)


def test_all_ranks_report_when_one_notices_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    stuck, busy = Activity(clock=lambda: clock_s[0]), Activity(clock=lambda: 0.0)
    stuck.start("loading data")
    busy.start(Step())
    ends = [_End(), _End()]
    monkeypatch.setattr(watchdog, "REPORT_COLLECTION_S", MAX_WAIT_S)
    with (
        Watchdog(stuck, 1.0, tmp_path, _world(0, 2), ends[0]),
        Watchdog(busy, 1.0, tmp_path, _world(1, 2), ends[1]),
    ):
        assert not ends[0].came.wait(0.6), "not before its time"
        clock_s[0] = 1.0
        assert all(end.came.wait(MAX_WAIT_S) for end in ends)
    assert {f.rank for f in read_failures(tmp_path)} == {0, 1}
    for rank in (0, 1):
        assert "test_all_ranks_report" in stacks_path(tmp_path, rank).read_text()
    assert ends[0].report.startswith("rank 0, in `loading data`: made no progress for 1 s\n  secondary: rank 1")
    assert ends[1].report == "", "one rank speaks for all"
    assert read_run_state(tmp_path)["error"] == ends[0].report


def test_a_rank_that_does_not_connect_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_COLLECTION_S", 0.0)  # no other rank reports
    clock_s = [0.0]
    connecting = Activity(clock=lambda: clock_s[0])
    connecting.connect("activations over edge vision.0>llm.0 from rank 0 to rank 1")
    end = _End()
    with Watchdog(connecting, 10.0, tmp_path, _world(1, 2), end):
        clock_s[0] = 9.0
        connecting.connect("gradients over edge vision.0>llm.0 from rank 1 to rank 0")
        clock_s[0] = 19.0
        assert end.came.wait(MAX_WAIT_S)
    [failure] = read_failures(tmp_path)
    assert failure.to_text() == (
        "rank 1, in `connecting the ranks: gradients over edge vision.0>llm.0 from rank 1 to rank 0`: "
        "waited 10 s for other ranks to take part"
    )


def test_a_rank_ends_when_a_signal_has_stopped_another_before_the_first_step(tmp_path: Path) -> None:
    ended, hung = threading.Event(), threading.Event()
    write_failure(tmp_path, Failure(1, "stopped", None, "indexing the data", 0.0))
    dog = Watchdog(Activity(), 10.0, tmp_path, _world(0, 2), lambda _: hung.set())
    dog.end_early = ended.set
    with dog:
        assert ended.wait(MAX_WAIT_S)
    assert not hung.is_set()


def test_a_rank_shows_that_it_runs_when_another_has_lost_a_peer(tmp_path: Path) -> None:
    write_failure(tmp_path, Failure(1, "lost peer", 3, "STEP", 0.0))
    with Watchdog(Activity(), 10.0, tmp_path, _world(0, 3), _End()):
        poll(lambda: read_living(tmp_path) == {0})


def test_a_timeout_of_zero_watches_nothing(tmp_path: Path) -> None:
    end = _End()
    with Watchdog(Activity(clock=iter(range(10**6)).__next__), 0.0, tmp_path, _world(0, 1), end):
        assert not end.came.is_set()
    assert read_failures(tmp_path) == []


def test_a_rank_that_plans_must_compute_and_one_that_waits_for_the_plan_need_not(tmp_path: Path) -> None:
    clock_s, used_s = [0.0], [0.0]
    processor = ProcessorProgress(lambda: clock_s[0], lambda: used_s[0])
    planning, waiting = (Activity(clock=lambda: clock_s[0], processor=processor) for _ in range(2))
    planning.start(PLANNING)
    waiting.start(AWAITING_PLAN)
    ends = [_End(), _End()]
    with Watchdog(planning, 10.0, tmp_path / "a", _world(0, 2), ends[0], lambda: False):
        for clock_s[0] in (9.0, 18.0, 27.0):
            used_s[0] += 0.5
            assert planning.stuck_s() == 0
        clock_s[0] = 37.0
        assert ends[0].came.wait(MAX_WAIT_S)
    assert ends[0].report.startswith("rank 0, in `choosing the plan`: made no progress for 10 s")
    assert waiting.is_collective
    assert waiting.is_starting
    assert not waiting.is_computing


def test_a_thread_that_waits_uses_no_processor_time() -> None:
    progress = ProcessorProgress()
    start_s = progress.changed_s
    while progress.changed_s == start_s:
        pass
    idle = threading.Event()

    def watch() -> None:
        deadline_s = time.monotonic() + MAX_WAIT_S
        while not idle.is_set() and time.monotonic() < deadline_s:
            before_s = progress.changed_s
            idle.wait(0.01)
            if progress.changed_s == before_s:
                idle.set()

    other = threading.Thread(target=watch)
    other.start()
    other.join()  # meanwhile this thread only waits
    assert idle.is_set()


def test_written_bytes_are_progress_only_while_the_rank_waits_for_files() -> None:
    clock_s = [0.0]
    activity = Activity(clock=lambda: clock_s[0])
    activity.start(SAVING)
    activity.files.start()
    clock_s[0] = 50.0
    activity.files.advance(Path("a.safetensors"), 2_000_000)
    clock_s[0] = 60.0
    assert activity.stuck_s() == 10
    assert not activity.is_collective
    assert activity.files.to_text() == "no progress with a.safetensors for 10 s; 2.00 MB at 0.04 MB/s before that"
    activity.start("loading data")
    clock_s[0] = 90.0
    activity.files.advance(Path("a.safetensors"), 1)
    assert activity.stuck_s() == 30, "a writer in the background says nothing about the step"


def test_a_rank_that_waits_for_files_of_others_learns_of_their_progress() -> None:
    clock_s = [0.0]
    store = HashStore()
    waiting, writing = (Activity(clock=lambda: clock_s[0]) for _ in range(2))
    waiting_peers, writing_peers = PeerProgress(store, waiting, 50.0), PeerProgress(store, writing, 50.0)
    for activity in (waiting, writing):
        activity.start(SAVING)

    def exchange() -> None:
        for peers in (writing_peers, waiting_peers):
            peers.exchange()

    with waiting.files.waiting_for_ranks():
        assert waiting.is_collective
        exchange()
        clock_s[0] = 100.0
        writing.files.advance(Path("b.safetensors"), 10)
        exchange()
        assert (waiting.stuck_s(), writing.stuck_s()) == (0, 0)
        clock_s[0] = 130.0
        exchange()
        assert (waiting.stuck_s(), writing.stuck_s()) == (30, 30)
        assert waiting.files.to_text() is None, "it is not at a file itself"
    with writing.files.waiting_for_ranks():
        waiting.files.advance(Path("c.safetensors"), 0)
        clock_s[0] = 170.0
        writing_peers.exchange()
    assert waiting.stuck_s() == 40, "the progress of others does not hide that this rank is stuck"


def test_ranks_that_wait_for_a_rank_whose_storage_is_away_are_not_stuck() -> None:
    clock_s = [0.0]
    store = HashStore()
    away, waiting = (Activity(clock=lambda: clock_s[0]) for _ in range(2))
    peers = PeerProgress(store, away, 50.0), PeerProgress(store, waiting, 50.0)
    away.start(LOADING)
    waiting.start(MEASURING)

    def pass_time(seconds: float) -> None:
        for _ in range(int(seconds)):
            clock_s[0] += 1
            for rank in peers:
                rank.exchange()

    away.note_outage("training", "files cannot be read")
    pass_time(1000)
    assert away.stuck_s() == 0, "its loader knows when to give up"
    assert away.text() == "loading data: files cannot be read"
    assert waiting.stuck_s() <= 50
    away.note_outage("training", "")
    assert away.stuck_s() == 0, "its data is on the way"
    pass_time(100)
    assert away.stuck_s() == 100
    assert waiting.stuck_s() >= 100
    away.start(Step())
    away.note_outage("training", "files cannot be read")
    pass_time(100)
    assert away.stuck_s() == 100, "it does not wait for data"
    assert waiting.stuck_s() >= 200, "a rank that needs no data yet excuses nobody"


def test_the_run_ends_although_its_folder_hangs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def write_late(run_dir: Path, failure: Failure) -> None:
        released.wait()
        write_failure(run_dir, failure)

    monkeypatch.setattr(watchdog, "write_failure", write_late)
    monkeypatch.setattr(watchdog, "MAX_REPORT_S", 0.1)
    clock_s = [0.0]
    end = _End()
    activity = Activity(clock=lambda: clock_s[0])
    activity.start(SAVING)
    activity.files.advance(tmp_path / "file", 0)
    with Watchdog(activity, 1.0, tmp_path, _world(0, 1), end):
        clock_s[0] = 2.0
        assert end.came.wait(MAX_WAIT_S)
    assert end.report.startswith(f"rank 0, in `saving a checkpoint`: no progress with {tmp_path}/file for 2 s")
    assert f"no report could be written to {tmp_path}" in end.report
    released.set()
    for thread in threading.enumerate():
        if thread.name == "mmtrain-watchdog-report":
            thread.join()


def test_a_process_that_does_not_run_is_noticed_by_rank_0_and_rank_0_by_the_others() -> None:
    clock_s = [0.0]
    store = HashStore()
    ranks = [Heartbeats(store, rank, 3, clock=lambda: clock_s[0]) for rank in range(3)]

    def beat(*running: int) -> list[float]:
        for _ in range(2):  # in the first round they may hear of beats before those of this call
            clock_s[0] += 5.0
            for rank in running:
                ranks[rank].beat()
        return [ranks[rank].silent_s() for rank in running]

    assert beat(0, 1, 2) == [0, 0, 0]
    assert beat(0, 1) == [5, 0]
    assert beat(0, 1) == [15, 0], "rank 0 misses rank 2, rank 1 hears rank 0"
    assert beat(1, 2) == [10, 5], "they miss rank 0"
    assert beat(0, 1, 2) == [0, 0, 0]


@pytest.mark.parametrize("phase", [Step(), ENDING])
def test_a_silent_rank_ends_an_elastic_run_long_before_the_limit_of_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Action | str
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_COLLECTION_S", 0.0)  # the other rank reports nothing
    store, end = HashStore(), _End()
    activity = Activity(clock=lambda: 0.0)
    activity.start(phase)
    silent = Heartbeats(store, 1, 2)
    silent.beat()
    with Watchdog(activity, 300.0, tmp_path, _world(0, 2, store), end, silence_limit_s=0.1):
        assert end.came.wait(MAX_WAIT_S if phase != ENDING else 0.6) == (phase != ENDING)
    if phase != ENDING:
        assert end.report.startswith("rank 1 left no report: it is dead, or stopped by the system")
