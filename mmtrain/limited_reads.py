"""Read files of others in a child process within bounds, so that no parser can do more than end it.

A file from anywhere may make a library abort, loop without end or fill the memory. `read_within` calls a function in a
forked child with bounds on memory and on processor time. The function says by `now_reading` what it reads. Where the
child dies, that is known to be deadly: a new child calls the function again, and there `now_reading` raises
`HostileFileError`, by which one sample is set aside, or the file is named.

The child has no network, unless it is allowed to and where the kernel lets it leave the network (`can_leave_network`).
It is forked, which takes milliseconds, from a process that may have threads: like the workers of torch's DataLoader it
uses no CUDA, no process group and no other thread's locks. What it answers is JSON, which is parsed and never executed.
"""

import ctypes
import errno
import faulthandler
import json
import mmap
import os
import selectors
import signal
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any, NoReturn

import mmtrain.errors
from mmtrain.errors import DataError, HostileFileError, MmtrainError
from mmtrain.foreign_json import parse_json
from mmtrain.system_calls import (
    can_fork,
    leave_no_core_file,
    limit_data_bytes,
    num_data_bytes,
    num_processor_ticks,
    open_memory_file,
)

# Of a header, a row, a template: what takes milliseconds. A tokenizer of 250,000 tokens takes 0.8 s (2026-12-01).
MAX_PROCESSOR_S = 8.0
MAX_TEXT_BYTES = 700 << 20  # to read tokenizer or template: that tokenizer takes 203 MiB
SILENCE_S = 30.0  # without an answer and without processor time, after which it is said what is waited for
MAX_DEADLY_READS = 20  # after each, everything is read again
_READ_BYTES = 1 << 20
_MAX_THREADS = 256  # of a child, that read
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # the parent decides when a child ends
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NEW_USER = 0x10000000  # CLONE_NEWUSER
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_OUT_OF_MEMORY = 99  # exit code

Notify = Callable[[Any], None]  # of a JSON value


@dataclass(frozen=True)
class Bounds:
    """What a child may use."""

    memory_bytes: int  # besides what it has when it starts, or at the last `go_on_reading`
    network: bool = False
    processor_s: float = field(default_factory=lambda: MAX_PROCESSOR_S)  # for each thing that is read


@dataclass(frozen=True)
class Reading:
    """What one thread of a child is reading."""

    place: str
    number: int | None = None  # of a part of it


class _Slot:
    """Where one thread says what it reads, and what it wrote there last."""

    __slots__ = ("num_bytes", "place", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.place = ""
        self.num_bytes = 0


class _Readings:
    """What the threads of a child read, in memory that its parent shares."""

    _ENTRY = struct.Struct("<Hq")  # bytes of the place and its number, in front of the place itself
    _SLOT_BYTES = 2048
    _MAX_PLACE_BYTES = _SLOT_BYTES - _ENTRY.size
    _NO_NUMBER = -1

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _MAX_THREADS * self._SLOT_BYTES + 1)
        self._slots = threading.local()
        self._num_slots = 0
        self._taking_slot = threading.Lock()

    @property
    def names_items(self) -> bool:
        """Whether all that is read is named, down to single items."""
        return self._memory[-1] == 0

    @names_items.setter
    def names_items(self, value: bool) -> None:
        self._memory[-1] = 0 if value else 1

    def write(self, place: str, number: int | None) -> None:
        try:
            slot = self._slots.slot
        except AttributeError:
            slot = self._take_slot()
        head_number = self._NO_NUMBER if number is None else number
        if slot.place is place:
            self._ENTRY.pack_into(self._memory, slot.start, slot.num_bytes, head_number)
            return
        text = place.encode("utf-8", "surrogatepass")[: self._MAX_PLACE_BYTES]
        slot.place, slot.num_bytes = place, len(text)
        entry = self._ENTRY.pack(len(text), head_number) + text
        self._memory[slot.start : slot.start + len(entry)] = entry

    def _take_slot(self) -> _Slot:
        with self._taking_slot:
            slot = self._slots.slot = _Slot(self._num_slots % _MAX_THREADS * self._SLOT_BYTES)
            self._num_slots += 1
        return slot

    def clear(self) -> None:
        """Forget all: what each thread read is done."""
        for start in range(0, min(self._num_slots, _MAX_THREADS) * self._SLOT_BYTES, self._SLOT_BYTES):
            self._ENTRY.pack_into(self._memory, start, 0, self._NO_NUMBER)

    def read_all(self) -> list[Reading]:
        readings = []
        for start in range(0, _MAX_THREADS * self._SLOT_BYTES, self._SLOT_BYTES):
            num_bytes, number = self._ENTRY.unpack_from(self._memory, start)
            first = start + self._ENTRY.size
            if num_bytes:
                place = bytes(self._memory[first : first + num_bytes]).decode("utf-8", "surrogatepass")
                readings.append(Reading(place, None if number == self._NO_NUMBER else number))
        return readings


