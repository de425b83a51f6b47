"""Run a function in a Python process of its own, which gives all its memory back when it ends.

What loads torch runs so when Python calls it: a notebook keeps neither the memory nor the thread pools of a model, and
ranks are started from a process without other threads, as by the command line.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar, cast

from mmtrain.errors import MmtrainError, RunError, StoppedAndSaved

Result = TypeVar("Result")
_OUTPUT_GRACE_S = 5.0  # for the last lines of a process that has ended; a process that it left behind may hold the pipe


@dataclass(frozen=True)
class _Task:
    """What the process is to call, and where it puts the outcome."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outcome_path: Path
    saves_on_stop: bool


@dataclass(frozen=True)
class _Failure:
    """An error of ours without its traceback: not every error can be pickled whole."""

    error_type: type[MmtrainError]
    message: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def to_error(self) -> MmtrainError:
        error = self.error_type.__new__(self.error_type)
        error.args = (self.message,)
        error.__dict__.update(self.attributes)
        return error


def run_in_own_process(
    function: Callable[..., Result], *arguments: Any, saves_on_stop: bool = False, output: TextIO | None = None
) -> Result:
    """Call `function(*arguments)` in a new process, show what it prints, and return what it returns.

    An interrupt (Ctrl-C, or a notebook's stop button) is passed on, and the process is waited for: one that
    `saves_on_stop` saves first, and a second interrupt ends it at once. If this process ends, the other one stops too.

    Args:
        function: of a module; it, its arguments and its result can be pickled.
        saves_on_stop: whether the function listens to stop signals, as a training run does.
        output: where lines of the process go; by default `sys.stdout`.

    Raises:
        MmtrainError: as the function raised it.
        RunError: the process was killed, or failed by a bug, whose traceback it printed.
        KeyboardInterrupt: after an interrupt of a function that saves nothing.
    """
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
        task_path, outcome_path = Path(folder, "task"), Path(folder, "outcome")
        task_path.write_bytes(pickle.dumps(_Task(function, arguments, outcome_path, saves_on_stop)))
        process = subprocess.Popen(
            [sys.executable, "-m", "mmtrain.api.own_process", str(task_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # an interrupt of the terminal reaches the process once: from us
        )
        was_interrupted = _watch(process, output or sys.stdout)
        return cast(Result, _read_outcome(outcome_path, process.returncode, was_interrupted and not saves_on_stop))


def _environment() -> dict[str, str]:
    """Return the environment of a process that finds mmtrain, and whatever else this one can import."""
    folders = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), "PYTHONUNBUFFERED": "1"}


def _watch(process: "subprocess.Popen[bytes]", output: TextIO) -> bool:
    """Pass interrupts on and wait for the process; return whether there was one."""
    assert process.stdin is not None
    assert process.stdout is not None
    reader = threading.Thread(target=_copy_lines, args=(process.stdout, output), name="mmtrain-output", daemon=True)
    was_interrupted = False
    try:
        reader.start()
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                was_interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        process.stdin.close()  # whatever ended the wait: the process stops when its input ends
        process.wait()
    reader.join(_OUTPUT_GRACE_S)
    return was_interrupted


def _copy_lines(source: IO[bytes], target: TextIO) -> None:
    """Copy lines until the last process that holds the pipe has ended; a closed target does not stop the copying."""
    with source:
        for line in source:
            with contextlib.suppress(OSError, ValueError):
                target.write(line.decode("utf-8", errors="replace"))
                target.flush()


def _read_outcome(path: Path, exit_code: int, is_interrupt: bool) -> object:
    """Return the result; raise what the process raised, or what its exit code says."""
    try:
        outcome = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        outcome = None
    if is_interrupt and not (outcome is not None and exit_code == 0):
        raise KeyboardInterrupt
    if isinstance(outcome, _Failure):
        raise outcome.to_error()
    if outcome is not None:
        return outcome[0]
    if exit_code == StoppedAndSaved.exit_code:
        raise StoppedAndSaved("stopped before the first step, with nothing to save; start it again as it was started")
    ended = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
    raise RunError(f"the process {ended} without a result; what it printed is above")


def main() -> None:
    """Run the task in the file that the command line names, and write its result or its error where the task says."""
    task: _Task = pickle.loads(Path(sys.argv[1]).read_bytes())
    if task.saves_on_stop:
        from mmtrain.runtime.resilience.signals import end_on_stop_signals

        end_on_stop_signals()
    # By its number: ranks that are forked must not inherit the lock of a file object that a thread is reading.
    threading.Thread(target=_stop_at_end_of, args=(os.dup(0),), name="mmtrain-parent", daemon=True).start()
    from mmtrain.machine_limits import drop_thread_binding

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line does
    remark = drop_thread_binding()
    if remark is not None:
        print(f"mmtrain: {remark}", file=sys.stderr)
    exit_code, outcome = _run(task)
    if outcome is not None:
        task.outcome_path.write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a library's threads must not keep the process alive


def _run(task: _Task) -> "tuple[int, tuple[object] | _Failure | None]":
    """Return the exit code, and the result or the failure; neither after an interrupt."""
    from mmtrain.system_errors import system_errors_named

    try:
        with system_errors_named():
            return 0, (task.function(*task.arguments),)
    except MmtrainError as error:
        return error.exit_code, _Failure(type(error), str(error), dict(error.__dict__))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, None
    except Exception as error:
        traceback.print_exc()
        return 1, _Failure(RunError, f"{type(error).__name__}: {error}; its traceback is above")


def _stop_at_end_of(descriptor: int) -> None:
    """Ask this process to stop when the one that reads its result is gone."""
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # By its name: what `__main__` pickles, no other process can read.
    from mmtrain.api.own_process import main as main_of_module

    main_of_module()
