"""A function that reads foreign files is called within bounds, and what ends its process is named."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain import limited_reads
from mmtrain.errors import DataError, HostileFileError, PlanError
from mmtrain.limited_reads import Bounds, now_reading, now_reading_item, read_within
from tests.waiting import poll

LITTLE = Bounds(1 << 28, processor_s=0.3)


def test_values_notes_and_errors_come_back() -> None:
    notes: list[object] = []

    def read(notify: Callable[[Any], None]) -> dict[str, object]:
        notify("half")
        notify([1, 2])
        return {"pid": os.getpid(), "text": "\ud800"}

    value = read_within(LITTLE, read, notes.append)
    assert value["pid"] != os.getpid()
    assert (value["text"], notes) == ("\ud800", ["half", [1, 2]])

    def fail(error: Exception) -> Callable[[object], object]:
        def read(_: object) -> object:
            raise error

        return read

    with pytest.raises(PlanError, match="no plan"):
        read_within(LITTLE, fail(PlanError("no plan")))
    with pytest.raises(FileNotFoundError) as missing:
        read_within(LITTLE, fail(FileNotFoundError(2, "No such file", "a.txt")))
    assert missing.value.filename == "a.txt"
    with pytest.raises(RuntimeError, match=r"(?s)KeyError: 'x'.*Traceback"):
        read_within(LITTLE, fail(KeyError("x")))


def loop() -> None:
    while True:
        pass


DEATHS: dict[str, tuple[Callable[[], object], str]] = {
    "abort": (os.abort, "ended the process by SIGABRT"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended the process by SIGKILL"),
    "exit": (lambda: os._exit(3), "ended the process with exit code 3"),
    "loop": (loop, "took more than 0.3 s of processor time"),
    "memory": (lambda: bytearray(1 << 40), "took more memory than it may"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_file_that_ends_the_process_is_named(name: str) -> None:
    die, how = DEATHS[name]

    def read(_: object) -> int:
        now_reading("good")
        now_reading("bad\n.json")
        die()
        return 1

    with pytest.raises(HostileFileError, match="bad\n.json: reading it " + how):
        read_within(LITTLE, read)


def test_items_that_end_the_process_are_found_and_left_out() -> None:
    def read(_: object) -> list[int]:
        now_reading("rows")
        good = []
        for number in range(1000):
            try:
                now_reading_item("rows", number)
            except HostileFileError:
                continue
            if number in (30, 700):
                os.abort()
            good.append(number)
        return good

    notes: list[str] = []
    assert read_within(LITTLE, read, notes.append) == [n for n in range(1000) if n not in (30, 700)]
    assert len(notes) == 2


def test_too_many_deaths_and_those_of_no_file_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_reads, "MAX_DEADLY_READS", 2)

    def read(_: object) -> None:
        for number in range(10):
            try:
                now_reading(f"file {number}")
            except HostileFileError:
                continue
            os.abort()

    with pytest.raises(DataError, match=r"file 2: .*SIGABRT"):
        read_within(LITTLE, read)
    with pytest.raises(DataError, match="a file that is read: reading it ended the process by SIGABRT"):
        read_within(LITTLE, lambda _: os.abort())


def test_storage_that_does_not_answer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_reads, "SILENCE_S", 0.1)
    pipe = tmp_path / "picture.png"
    os.mkfifo(pipe)  # opening it to read blocks until someone writes, as a file server that is away does
    notes: list[str] = []

    def answer(note: str) -> None:
        notes.append(note)
        pipe.write_bytes(b"pixels")

    def read(_: object) -> int:
        now_reading(str(pipe))
        return len(pipe.read_bytes())

    assert read_within(LITTLE, read, answer) == 6
    [note] = notes
    assert note.startswith(f"{pipe}: its storage has not answered for 0.1 s")


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from mmtrain.limited_reads import Bounds, read_within
def read(_):
    Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
    print("reading", flush=True)
    time.sleep(1000)
read_within(Bounds(1 << 28), read)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"reading\n"
        child = int((tmp_path / "pid").read_text())
        parent.kill()
    status = Path(f"/proc/{child}/stat")
    poll(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX")
