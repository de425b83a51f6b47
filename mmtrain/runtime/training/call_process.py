"""The process that `BackgroundCall` starts: call one function, write its result to stdout as JSON, and end."""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from mmtrain.errors import MmtrainError


def main() -> None:
    """Read a pickled function from stdin, call it, and answer with its result or with the reason why there is none."""
    os.nice(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # A launcher may signal all processes of a job. The run finishes its step and saves, and then ends this one.
        signal.signal(number, signal.SIG_IGN)
    answer_file = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    try:
        function = pickle.load(sys.stdin.buffer)
    except EOFError:  # the run ended meanwhile
        return
    threading.Thread(target=_end_with_run, name="mmtrain-parent", daemon=True).start()
    with answer_file:
        json.dump(_answer(function), answer_file)


def _answer(function: Callable[[], object]) -> dict[str, Any]:
    start_s = time.perf_counter()
    value, reason = None, None
    try:
        value = function()
    except MmtrainError as error:
        reason = str(error)
    except Exception as error:  # an error of ours, which must not end the run
        traceback.print_exc()
        reason = f"failed with {type(error).__name__}: {error}"
    return {"value": value, "reason": reason, "seconds": time.perf_counter() - start_s}


def _end_with_run() -> None:
    """End this process when the other end of stdin closes, which the system does also for a run that was killed."""
    while os.read(sys.stdin.fileno(), 1 << 16):  # not through its buffer, whose lock would be held at our own end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
