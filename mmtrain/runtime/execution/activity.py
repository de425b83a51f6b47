"""What a rank is doing, for those who must explain it when the rank hangs or fails."""

import threading
import time
from collections.abc import Callable

from mmtrain.program import Action, Collective, Recv, Send, action_to_text
from mmtrain.runtime.execution.file_progress import FileProgress
from mmtrain.runtime.execution.recorder import StepRecorder

# Phases outside the program's actions, as failure reports name them.
STARTING = "starting"
INDEXING = "indexing the data"
PLANNING = "choosing the plan"
AWAITING_PLAN = "waiting for the plan"
BUILDING = "building the model"
FETCHING = "fetching a checkpoint"
RESTORING = "restoring a checkpoint"
CONNECTING = "connecting the ranks"
PREPARING = "waiting for the first step of all ranks"
LOADING = "loading data"
MEASURING = "gathering the metrics"
SAVING = "saving a checkpoint"
EXPORTING = "waiting for Hugging Face weights to be written"
COPYING = "waiting for checkpoints to be copied"
CHECKING = "comparing the sums of weights and optimizer state"
TRACING = "gathering a trace"
ANSWERING = "gathering the answers"
DRAINING = "waiting for what was sent to leave"
ENDING = "ending the run"
COLLECTIVE_PHASES = (AWAITING_PLAN, CONNECTING, MEASURING, CHECKING, TRACING, ANSWERING, EXPORTING, COPYING)
FILE_PHASES = (SAVING, FETCHING, RESTORING)  # bytes that are read or written are progress
COMPUTING_PHASES = (PLANNING,)  # processor time is progress: the search neither waits nor reads
# They take as long as the data and the model demand, on one rank while the others wait for it. In most of them nothing
# that could be counted tells slow from stuck, so a rank is only expected to run: a process that is stopped does not.
START_PHASES = (STARTING, INDEXING, PLANNING, AWAITING_PLAN, BUILDING, PREPARING)


class ProcessorProgress:
    """When the thread that made this object last used processor time, for another thread that asks again and again."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, processor_clock: Callable[[], float] | None = None
    ) -> None:
        """`processor_clock` returns the seconds that the thread has used."""
        self._clock, self._processor_clock = clock, processor_clock or _clock_of_this_thread()
        self._used_s, self._changed_s = self._processor_clock(), clock()

    @property
    def changed_s(self) -> float:
        """When the thread was last seen to have used more than before."""
        used_s = self._processor_clock()
        if used_s != self._used_s:
            self._used_s, self._changed_s = used_s, self._clock()
        return self._changed_s


def _clock_of_this_thread() -> Callable[[], float]:
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS: what cannot be measured counts as progress
        return time.monotonic
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)


class Activity:
    """The action or phase in progress on this rank; the main thread writes it and the watchdog's thread reads it.

    Writing must cost next to nothing: a step has thousands of actions. There is no lock: each field is replaced as a
    whole, and a reader that sees one field an action too old is not misled. The same calls feed the step's record.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        recorder: StepRecorder | None = None,
        processor: ProcessorProgress | None = None,
    ) -> None:
        self._clock = clock
        self.recorder = recorder or StepRecorder()
        self.step: int | None = None  # counts from 1, as users do; None before the first
        self.waiting: Send | Recv | None = None  # the message that the main thread waits for
        self.doing: Action | str = STARTING
        self.connection = ""  # what is being connected, while ranks are
        self.stragglers: str | None = None  # as all ranks know them
        self.files = FileProgress(clock)
        self.outages: dict[str, str] = {}  # what storage is away, by whose data it holds
        self._outage_s = clock()  # when this rank or another one was last known to wait for storage
        self._processor = processor or ProcessorProgress(clock)  # of the thread that computes, which makes this object
        self._since = clock()
        self._device_mark = 0  # as `stuck_s` last saw it, and when it first did
        self._device_since = self._since

    def start(self, doing: Action | str) -> None:
        """Start an action or a named phase; what was in progress has ended."""
        self.doing = doing
        self._since = self._clock()
        self.recorder.start_action(doing)

    def connect(self, connection: str) -> None:
        """Start to connect to other ranks, which takes no time once they have come; `connection` says what for."""
        self.connection = connection
        self.start(CONNECTING)

    def wait(self, message: Send | Recv) -> None:
        """Wait for a message, as part of the action in progress."""
        self.waiting = message
        self._since = self._clock()
        self.recorder.wait(message)

    def wait_for_collectives(self) -> None:
        """Wait, as part of the action in progress, for the collectives that earlier actions have started."""
        self._since = self._clock()
        self.recorder.wait(None)

    def arrived(self, nbytes: int = 0) -> None:
        """End the wait for a message of `nbytes`, or for collectives."""
        self.waiting = None
        self._since = self._clock()
        self.recorder.arrived(nbytes)

    def reached(self) -> tuple[Action | str, Send | Recv | None]:
        """Return what this rank is at, and the message it waits for.

        The host may be far ahead of its device. Then that is what the device is at: a kernel that waits for another
        rank hangs there, while the host goes on until it needs a result.
        """
        position = self.recorder.device_position()
        if position is None:
            return self.doing, self.waiting
        return position.doing, position.waiting

    @property
    def is_collective(self) -> bool:
        """Whether what this rank is at ends only when other ranks do it too."""
        if self.in_files:
            return self.files.waits_for_ranks
        doing, _ = self.reached()
        return isinstance(doing, Collective) or doing in COLLECTIVE_PHASES

    @property
    def in_files(self) -> bool:
        """Whether the main thread waits for files of a checkpoint, on this rank or on others."""
        return self.doing in FILE_PHASES

    def note_outage(self, of_data: str, outage: str) -> None:
        """Note that storage of some data is away; empty: it is there."""
        self._outage_s = self._clock()
        self.outages = {name: text for name, text in {**self.outages, of_data: outage}.items() if text}

    @property
    def awaits_storage(self) -> bool:
        """Whether the main thread waits for data whose storage is away. The loader knows when to give up."""
        return self.doing == LOADING and bool(self.outages)

    def peers_await_storage(self) -> None:
        """Note that another rank waits for storage now, so that this one may wait for that rank."""
        self._outage_s = self._clock()

    @property
    def is_starting(self) -> bool:
        """Whether the rank is in a phase before the first step that may take any time."""
        return self.doing in START_PHASES

    @property
    def is_computing(self) -> bool:
        """Whether the rank is in a phase that uses processor time all along."""
        return self.doing in COMPUTING_PHASES

    def text(self) -> str:
        """Return what this rank is at: an action in the program's text form, or a phase."""
        doing, _ = self.reached()
        if doing == CONNECTING:
            return f"{CONNECTING}: {self.connection}"
        if doing == LOADING and self.outages:
            return f"{LOADING}: {next(iter(self.outages.values()))}"
        return doing if isinstance(doing, str) else action_to_text(doing)

    def stuck_s(self) -> float:
        """Return the seconds since an action, a phase or a wait last started or ended, or work in it made progress."""
        if self.awaits_storage:
            return 0.0
        since = max(self._since, self._outage_s)
        if self.in_files:
            since = max(since, self.files.changed_s)
        elif self.is_computing:
            since = max(since, self._processor.changed_s)
        position = self.recorder.device_position()
        if position is not None:  # the host waits for its device, which may be slow and not stuck
            if position.mark != self._device_mark:
                self._device_mark = position.mark
                self._device_since = self._clock()
            since = max(since, self._device_since)
        return self._clock() - since
