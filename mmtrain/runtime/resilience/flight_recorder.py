"""torch's Flight Recorder: which collectives and messages a rank posted last, and which of them are not done.

torch keeps the last 2,000 in a ring by itself (`TORCH_FR_BUFFER_SIZE`); only a hang writes them.
"""

import importlib
import threading
from pathlib import Path

from mmtrain.runtime.resilience.failures import FAILURES_FOLDER

FLIGHT_RECORDER_FOLDER = f"{FAILURES_FOLDER}/flight_recorder"
MAX_DUMP_S = 5.0  # in which the dump is on disk; locks of a communicator that hangs may be taken


def flight_recorder_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank, named as torch's reader `torchfrtrace FOLDER --prefix rank_` expects it."""
    return run_dir / FLIGHT_RECORDER_FOLDER / f"rank_{rank}"


class FlightRecorderDump:
    """Writes a rank's Flight Recorder from a thread of its own, so that a report need not wait for it."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = flight_recorder_path(run_dir, rank)
        self._thread = threading.Thread(target=self._write, name="mmtrain-flight-recorder", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the file, for a bounded time."""
        self._thread.join(MAX_DUMP_S)

    def _write(self) -> None:
        c10d = importlib.import_module("torch._C._distributed_c10d")
        dump = getattr(c10d, "_dump_fr_trace", None)  # torch's own name may change
        if dump is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_name(f"draft-{self._path.name}")  # no prefix that the reader takes
            draft.write_bytes(dump())
            draft.replace(self._path)
        except (OSError, RuntimeError):  # a full disk, or a build without recorder: the report says enough
            return
