"""Records of steps, with clocks that the tests set."""

import time
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import torch

from mmtrain.program import Dispatch, Edge, Forward, Microbatch, Recv, ReduceGrads, Send, StageId, Step
from mmtrain.program.trace.step_record import ActionRecord, MessageRecord, StepRecord
from mmtrain.runtime.execution import recorder as module
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.recorder import CudaClock, HostClock, StepRecorder, clock_for

VISION, LLM = StageId("vision", 0), StageId("llm", 0)
EDGE = Edge(VISION, LLM)
IMAGE, TEXT = Microbatch("vision", 0, 0), Microbatch("llm", 0, 0)
RECV = Recv(EDGE, IMAGE, TEXT, 0, "activation")
SEND = Send(EDGE, IMAGE, TEXT, 0, "gradient")


class Ticks:
    """Counts the marks."""

    def start(self) -> None:
        self._ticks: Iterator[int] = count()

    def mark(self) -> int:
        return next(self._ticks)

    def has_passed(self, mark: int) -> bool:
        return True

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [float(mark) for mark in marks]


def test_a_record_holds_actions_waits_and_messages() -> None:
    activity = Activity(recorder=StepRecorder(Ticks()))
    activity.start("loading data")
    for _ in range(2):  # nothing of a step is left in the next
        activity.recorder.start_step()
        activity.start(RECV)  # 0
        activity.start(SEND)  # 1
        activity.start(Forward(LLM, TEXT))  # 2
        activity.wait(RECV)  # 3
        activity.arrived(48)  # 4
        activity.start(Step())  # 5
        activity.start("waiting for what was sent to leave")  # 6
        activity.wait(SEND)  # 7
        activity.arrived(64)  # 8
        record = activity.recorder.stop_step()  # 9
        assert record == StepRecord(
            0.0,
            9.0,
            (
                ActionRecord(RECV, 0.0, 1.0, 0.0),
                ActionRecord(SEND, 1.0, 2.0, 0.0),
                ActionRecord(Forward(LLM, TEXT), 2.0, 5.0, 1.0),
                ActionRecord(Step(), 5.0, 6.0, 0.0),
            ),
            (MessageRecord(RECV, 0.0, 4.0, 1.0, 48), MessageRecord(SEND, 1.0, 8.0, 1.0, 64)),
        )
        activity.start("gathering the metrics")


def test_waiting_for_reductions_is_no_compute_of_the_optimizer() -> None:
    recorder = StepRecorder(Ticks())
    activity = Activity(recorder=recorder)
    recorder.start_step()
    activity.start(ReduceGrads("llm"))  # 0
    activity.start(Step())  # 1
    activity.wait_for_collectives()  # 2
    activity.arrived()  # 3
    record = recorder.stop_step()  # 4
    assert record.actions[-1] == ActionRecord(Step(), 1.0, 4.0, 1.0)
    assert record.messages == ()
    assert record.seconds_by_kind() == {"compute": 2.0, "communication": 1.0, "wait": 1.0}


def test_seconds_of_dispatches_are_part_of_communication() -> None:
    dispatch = Dispatch(EDGE, 0, 0, "activation")
    recorder = StepRecorder(Ticks())
    activity = Activity(recorder=recorder)
    recorder.start_step()
    for action in (dispatch, Forward(LLM, TEXT), dispatch, ReduceGrads("llm")):
        activity.start(action)
    record = recorder.stop_step()
    assert record.dispatch_s() == 2.0
    assert record.seconds_by_kind() == {"compute": 1.0, "communication": 3.0, "wait": 0.0}


def test_a_shifted_record_is_the_same_on_another_clock() -> None:
    record = StepRecord(1.0, 5.0, (ActionRecord(Step(), 1.0, 2.0, 0.5),), (MessageRecord(RECV, 1.5, 3.0, 0.5, 8),))
    assert record.shifted(10.0) == StepRecord(
        11.0, 15.0, (ActionRecord(Step(), 11.0, 12.0, 0.5),), (MessageRecord(RECV, 11.5, 13.0, 0.5, 8),)
    )
    assert record.shifted(10.0).seconds_by_kind() == record.seconds_by_kind()


class Event:
    """Stands for an event of a GPU whose kernels take 3 ms each; one is launched before every event."""

    launched = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.launched += 1
        self.at_ms = 3.0 * Event.launched

    def query(self) -> bool:
        return self.at_ms < 10.0

    def synchronize(self) -> None:
        """Done at once."""

    def elapsed_time(self, later: "Event") -> float:
        return later.at_ms - self.at_ms


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 100.0)
    clock = clock_for(torch.device("cuda", 0))
    assert isinstance(clock, CudaClock)
    for reused in (False, True):
        clock.start()
        marks = [clock.mark() for _ in range(3)]
        assert clock.seconds(marks) == pytest.approx([100.003, 100.006, 100.009])
        if not reused:
            assert [clock.has_passed(mark) for mark in marks] == [True, True, False]
    assert Event.made == 4, "events are used again"
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_timed_where_they_run() -> None:
    clock = CudaClock()
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)
    clock.start()
    before = time.perf_counter()
    first = clock.mark()
    for _ in range(20):
        matrix = matrix @ matrix * 0.0
    launched = time.perf_counter()
    begin, end = clock.seconds([first, clock.mark()])
    after = time.perf_counter()
    assert before - 1e-3 < begin < launched < end < after + 1e-3, "the host is ahead of the device"
