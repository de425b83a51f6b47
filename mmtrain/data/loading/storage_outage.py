"""Tell bad data from storage that is away, and wait until it is back.

A file that cannot be read says little: the file may be gone, or the server that holds all of them. Other files of the
same source tell. Whatever asks them may block for as long as the server is away, so that a thread of its own asks.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.sample import Sample
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.errors import RemoteReadError, StorageAwayError
from mmtrain.recipe.settings.source_path import is_url

NUM_OTHERS = 4  # files of a source that are asked for beside one that cannot be read
_NUM_CANDIDATES = 64  # samples among which they are looked for
PROBE_TIMEOUT_S = 5.0  # of all of them together
POLL_S = 5.0  # between two looks whether storage is back
SLOW_READ_S = 30.0  # that reading one medium may take before the storage behind it is looked at
RETRY_PAUSE_S = 60.0  # before a file is read again that fails on healthy storage
_HEARTBEAT_S = 1.0
_CHUNK_BYTES = 1 << 20

T = TypeVar("T")


class StorageProbe:
    """Finds out whether the files of a sample's source can be read at all."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Compare with the media of these samples."""
        self._samples = samples
        self._thread: threading.Thread | None = None  # of the last question
        self._answers: list[str] = []
        self._place = "its source"  # what is asked

    def __reduce__(self) -> tuple[object, ...]:  # other processes ask by threads of their own
        return StorageProbe, (self._samples,)

    def find_outage(self, sample_id: int) -> str:
        """Return why the storage of a sample's source is away; empty if it is there. Takes a few seconds at most."""
        if self._thread is None or not self._thread.is_alive():
            self._answers = []
            self._thread = threading.Thread(
                target=self._answer, args=(sample_id, self._answers), name="mmtrain-storage-probe", daemon=True
            )
            self._thread.start()
        self._thread.join(PROBE_TIMEOUT_S)
        if self._answers:
            return self._answers[0]
        return f"{self._place} does not answer in {PROBE_TIMEOUT_S:g} s"

    def _answer(self, sample_id: int, answers: list[str]) -> None:
        answers.append(self._ask(sample_id))

    def _ask(self, sample_id: int) -> str:
        """Return why neither most of the other files nor, where there are none, the folder can be read."""
        try:
            sample = self._samples[sample_id]
            others = self._others(sample_id, sample)
            self._place = _place(others or _media_of(sample))
            if not others:
                return _folder_fault(_media_of(sample))
            faults = [fault for medium in others if (fault := _opening_fault(medium)) is not None]
        except OSError as error:  # of the index itself
            return f"{type(error).__name__}: {error}"
        if 2 * len(faults) <= len(others):
            return ""
        return f"{len(faults)} of {len(others)} other files of {self._place} cannot be read either: {faults[0]}"

    def _others(self, sample_id: int, sample: Sample) -> list[Media]:
        """Return media of other samples of the same source, in files of their own where there are such."""
        num_samples = len(self._samples)
        drawn = random.Random(sample_id).sample(range(num_samples), min(num_samples, _NUM_CANDIDATES))
        own = {_file_of(medium) for medium in _media_of(sample)}
        by_file: dict[str, Media] = {}
        for number in drawn:
            other = self._samples[number]
            if number == sample_id or other.source != sample.source:
                continue
            for medium in _media_of(other):
                if _file_of(medium) not in own:
                    by_file.setdefault(_file_of(medium), medium)
            if len(by_file) >= NUM_OTHERS:
                break
        return list(by_file.values())[:NUM_OTHERS]


class ReaderStatus(Protocol):
    """What a reader that may block shows to who watches it."""

    def read(self) -> tuple[int, int | None]:
        """Return how often it has changed, and the sample whose media are read."""

    def outage(self) -> str:
        """Return what the reader itself waits for; empty if it does not."""