@dataclass
class _Child:
    """The bounds of this process, if it is a child."""

    bounds: Bounds
    readings: _Readings
    deadly: Mapping[Reading, str]  # what ended an earlier child, and how
    is_careful: bool  # one thread reads, and says every item, since it was not clear which of them ended the last child
    file: str = ""  # whose parts are read

    def renew(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.bounds.processor_s)

    def rest(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self.readings.clear()


_child: _Child | None = None


def now_reading(place: str, number: int | None = None) -> None:
    """Say what this thread reads from now on, for which it may use the processor for so long.

    number: of the part of `place`. Raises `HostileFileError` if that ended an earlier child. Does nothing elsewhere.
    """
    child = _child
    if child is None:
        return
    if child.deadly:
        how = child.deadly.get(Reading(place, number))
        if how is not None:
            what = place if number is None else f"{place}, number {number}"
            raise HostileFileError(f"{what}: {how}; it is damaged, or made to do so: remove it")
    child.readings.write(place, number)
    child.readings.names_items = True
    child.renew()


def now_reading_item(place: str, number: int | None = None) -> None:
    """Do as `now_reading`, for one of a million items: the first child says only that it reads items.

    What ends it is found by a second one, which says each of them.
    """
    child = _child
    if child is None:
        return
    if child.is_careful:
        now_reading(place, number)
        return
    if child.readings.names_items:
        child.readings.names_items = False
    child.renew()


def now_reading_texts(place: str) -> None:
    """Do as `now_reading` for a tokenizer or a template, which have less memory until `go_on_reading` or the like."""
    now_reading(place)
    if _child is not None:
        _limit_memory(min(MAX_TEXT_BYTES, _child.bounds.memory_bytes))


def now_reading_parts(file: str) -> None:
    """Say that parts of a file are read from now on, which `go_on_reading` goes back to. Raises as `now_reading`."""
    if _child is not None:
        _child.file = file
        now_reading(file)


def go_on_reading() -> None:
    """Say that more of the file of `now_reading_parts` is read; count memory from what is held now, such as results."""
    if _child is not None:
        now_reading(_child.file)
        _limit_memory(_child.bounds.memory_bytes)


def renew_processor_time() -> None:
    """Count the processor time from now for another part of what this thread is reading."""
    if _child is not None:
        _child.renew()


def done_reading() -> None:
    """Say that no file of others is read until the next `now_reading`, however long that takes."""
    if _child is not None:
        _child.rest()
        _limit_memory(_child.bounds.memory_bytes)


def reads_in_one_thread() -> bool:
    """Return whether only one thread may read, because it must be known what each reads."""
    return _child is not None and _child.is_careful


def read_within(bounds: Bounds, function: Callable[[Notify], Any], notify: Notify = lambda _: None) -> Any:
    """Call a function in a child within bounds, and return its JSON value.

    function: gets a function that notifies this process. It is called again after what ended a child.
    notify: is called with each note of the child.

    Raises:
        MmtrainError, OSError: the function did.
        DataError: a child died, and it is not known of what, or too often.
    """
    if not can_fork() or _child is not None:
        return function(notify)
    deadly: dict[Reading, str] = {}
    is_careful = False
    while True:
        readings = _Readings()
        end = _run_child(_Child(bounds, readings, dict(deadly), is_careful), function, notify)
        if "value" in end:
            return end["value"]
        if "error" in end:
            raise _error_from_json(end["error"])
        suspects = readings.read_all()
        how = end["died"]
        if not is_careful and (len(suspects) > 1 or not readings.names_items):
            is_careful = True
            continue
        if not suspects or suspects[0] in deadly or len(deadly) == MAX_DEADLY_READS:
            places = ", ".join(reading.place for reading in (suspects or deadly))
            raise DataError(f"{places or 'a file that is read'}: {how}, and it is not clear what is wrong with it")
        deadly[suspects[0]] = how
        notify(f"{suspects[0].place}: {how}; reading everything again without it")


def _run_child(child: _Child, function: Callable[[Notify], Any], notify: Notify) -> dict[str, Any]:
    """Fork, and return what the child answered: `value` or `error`; else how it `died`."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    with open(open_memory_file(), "w+b") as said, os.fdopen(read_end, "rb", buffering=0) as answers:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. Those of this process hold no lock that the child takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            answers.close()
            _be_child(child, function, os.fdopen(write_end, "w", encoding="ascii"), said.fileno())
        os.close(write_end)
        status = None
        answer: dict[str, Any] = {}
        try:
            for line in _lines(answers, _Silence(pid, child.readings, notify)):
                answer = parse_json(line)
                if "note" in answer:
                    notify(answer["note"])
            status = os.waitpid(pid, 0)[1]
        finally:
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        said.seek(0)
        last_words = said.read().decode("utf-8", "replace")
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code == 0 and ("value" in answer or "error" in answer):
        sys.stderr.write(last_words)  # such as warnings
        return answer
    return {"died": _describe_end(exit_code, child.bounds.processor_s, _last_line(last_words))}


class _Silence:
    """Says once of each thing what a child waits for: one that computes is not waiting, however long it takes."""

    def __init__(self, pid: int, readings: _Readings, notify: Notify) -> None:
        self._pid, self._readings, self._notify = pid, readings, notify
        self._ticks: int | None = None
        self._named: set[str] = set()

    def report(self) -> None:
        """Say it, if the processor has not worked for the child since the last call."""
        ticks = num_processor_ticks(self._pid)
        places = [reading.place for reading in self._readings.read_all()]
        if ticks is not None and ticks == self._ticks and places and places[0] not in self._named:
            self._named.add(places[0])
            self._notify(
                f"{places[0]}: its storage has not answered for {SILENCE_S:g} s; reading goes on when it does. Look "
                "whether its file server is mounted and answers"
            )
        self._ticks = ticks


def _lines(answers: IO[bytes], silence: _Silence) -> Iterator[bytes]:
    """Yield the lines of a child until it closes them; call `silence` whenever none has come for `SILENCE_S`."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                silence.report()
                continue
            part = answers.read(_READ_BYTES)
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines


def _be_child(child: _Child, function: Callable[[Notify], Any], pipe: IO[str], stderr: int) -> NoReturn:
    """Call the function within the bounds, write its answer, and end this process."""
    global _child
    exit_code = 1
    try:
        _child = child
        _take_bounds(child.bounds, stderr)

        def send(answer: dict[str, Any]) -> None:
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()

        try:
            answer = {"value": function(lambda note: send({"note": note}))}
        except MemoryError:  # of a reader that sets nothing aside by itself
            raise
        except Exception as error:
            answer = {"error": _error_to_json(error)}
        child.rest()
        send(answer)
        exit_code = 0
    except MemoryError:
        exit_code = _OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)  # without the exit handlers of the parent


