"""The worker processes: `python -m mmtrain.data.loading.worker_process CONTROL BUILDER`, two open file descriptors.

A host process reads index, stream and recipe once and forks workers, which share that memory. So a worker that died is
replaced in milliseconds. The host is started afresh: it has neither torch nor threads nor the trainer's descriptors. A
worker answers one request after the other until its pipe closes. When the trainer ends, in whatever way, the host's
pipe closes too, and the host kills its workers and ends.
"""

import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from mmtrain.data.loading.batch_builder import ReadMonitor, StepBuilder, StepRequest
from mmtrain.data.loading.ipc import SharedStatus, create_memory_file, map_file, receive_message, send_message
from mmtrain.data.loading.step_format import from_json, pack
from mmtrain.data.remote.locations import pin_versions
from mmtrain.data.remote.remote_files import allow_redirects
from mmtrain.errors import MmtrainError
from mmtrain.printed_text import escape_output


def main() -> None:
    """Run the host of the workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # A launcher may signal all processes of a job; the trainer still needs its data to finish the step and save.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    escape_output()
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2]), "rb") as file:
        builder: StepBuilder
        # Safe: written by the trainer that started us, into its own memory.
        builder, versions, hosts = pickle.load(file)
    pin_versions(versions)
    allow_redirects(hosts)
    run_host(control, builder)


def run_host(control: socket.socket, builder: StepBuilder) -> None:
    """Fork a worker for each request, and answer how the worker that it replaces ended; kill all workers at the end."""
    workers: set[int] = set()
    gc.freeze()  # collecting garbage would copy pages that workers share
    try:
        while (message := receive_message(control)) is not None:
            request, (pipe, status_file) = message
            exit_status = None
            if request["replaces"] in workers:
                workers.discard(request["replaces"])
                exit_status = os.waitpid(request["replaces"], 0)[1]
            worker = os.fork()
            if worker == 0:
                control.close()
                _run_worker(socket.socket(fileno=pipe), SharedStatus(map_file(status_file)), builder)
            os.close(pipe)
            os.close(status_file)
            workers.add(worker)
            send_message(control, {"pid": worker, "ended": exit_status})
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _run_worker(pipe: socket.socket, status: SharedStatus, builder: StepBuilder) -> NoReturn:
    """Build requested steps until the pipe closes; `status` always holds the sample that is being read."""
    exit_code = 1
    try:
        while (message := receive_message(pipe)) is not None:
            job, _ = message
            monitor = ReadMonitor(status.write, frozenset(job["deadly"]), status.write_outage)
            answer, files = _answer(job["request"], monitor, builder)
            send_message(pipe, answer, files)
            for file in files:
                os.close(file)
        exit_code = 0
    except OSError:  # the trainer has ended
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)  # without the exit handlers of the host


def _answer(request: str, monitor: ReadMonitor, builder: StepBuilder) -> tuple[dict[str, Any], list[int]]:
    try:
        step_data = builder.build(from_json(StepRequest, request), monitor)
        monitor.on_read(None)
        return {}, [create_memory_file(pack(step_data).chunks)]
    except Exception as error:
        return {"error": error_to_json(error)}, []


def error_to_json(error: Exception) -> dict[str, str]:
    """Return the fields of the `StepFailure` of an error."""
    kind = type(error).__name__
    return {
        "kind": kind if isinstance(error, MmtrainError) else "",
        "message": str(error) if isinstance(error, MmtrainError) else f"{kind}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


if __name__ == "__main__":
    main()
