"""What runs in worker processes: `python -m mmtrain.data.loading.worker_process CONTROL STATE`.

A host process, started afresh so that it has neither torch nor threads nor the trainer's descriptors, reads index,
stream and recipe once and forks workers, which share them; so a worker that died is replaced in milliseconds. A worker
answers requests one after another until its pipe closes. When the trainer ends, however it does, the host's pipe closes
too, and the host ends the workers with it.
"""

import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from mmtrain.data.loading.batch_builder import NO_SAMPLE, ReadMonitor, StepBuilder, StepRequest
from mmtrain.data.loading.ipc import SharedStatus, create_memory_file, map_file, receive_message, send_message
from mmtrain.data.loading.step_format import from_json, pack
from mmtrain.errors import MmtrainError


def main() -> None:
    """Be the host of the workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A launcher may signal all processes of a job; the trainer still needs its data to finish the step and save.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2]), "rb") as state:
        builder: StepBuilder = pickle.load(state)  # written by the trainer that started us, in memory of its own
    run_host(control, builder)


def run_host(control: socket.socket, builder: StepBuilder) -> None:
    """Fork a worker for every pipe that comes, and say how the one it replaces ended; end all of them at last."""
    workers: set[int] = set()
    gc.freeze()  # so that collecting garbage does not copy what workers share
    try:
        while (message := receive_message(control)) is not None:
            request, (pipe, status) = message
            ended = None
            if request["replaces"] in workers:
                workers.discard(request["replaces"])
                ended = os.waitpid(request["replaces"], 0)[1]
            worker = os.fork()
            if worker == 0:
                control.close()
                _work(socket.socket(fileno=pipe), SharedStatus(map_file(status)), builder)
            os.close(pipe)
            os.close(status)
            workers.add(worker)
            send_message(control, {"pid": worker, "ended": ended})
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _work(pipe: socket.socket, status: SharedStatus, builder: StepBuilder) -> NoReturn:
    """Make what is asked for until nobody asks any more; `status` shows whoever looks which sample is being read."""
    code = 1
    try:
        while (message := receive_message(pipe)) is not None:
            monitor = ReadMonitor(status.write, frozenset(message[0]["deadly"]))
            answer, files = _answer(message[0]["request"], monitor, builder)
            send_message(pipe, answer, files)
            for file in files:
                os.close(file)
        code = 0
    except OSError:  # the reader has gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without running what the host would run at its end


def _answer(request: str, monitor: ReadMonitor, builder: StepBuilder) -> tuple[dict[str, Any], list[int]]:
    try:
        made = builder.build(from_json(StepRequest, request), monitor)
        monitor.on_read(NO_SAMPLE)
        return {}, [create_memory_file(pack(made).chunks)]
    except Exception as error:
        return {"error": error_to_json(error)}, []


def error_to_json(error: Exception) -> dict[str, str]:
    """An error as texts: whose it is, what it says, where it came from."""
    kind = type(error).__name__
    return {
        "kind": kind if isinstance(error, MmtrainError) else "",
        "message": str(error) if isinstance(error, MmtrainError) else f"{kind}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


if __name__ == "__main__":
    main()
