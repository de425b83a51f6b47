"""Steps that are prepared ahead, with streams and events that the tests watch."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmtrain.data import StepData
from mmtrain.errors import DataError, RunError
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.program import Microbatch, StepLoads
from mmtrain.runtime.execution.executor import StepInput
from mmtrain.runtime.execution.input_arena import ArenaCopier, CudaCopier, HostCopier, InputArena, copier_for
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.resilience.out_of_memory import is_out_of_memory
from tests.waiting import MAX_WAIT_S

TEXT = Microbatch("llm", 0, 0)
IMAGES = Microbatch("vision", 0, 0)


def host_input(data: StepData) -> StepInput:
    """Make the input of step `data`, a number, whose tensors all hold that number; later steps are larger."""
    step = cast(int, data)
    ids = torch.full((5 + 3 * step,), step, dtype=torch.int64)
    cells = torch.full((2 + step, 7), step, dtype=torch.uint8)
    text = TextInput((len(ids),), ids, tables={"rotary_positions": ids.int(), "nothing": torch.empty(0, 3)})
    images = EncoderInput((2 + step,), (1,), cells)
    return StepInput({TEXT: text, IMAGES: images}, StepLoads({}, {}, {}), {}, step=step)


def numbered_steps() -> Iterator[StepData]:
    return cast(Iterator[StepData], itertools.count())


def tensors(step: StepInput) -> list[Tensor]:
    text, images = step.inputs[TEXT], step.inputs[IMAGES]
    assert isinstance(text, TextInput)
    assert isinstance(images, EncoderInput)
    assert text.tables is not None
    assert text.ids is not None
    assert images.cells is not None
    return [text.ids, images.cells, *text.tables.values()]


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_arrive_in_order_and_as_they_were_made(ahead: bool) -> None:
    with StepPrefetcher(numbered_steps(), host_input, HostCopier(), ahead) as steps:
        for number, step in zip(range(6), steps, strict=False):
            assert step.data == number
            for brought, made in zip(tensors(step.input), tensors(host_input(step.data)), strict=True):
                assert brought.dtype == made.dtype
                assert torch.equal(brought, made)
        assert steps.wait_s > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_is_raised_where_its_step_was_expected_and_afterwards(ahead: bool) -> None:
    def two_steps() -> Iterator[StepData]:
        yield from itertools.islice(numbered_steps(), 2)
        raise DataError("the third step is bad")

    with StepPrefetcher(two_steps(), host_input, HostCopier(), ahead) as steps:
        assert [next(steps).data for _ in range(2)] == [0, 1]
        with pytest.raises(DataError, match="third step"):
            next(steps)
        if ahead:
            with pytest.raises(DataError, match="third step"):
                next(steps)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_input_for_which_memory_is_missing_is_explained(ahead: bool) -> None:
    class SmallCopier(HostCopier):
        def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
            if num_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().allocate(num_bytes)

    def explain(error: Exception, data: StepData) -> Exception:
        return RunError(f"no memory for step {data}") if is_out_of_memory(error) else error

    steps = StepPrefetcher(numbered_steps(), host_input, SmallCopier(), ahead, explain=explain)
    with steps, pytest.raises(RunError, match="no memory for step 0") as raised:
        next(steps)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_closing_ends_a_thread_that_waits_for_a_step() -> None:
    closed = threading.Event()

    def no_step() -> Iterator[StepData]:
        assert closed.wait(MAX_WAIT_S)
        raise DataError("the loader is closed")
        yield

    steps = StepPrefetcher(no_step(), host_input, HostCopier(), ahead=True, stop=closed.set)
    steps.close()
    assert closed.is_set()


class Journal:
    """What happens on the device and around it, in order; a test waits until something has been written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._written = threading.Condition()

    def write(self, line: str) -> None:
        with self._written:
            self.lines.append(line)
            self._written.notify_all()

    def wait_for(self, line: str) -> None:
        with self._written:
            assert self._written.wait_for(lambda: line in self.lines, MAX_WAIT_S), (line, self.lines)