@dataclass
class ReadWatch:
    """What is known of one reader: since when it makes no progress, and whether its storage is away."""

    outage: str = ""  # empty while storage is there
    _num_changes: int | None = field(default=None, init=False)
    _changed_s: float = field(default=0.0, init=False)
    _outage_start_s: float = field(default=0.0, init=False)

    def start(self, now_s: float) -> None:
        """Note that the reader has begun something new."""
        self.outage = ""
        self._changed_s = now_s

    def look(
        self, status: ReaderStatus, now_s: float, find_outage: Callable[[int], str], was_paused: bool = False
    ) -> float:
        """Return the seconds since when the reader makes no progress though its storage is there."""
        num_changes, sample_id = status.read()
        if num_changes != self._num_changes or was_paused:
            self._num_changes, self._changed_s = num_changes, now_s
            self._note(status.outage(), now_s)
            return 0.0
        stuck_s = now_s - self._changed_s
        if sample_id is None or stuck_s <= SLOW_READ_S:
            return stuck_s
        outage = find_outage(sample_id)
        if self.outage and not outage:  # what waited for the server needs some time to come back
            self._changed_s, stuck_s = now_s, 0.0
        self._note(outage, now_s)
        return 0.0 if outage else stuck_s

    def outage_s(self, now_s: float) -> float:
        """Return how long the storage has been away."""
        return now_s - self._outage_start_s if self.outage else 0.0

    def _note(self, outage: str, now_s: float) -> None:
        if outage and not self.outage:
            self._outage_start_s = now_s
        self.outage = outage


