"""What a rank is doing, published for those who ask when it no longer gets anything done."""

import time
from collections.abc import Callable

from mmtrain.program import Action, Collective, Recv, Send, action_to_text
from mmtrain.runtime.execution.recorder import StepRecorder

LOADING, MEASURING, SAVING = "loading data", "gathering the metrics", "saving a checkpoint"
TRACING, ASKING = "gathering a trace", "gathering the answers"


class Activity:
    """The action or phase in progress on this rank, written by its main thread and read by the watchdog's.

    Writing must cost next to nothing: a step has thousands of actions. No lock: each field is replaced as a whole,
    and a reader that sees one of them an action too old is not misled. The same calls feed the step's record.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, recorder: StepRecorder | None = None) -> None:
        self._clock = clock
        self.recorder = recorder or StepRecorder()
        self.step: int | None = None  # counts from 1, as people see it; None before the first
        self.waiting: Send | Recv | None = None  # the message that the main thread waits for
        self.doing: Action | str = "starting"
        self.stragglers: str | None = None  # as all ranks know them
        self._since = clock()

    def start(self, doing: Action | str) -> None:
        """Start an action or a named phase; what was in progress has ended."""
        self.doing, self._since = doing, self._clock()
        self.recorder.start_action(doing)

    def wait(self, message: Send | Recv) -> None:
        """Wait for a message, as part of the action in progress."""
        self.waiting, self._since = message, self._clock()
        self.recorder.wait(message)

    def arrived(self, nbytes: int = 0) -> None:
        """End the wait for a message of `nbytes`."""
        self.waiting, self._since = None, self._clock()
        self.recorder.arrived(nbytes)

    @property
    def is_collective(self) -> bool:
        """Whether what is in progress ends only when other ranks do it too."""
        return isinstance(self.doing, Collective) or self.doing in (MEASURING, SAVING, TRACING, ASKING)

    def text(self) -> str:
        """Name what is in progress."""
        return self.doing if isinstance(self.doing, str) else action_to_text(self.doing)

    def stuck_s(self) -> float:
        """Seconds since anything began."""
        return self._clock() - self._since