class FakeStream:
    """A stream that notes what it is told."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self.name = journal, name

    def wait_event(self, event: "FakeEvent") -> None:
        self._journal.write(f"{self.name} waits for {event.name}")


class FakeEvent:
    """An event that knows where it was recorded."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def record(self, stream: FakeStream) -> None:
        self.name = f"{stream.name} {sum(line.startswith(f'{stream.name} reaches') for line in self._journal.lines)}"
        self._journal.write(f"{stream.name} reaches {self.name}")

    def synchronize(self) -> None:
        self._journal.write(f"host waits for {self.name}")


class WatchedCopier(CudaCopier):
    """The copier of a GPU, whose arenas are on the host."""

    journal: Journal

    def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, host: Tensor, device: Tensor, released: Any) -> Any:
        copied = super().copy(host, device, released)
        self.journal.write("copied")
        return copied


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Put fakes in the place of torch's streams and events."""
    journal = Journal()
    compute = FakeStream(journal, "compute")

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        journal.write(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(journal, "copy"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(journal))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    WatchedCopier.journal = journal
    return journal


def test_the_next_step_is_copied_while_one_computes(journal: Journal) -> None:
    copier = WatchedCopier(torch.device("cuda", 0))
    with StepPrefetcher(numbered_steps(), host_input, copier, ahead=True) as steps:
        next(steps)
        journal.wait_for("copy reaches copy 1")  # step 1 comes although nothing said that step 0 has ended
        assert "compute waits for copy 0" in journal.lines
        assert not any(line.startswith("compute reaches") for line in journal.lines)


def test_an_arena_is_filled_again_only_behind_its_step(journal: Journal) -> None:
    arena = InputArena(WatchedCopier(torch.device("cuda", 0)))
    for _ in range(2):
        arena.fill([torch.ones(3)])
        arena.start_step()
        arena.end_step()
    assert journal.lines == [
        "on copy", "copy reaches copy 0", "copied",  # nothing to wait for yet
        "compute waits for copy 0", "compute reaches compute 0",
        "host waits for copy 0",  # pinned bytes are read until then
        "on copy", "copy waits for compute 0", "copy reaches copy 1", "copied",  # the step may still read the device's
        "compute waits for copy 1", "compute reaches compute 1",
    ]  # fmt: skip


def test_a_third_step_waits_until_one_has_ended(journal: Journal) -> None:
    copier = WatchedCopier(torch.device("cuda", 0))
    with StepPrefetcher(numbered_steps(), host_input, copier, ahead=True) as steps:
        next(steps)
        journal.wait_for("copy reaches copy 1")
        next(steps)
        journal.wait_for("copy reaches copy 2")
    lines = journal.lines
    released, refilled = lines.index("compute reaches compute 0"), lines.index("copy reaches copy 2")
    assert released < lines.index("copy waits for compute 0") < refilled
    assert lines.index("host waits for copy 0") < refilled


def test_an_arena_grows_and_keeps_its_tensors_apart() -> None:
    arena = InputArena(HostCopier())
    small = arena.fill([torch.arange(3), torch.ones(2, 2)])
    assert [tensor.tolist() for tensor in small] == [[0, 1, 2], [[1, 1], [1, 1]]]
    sizes = [arena.num_bytes]
    arena.fill([torch.arange(1)])
    sizes.append(arena.num_bytes)
    large = arena.fill([torch.arange(1000, dtype=torch.int32), torch.zeros(1000)])
    sizes.append(arena.num_bytes)
    assert sizes[0] == sizes[1] < sizes[2]
    assert torch.equal(large[0], torch.arange(1000, dtype=torch.int32))
    assert all(tensor.data_ptr() % 4 == 0 for tensor in large)


def test_a_cpu_needs_no_copies() -> None:
    copier: ArenaCopier = copier_for(torch.device("cpu"))
    host, device = copier.allocate(8)
    assert host.data_ptr() == device.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_come_to_a_gpu() -> None:
    copier = copier_for(torch.device("cuda", 0))
    with StepPrefetcher(numbered_steps(), host_input, copier, ahead=True) as steps:
        for number in range(6):
            step = next(steps)
            for brought, made in zip(tensors(step.input), tensors(host_input(step.data)), strict=True):
                assert brought.device.type == "cuda"
                assert torch.equal(brought.cpu(), made), number