def _take_bounds(bounds: Bounds, stderr: int) -> None:
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for name in _IGNORED_SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.dup2(stderr, 2)
    leave_no_core_file()
    _end_with_parent()
    if not bounds.network:
        leave_network()
    _limit_memory(bounds.memory_bytes)


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, whose locks it holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def leave_network() -> bool:
    """Leave all networks for good, where the kernel lets this process: as root, or in a user namespace.

    Returns whether it did. The process must have one thread.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_NETWORK) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        return False
    try:  # of files that this process creates
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(content)
    except OSError:
        pass
    return True


@cache
def can_leave_network() -> bool:
    """Return whether children are without network here; forks one to find out."""
    if not can_fork():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if leave_network() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _limit_memory(num_bytes: int) -> None:
    """Let this process have so much memory besides what it has."""
    present = num_data_bytes()
    if present is not None:
        limit_data_bytes(present + num_bytes)


def _describe_end(exit_code: int, processor_s: float, last_words: str) -> str:
    if exit_code == -signal.SIGPROF:
        return f"reading it took more than {processor_s:g} s of processor time"
    if exit_code == _OUT_OF_MEMORY:
        return "reading it took more memory than it may"
    said = f" ({last_words})" if last_words else ""
    end = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    return f"reading it ended the process {end}{said}"


def _last_line(text: str) -> str:
    """Return the start of the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _error_to_json(error: Exception) -> dict[str, Any]:
    shown: dict[str, Any] = {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    if isinstance(error, OSError) and not isinstance(error, MmtrainError):
        filename = None if error.filename is None else str(error.filename)
        shown |= {"errno": error.errno, "strerror": error.strerror, "filename": filename}
    return shown


def _error_from_json(shown: Mapping[str, Any]) -> Exception:
    """Return the error of a child; one that is not meant for users is an error of ours, with its traceback."""
    kind = getattr(mmtrain.errors, shown["kind"], None)
    if isinstance(kind, type) and issubclass(kind, MmtrainError):
        return kind(shown["message"])
    if "errno" in shown:
        return OSError(shown["errno"] or errno.EIO, shown["strerror"] or shown["message"], shown["filename"])
    return RuntimeError(f"{shown['kind']}: {shown['message']}\n{shown['traceback']}")
