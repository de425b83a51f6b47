from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from mmtrain.errors import FolderTaken, RunError, StoppedAndSaved
from mmtrain.program import Edge, Forward, Microbatch, Recv, ReduceGrads, Send, StageId, Step
from mmtrain.runtime.execution.activity import CONNECTING, MEASURING, Activity
from mmtrain.runtime.execution.recorder import StepRecorder
from mmtrain.runtime.resilience import failures
from mmtrain.runtime.resilience.failures import (
    FAILURES_FOLDER,
    Failure,
    clear_failures,
    describe_failure,
    explain_failures,
    is_lost_peer,
    read_failures,
    read_living,
    record_early_stop,
    report_failures,
    show_life,
    stacks_path,
    write_failure,
)
from mmtrain.runtime.resilience.folder_lock import FolderLock
from mmtrain.runtime.resilience.out_of_memory import is_out_of_memory
from mmtrain.runtime.run_folder import read_run_state, write_run_state
from mmtrain.runtime.run_owner import FolderClaim

MB = Microbatch("llm", 0, 3)
EDGE = Edge(StageId("llm", 0), StageId("llm", 1))
HANG = Failure(0, "hang", 7, "F llm.0 llm:0.1", 600.0)


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[FolderClaim]:
    """The claim of a run that owns the folder."""
    with FolderLock(tmp_path) as lock:
        yield lock.claim()


def test_a_report_names_the_action_of_the_peer_that_is_missing() -> None:
    clock_s = [10.0]
    activity = Activity(clock=lambda: clock_s[0])
    activity.step = 7
    activity.start(Forward(StageId("llm", 1), MB))
    activity.wait(Recv(EDGE, MB, MB, peer=2, payload="activation"))
    clock_s[0] = 15.0
    failure = describe_failure(5, activity, "hang")
    assert (failure.peer, failure.missing, failure.stuck_s) == (2, "SA llm.0>llm.1 llm:0.3 llm:0.3 @5", 5.0)
    assert failure.to_text() == (
        "rank 5, step 7, in `F llm.1 llm:0.3`: waited 5 s for `SA llm.0>llm.1 llm:0.3 llm:0.3 @5` on rank 2, "
        "which never ran"
    )
    activity.wait(Send(EDGE, MB, MB, peer=2, payload="gradient"))
    assert describe_failure(5, activity, "hang").missing == "RG llm.0>llm.1 llm:0.3 llm:0.3 @5"
    activity.arrived()
    assert describe_failure(5, activity, "hang").missing is None
    for doing in (Step(), MEASURING):
        activity.start(doing)
        assert describe_failure(5, activity, "hang").is_collective


def test_a_report_names_what_a_rank_connects_for() -> None:
    activity = Activity()
    activity.connect("activations over edge llm.0>llm.1 from rank 0 to rank 1")
    failure = describe_failure(1, activity, "hang")
    assert failure.is_collective
    assert failure.doing == f"{CONNECTING}: activations over edge llm.0>llm.1 from rank 0 to rank 1"
    assert not activity.is_starting, "the watchdog times it"


def test_the_cause_leads_and_the_others_are_secondary() -> None:
    error = Failure(2, "error", 7, "B llm.0 llm:0.1", 0.0, error="ValueError: x")
    lost = Failure(0, "lost peer", 7, "STEP", 0.0, is_collective=True, error="RuntimeError: Connection closed by peer")
    assert explain_failures([lost, error], 3).splitlines() == [
        "rank 2, step 7, in `B llm.0 llm:0.1`: ValueError: x",
        "  secondary: rank 0, step 7, in `STEP`: RuntimeError: Connection closed by peer",
    ]
    waiting = replace(HANG, rank=1, stuck_s=601.0, peer=0, missing="SA llm.0>llm.1 llm:0.1 llm:0.1 @1")
    together = replace(HANG, rank=2, stuck_s=602.0, doing="STEP", is_collective=True)
    assert explain_failures([together, waiting, HANG], 3).startswith(
        "rank 0, step 7, in `F llm.0 llm:0.1`: made no progress"
    )
    assert explain_failures([together, waiting], 3).startswith("rank 0 left no report")
    longest = replace(together, rank=0, stuck_s=603.0)
    assert explain_failures([replace(waiting, missing="x"), together, longest], 3).startswith(
        "rank 0, step 7, in `STEP`"
    )


