"""Wait for what must happen, however busy the machine is."""

import time
from collections.abc import Callable

# How long tests wait: a safety net that no passing test comes near, also on a machine that is busy with other work. It
# ends before pytest ends the test, so that a hang is reported with the stacks of its ranks.
MAX_WAIT_S = 300.0
POLL_S = 0.05


def poll(found: Callable[[], bool]) -> None:
    """Wait until `found` returns True."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while not found():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(POLL_S)