class PatientReader:
    """Reads media of samples, and waits while their storage is away."""

    def __init__(
        self,
        find_outage: Callable[[int], str],
        patience_s: float,
        on_read: Callable[[int], None],
        on_outage: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for `patience_s` at most.

        `on_read` is called with the sample while it waits, so that it is not taken for stuck, and `on_outage` with what
        it waits for, and with an empty text when that is over.
        """
        self._find_outage = find_outage
        self._patience_s = patience_s
        self._on_read, self._on_outage = on_read, on_outage
        self._sleep, self._clock = sleep, clock

    def read(self, sample_id: int, medium: Media, load: Callable[[], T]) -> T:
        """Return what `load` makes of a medium.

        Raises:
            BadMediaError: the data is bad, also when read again, or this one file of healthy storage cannot be read.
            StorageAwayError: storage was away for longer than the patience.
        """
        num_faults = 0
        is_read_again = False
        while True:
            try:
                return load()
            except (BadMediaError, StorageAwayError) as error:
                fault = error if isinstance(error, StorageAwayError) else reading_fault(medium)
                if fault is None and is_read_again:
                    raise
                if fault is None:  # a moment ago it may have been unreadable
                    is_read_again = True
                    continue
                if self._wait_out(sample_id, medium):
                    num_faults = 0
                    continue
                if isinstance(fault, FileNotFoundError):
                    raise
                num_faults += 1
                if num_faults == 2:
                    raise BadMediaError("unreadable", f"{medium}: {fault}") from None
                self._pause(sample_id, RETRY_PAUSE_S)

    def _wait_out(self, sample_id: int, medium: Media) -> bool:
        """Wait while the storage of a sample is away; return whether it was."""
        start_s = self._clock()
        was_away = False
        while outage := self._find_outage(sample_id):
            was_away = True
            text = f"{medium} cannot be read, and {outage}"
            if self._clock() - start_s >= self._patience_s:
                self._on_outage("")
                raise given_up(text, self._patience_s)
            self._on_outage(text)
            self._pause(sample_id, POLL_S)
        if was_away:
            self._on_outage("")
        return was_away

    def _pause(self, sample_id: int, seconds: float) -> None:
        end_s = self._clock() + seconds
        while (left_s := end_s - self._clock()) > 0:
            self._on_read(sample_id)
            self._sleep(min(left_s, _HEARTBEAT_S))


class OutageReport:
    """Tells the user once that storage is away, and once that it is back."""

    def __init__(
        self,
        notify: NotifyCallback,
        patience_s: float,
        on_change: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` is called with what is away, and with an empty text when nothing is any more."""
        self._notify, self._patience_s, self._on_change, self._clock = notify, patience_s, on_change, clock
        self._outage = ""
        self._start_s = 0.0

    def tell(self, outage: str) -> None:
        """Take note of what is away now; empty: nothing."""
        if bool(outage) == bool(self._outage):
            return
        self._outage = outage
        self._on_change(outage)
        if outage:
            self._start_s = self._clock()
            self._notify(
                f"{outage}. Training waits for it, {self._patience_s:g} s at most (data.storage_patience_s), and "
                "quarantines nothing"
            )
        else:
            self._notify(f"storage is back after {self._clock() - self._start_s:.0f} s")


def given_up(outage: str, patience_s: float) -> StorageAwayError:
    """Return the error of storage that was away for too long."""
    return StorageAwayError(
        f"{outage}. The run waited for {patience_s:g} s (data.storage_patience_s). Mend the storage, then start again: "
        "the run resumes from its last checkpoint"
    )


def reading_fault(medium: Media) -> Exception | None:
    """Read all bytes of a medium; return why they cannot be read, and None for those that only cannot be decoded."""
    try:
        with medium.open() as file:
            while file.read(_CHUNK_BYTES):
                pass
    except RemoteReadError as error:
        return error
    except OSError as error:
        return error if error.errno is not None else None  # one without a number is our own, of bad data
    except Exception:  # of a library that decodes, such as pyarrow
        return None
    return None


def _opening_fault(medium: Media) -> str | None:
    """Return why the first byte of a medium cannot be read."""
    try:
        with medium.open() as file:
            file.read(1)
    except RemoteReadError as error:
        return str(error)
    except OSError as error:
        return None if error.errno is None else f"{medium}: {error.strerror}"
    except Exception:
        return None
    return None


def _folder_fault(media: Sequence[Media]) -> str:
    """Return why the folder of the only files of a source cannot be read, or that it is empty, as a mount point is."""
    files = [file for file in map(_file_of, media) if not is_url(file)]
    if not files:
        return ""
    folder = os.path.dirname(files[0]) or "."
    try:
        with os.scandir(folder) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        return f"its folder {folder} cannot be read: {error.strerror}"
    return f"its folder {folder} is empty" if is_empty else ""


def _place(media: Sequence[Media]) -> str:
    """Name the common folder of files, and the server or device that holds it."""
    folders = [os.path.dirname(_file_of(medium)) for medium in media]
    if any(map(is_url, folders)):
        return folders[0]
    folder = os.path.commonpath(folders)
    mount = _mount_of(folder)
    return f"{folder} ({mount})" if mount else folder


def _mount_of(folder: str, table: Path = Path("/proc/self/mountinfo")) -> str:
    """Return what is mounted where a folder is, like `files:/export, nfs4`; empty where the system does not say."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    held_by = ""
    longest = -1
    for line in lines:  # proc(5): ... ROOT MOUNT_POINT OPTIONS [FIELDS] - TYPE SOURCE OPTIONS
        fields = line.split(" ")
        point = fields[4]
        if len(point) >= longest and f"{folder}/".startswith(f"{point.rstrip('/')}/"):
            kind, source = fields[fields.index("-") + 1 :][:2]
            held_by, longest = f"{source}, {kind}", len(point)
    return held_by


def _media_of(sample: Sample) -> list[Media]:
    return [*sample.images, *sample.clips, *sample.videos, *sample.target_images]


def _file_of(medium: Media) -> str:
    """Return the file that holds a medium."""
    if isinstance(medium, FileMedia):
        return medium.path
    return str(getattr(medium, "shard", "") or getattr(medium, "file", ""))