def test_former_stragglers_are_reported_once_at_the_end() -> None:
    activity = Activity()
    activity.stragglers = "rank 2 takes 2.1x the time of its peers for F vision.0 (0.3 s a step)"
    hung = [describe_failure(rank, activity, "hang") for rank in (0, 1)]
    assert explain_failures(hung, 2).splitlines()[2:] == [f"  before that: {activity.stragglers}"]
    assert explain_failures(hung[:1], 2).splitlines()[2:] == [f"  before that: {activity.stragglers}"]


def test_reports_come_back_in_their_order_and_are_cleared(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == []
    for rank in (3, 1):
        write_failure(tmp_path, replace(HANG, rank=rank))
    assert {f.rank for f in read_failures(tmp_path)} == {1, 3}
    assert all(replace(f, rank=0) == HANG for f in read_failures(tmp_path))
    clear_failures(tmp_path)
    assert read_failures(tmp_path) == []


def test_a_failing_rank_leaves_its_report_and_the_state(tmp_path: Path, claim: FolderClaim) -> None:
    write_run_state(tmp_path, "running", 4)
    with pytest.raises(ValueError, match="broken"), report_failures(claim, 1, Activity()):
        raise ValueError("broken")
    [failure] = read_failures(tmp_path)
    assert (failure.rank, failure.kind, failure.error) == (1, "error", "ValueError: broken")
    assert "raise ValueError" in stacks_path(tmp_path, 1).read_text()
    assert read_run_state(tmp_path) == {"status": "failed", "step": 4, "error": "rank 1: ValueError: broken"}
    with pytest.raises(RuntimeError), report_failures(claim, 0, Activity()):
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    assert read_run_state(tmp_path)["error"] == "rank 1: ValueError: broken", "who lost a peer is not the cause"


def test_a_rank_that_lost_a_peer_names_the_one_that_is_gone(
    tmp_path: Path, claim: FolderClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "REPORT_COLLECTION_S", 0.0)  # the rank that is gone reports nothing
    hosts = ["node1", "node1", "node2"]
    write_failure(tmp_path, replace(HANG, rank=2, kind="lost peer", error="RuntimeError: Broken pipe"))
    gone = "rank 1 on node1 is gone without a report: killed, or the node is lost"
    for rank, text in ((0, f"{gone}\n  secondary: rank 0, "), (2, gone)):
        with pytest.raises(RunError) as raised, report_failures(claim, rank, Activity(), hosts):
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
        assert str(raised.value).startswith(text)
        assert read_run_state(tmp_path)["error"].startswith(gone)
    assert str(raised.value) == gone, "one rank speaks for all"
    write_failure(tmp_path, replace(HANG, rank=1, kind="error", error="ValueError: wrong"))
    with pytest.raises(RunError, match=r"^rank 1, .*ValueError: wrong"), report_failures(claim, 0, Activity(), hosts):
        raise RuntimeError("Connection reset by peer")


def test_a_rank_that_computes_while_others_lose_a_peer_is_not_gone(tmp_path: Path) -> None:
    lost = replace(HANG, kind="lost peer", error="RuntimeError: Broken pipe")
    write_failure(tmp_path, lost)
    show_life(tmp_path, 3)
    hosts = ["a", "b", "c", "d"]
    text = explain_failures(read_failures(tmp_path), 4, hosts, read_living(tmp_path))
    assert text.startswith("ranks 1, 2 on b, c are gone without a report")


def test_a_rank_that_lost_a_peer_to_a_signal_has_not_failed(tmp_path: Path, claim: FolderClaim) -> None:
    record_early_stop(claim, 1, Activity())
    with pytest.raises(StoppedAndSaved, match="before the first step"), report_failures(claim, 0, Activity()):
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    assert read_run_state(tmp_path)["status"] == "stopped"


def test_a_signal_that_a_launcher_sends_for_a_failed_rank_hides_no_error(tmp_path: Path, claim: FolderClaim) -> None:
    with pytest.raises(ValueError, match="broken"), report_failures(claim, 1, Activity()):
        raise ValueError("broken")
    record_early_stop(claim, 0, Activity())
    assert read_run_state(tmp_path) == {"status": "failed", "step": 0, "error": "rank 1: ValueError: broken"}


def test_a_run_that_stopped_has_not_failed(tmp_path: Path, claim: FolderClaim) -> None:
    with pytest.raises(StoppedAndSaved), report_failures(claim, 0, Activity()):
        raise StoppedAndSaved("saved")
    assert not (tmp_path / FAILURES_FOLDER).exists()
    assert read_run_state(tmp_path) == {}


def test_nothing_is_written_into_a_folder_that_another_run_has_taken(tmp_path: Path, claim: FolderClaim) -> None:
    with FolderLock(tmp_path) as other:
        other.claim(force=True)
        with pytest.raises(ValueError, match="broken"), report_failures(claim, 1, Activity()):
            raise ValueError("broken")
        with pytest.raises(FolderTaken), report_failures(claim, 1, Activity()):
            claim.require()
    assert not (tmp_path / FAILURES_FOLDER).exists()
    assert read_run_state(tmp_path) == {}


class DeviceOf:
    """The clock of a device that has passed some of its marks."""

    def __init__(self) -> None:
        self.num_marks, self.num_passed = 0, 0

    def start(self) -> None:
        self.num_marks = 0

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks - 1

    def has_passed(self, mark: int) -> bool:
        return mark < self.num_passed

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [float(mark) for mark in marks]


def test_a_report_names_what_the_device_is_at_while_the_host_is_ahead() -> None:
    clock_s, device = [0.0], DeviceOf()
    activity = Activity(clock=lambda: clock_s[0], recorder=StepRecorder(device))
    receive = Recv(EDGE, MB, MB, peer=2, payload="activation")
    activity.recorder.start_step()
    activity.start(receive)  # mark 0
    activity.start(Forward(StageId("llm", 1), MB))  # 1
    activity.wait(receive)  # 2
    activity.arrived(8)  # 3
    activity.start(ReduceGrads("llm"))  # 4
    activity.start(Step())  # 5
    device.num_passed = 3  # it waits for the message; the host waits for the norm of all gradients
    failure = describe_failure(5, activity, "hang")
    assert (failure.doing, failure.peer, failure.is_collective) == ("F llm.1 llm:0.3", 2, False)
    assert failure.missing == "SA llm.0>llm.1 llm:0.3 llm:0.3 @5"
    device.num_passed = 4  # it computes, or hangs in a collective of its TP group
    assert describe_failure(5, activity, "hang").missing is None
    device.num_passed = 5
    failure = describe_failure(5, activity, "hang")
    assert (failure.doing, failure.is_collective) == ("RS llm 0", True)
    device.num_passed = 6  # it has caught up: what hangs is the host
    assert describe_failure(5, activity, "hang").doing == "STEP"


def test_a_device_that_advances_is_slow_and_not_stuck() -> None:
    clock_s, device = [0.0], DeviceOf()
    activity = Activity(clock=lambda: clock_s[0], recorder=StepRecorder(device))
    activity.recorder.start_step()
    for index in range(3):
        activity.start(Forward(StageId("llm", 0), Microbatch("llm", 0, index)))
    activity.start(Step())
    for device.num_passed in (1, 2, 3):
        clock_s[0] += 100.0
        assert activity.stuck_s() == 0
    clock_s[0] += 100.0
    assert activity.stuck_s() == 100


@pytest.mark.parametrize(
    ("message", "is_lost", "is_memory"),
    [
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            True,
            False,
        ),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
            False,
            True,
        ),
        ("NCCL error, unhandled cuda error, NCCL version 2.28.9", False, False),
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            False,
            False,
        ),
    ],
)
def test_failures_of_nccl_itself_are_no_lost_peers(message: str, is_lost: bool, is_memory: bool) -> None:
    error = dist.DistBackendError(message)
    assert is_lost_peer(error) == is_lost
    assert is_out_of_memory(error) == is_memory


def test_lost_connections_are_distinguished_from_errors() -> None:
    assert is_lost_peer(RuntimeError("... Connection reset by peer"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(ValueError("Connection reset by peer"))
