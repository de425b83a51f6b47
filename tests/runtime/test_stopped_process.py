"""A process that stays stopped is killed by another one."""

import os
import signal
import subprocess
import sys
from itertools import count

import pytest

from mmtrain.runtime.resilience import stopped_process
from tests.waiting import MAX_WAIT_S

PROGRAM = """
import os, signal, sys
from mmtrain.runtime.resilience.stopped_process import killed_if_stopped
with killed_if_stopped(0.0):
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
print("ended")
"""


@pytest.mark.parametrize(("fault", "code", "printed"), [("stop", -signal.SIGKILL, ""), ("none", 0, "ended\n")])
def test_a_process_that_stays_stopped_is_killed_and_another_one_is_not(fault: str, code: int, printed: str) -> None:
    command = [sys.executable, "-c", PROGRAM, fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (code, printed)


def test_a_process_that_goes_on_in_time_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    states, killed, seconds = iter("RTTTRTTTT"), list[tuple[int, int]](), count()
    monkeypatch.setattr(stopped_process, "state_of", lambda pid: next(states))
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    stopped_process.watch(17, 3.0, lambda: False, clock=lambda: float(next(seconds)))
    assert killed == [(17, signal.SIGKILL)]
    assert next(states, None) is None, "three seconds after it was stopped again"


def test_the_state_of_a_process_is_read_behind_its_name() -> None:
    assert stopped_process.state_of(os.getpid()) in "RS"
    assert stopped_process.state_of(2**22 + 1) == "", "there is no such process"
