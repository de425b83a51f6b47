"""Call a function beside the training, in a process of its own: its Python would slow the steps down."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.world import World

CALL_PROCESS_MODULE = "mmtrain.runtime.training.call_process"
CALL_NICENESS = 15  # of 19: the ranks and the loader's workers come first
# The function is one thread; a GPU is the run's.
CALL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class CallOutcome:
    """What became of a call in the background: its value, or the reason why there is none."""

    value: Any  # a JSON value
    reason: str | None  # why there is none: the function's error, or how its process failed
    seconds: float = 0.0  # that the function took


class BackgroundCall:
    """Calls a function, in a niced child process that ends with this one, however this one ends.

    `function` is pickled, such as a `functools.partial` of a planner that the caller of the runtime passed, so that
    the runtime needs no import of the search. It returns a JSON value. The child is a new interpreter, since a process
    with threads and CUDA cannot be forked. A thread talks to it; the methods are for the main thread.
    """

    def __init__(self, function: Callable[[], object], niceness: int = CALL_NICENESS) -> None:
        """Start the process; `niceness` counts up to 19, from that of this process on."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CALL_PROCESS_MODULE, str(niceness)],
            stdin=subprocess.PIPE,  # stays open as long as this process lives; the child ends when it closes
            stdout=subprocess.PIPE,
            env=os.environ | CALL_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self._outcome: CallOutcome | None = None
        self._thread = threading.Thread(target=self._talk, args=(function,), name="mmtrain-call", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def poll(self) -> CallOutcome | None:
        """Return the outcome, or None while the function runs."""
        return self._outcome

    def wait(self, timeout_s: float | None = None) -> CallOutcome | None:
        """Wait for the outcome and return it; None if it does not come in time."""
        self._thread.join(timeout_s)
        return self._outcome

    def close(self) -> None:
        """End the child process, whatever it is doing."""
        self._process.kill()
        self._thread.join()

    def _talk(self, function: Callable[[], object]) -> None:
        """Send the work, wait for the answer, and collect the process."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(function, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer = json.loads(process.stdout.read())
            outcome = CallOutcome(answer["value"], answer["reason"], answer["seconds"])
        except (OSError, ValueError):  # a pipe that broke, or half an answer
            process.kill()  # if it is not that which ended
            outcome = CallOutcome(None, f"its process {_describe_exit(process.wait())}")
        except Exception as error:  # what cannot be pickled is an error of ours, and must not leave a waiting child
            process.kill()
            outcome = CallOutcome(None, f"did not start: {type(error).__name__}: {error}")
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not sent cannot be flushed any more
                pipe.close()
        process.wait()
        self._outcome = outcome


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def finish_background(wait: Callable[[], bool], phase: str, patient_world: World, activity: Activity) -> None:
    """Wait on rank 0 until `wait` says that all is done, each time as progress of `phase`; all ranks call this."""
    is_done = False
    while not is_done:
        activity.start(phase)
        is_done = patient_world.on_first(wait)
