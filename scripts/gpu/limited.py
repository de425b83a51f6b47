"""Run commands with a limit of time each, and end them whole when it is over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS_FOLDER = "compiled-kernels"
POLL_S = 0.2
END_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_RUNNING: "set[subprocess.Popen[bytes]]" = set()


class Deadline:
    """The moment at which a command, or all of them, must have ended."""

    def __init__(self, seconds: float) -> None:
        """End in `seconds` from now."""
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end_s - time.monotonic())

    def end_now(self) -> None:
        """Leave no time."""
        self._end_s = time.monotonic()


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    code: int | None  # None: its time was over
    output: str  # of both streams
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def cpu_only() -> dict[str, str]:
    """Return the environment in which torch sees no GPU."""
    return {"CUDA_VISIBLE_DEVICES": ""}


def kernel_cache(folder: Path) -> dict[str, str]:
    """Return the environment in which processes share the kernels that FlashAttention-4 compiles at their first use.

    Compiling takes seconds for each mask, width and direction, and every case runs in a process of its own.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder.absolute() / KERNELS_FOLDER),
    }


def python_command(*arguments: object) -> list[str]:
    """Return a command that runs this interpreter with `arguments`."""
    return [sys.executable, *map(str, arguments)]


def run_limited(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    env: Mapping[str, str] | None = None,
    stop_when: Callable[[], bool] | None = None,
    stdout: Path | None = None,
) -> CommandResult:
    """Run a command in the root of the tree, in a process group of its own; its output goes to `log`.

    It gets SIGTERM once `stop_when` is true. stdout: a file for this stream alone, instead of `log`.
    """
    started_s = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    full_env = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    code: int | None = None
    files = (stdout or log, log)
    for file in files:
        file.write_bytes(b"")
    # Both append, so that neither writes over the other in a file that they share.
    with files[0].open("ab") as output, files[1].open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, cwd=ROOT, env=full_env, start_new_session=True
        )
        _RUNNING.add(process)
        try:
            if stop_when is not None and _happens(stop_when, process, limit_s):
                process.terminate()
            code = process.wait(max(0.1, limit_s - (time.monotonic() - started_s)))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(process)
            _RUNNING.discard(process)
    return CommandResult(code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - started_s)


def end_running() -> None:
    """End what other threads run, as if its time were over."""
    for process in list(_RUNNING):
        _end_group(process)


def _happens(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Return whether the condition becomes true while the process runs. Raises TimeoutExpired."""
    deadline = Deadline(limit_s)
    while process.poll() is None:
        if condition():
            return True
        if not deadline.left_s:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        time.sleep(POLL_S)
    return False


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the process and its children, which share its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_GRACE_S)
