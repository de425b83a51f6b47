"""Whether a thread computes: work that only computes and uses no processor time is stuck."""

import threading
import time
from collections.abc import Callable


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
