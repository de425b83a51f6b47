"""What this machine allows for reading remote files. It stands in the environment, since machines differ."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmtrain.errors import DataError

CACHE_FOLDER_VARIABLE = "MMTRAIN_REMOTE_CACHE"
CACHE_SIZE_VARIABLE = "MMTRAIN_REMOTE_CACHE_GIB"
TIMEOUT_VARIABLE = "MMTRAIN_REMOTE_TIMEOUT_S"
ATTEMPTS_VARIABLE = "MMTRAIN_REMOTE_ATTEMPTS"
DEFAULT_CACHE_GIB = 50.0
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_ATTEMPTS = 6


@dataclass(frozen=True)
class RemoteSettings:
    """Where pieces of remote files are kept, and how patient reading is."""

    cache_folder: Path
    cache_bytes: int
    timeout_s: float = DEFAULT_TIMEOUT_S  # of one request, which is for at most 16 MiB
    attempts: int = DEFAULT_ATTEMPTS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "RemoteSettings":
        """Read the variables `MMTRAIN_REMOTE_*`. Raises `DataError` for values that are no positive numbers."""
        home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(
            Path(environment.get(CACHE_FOLDER_VARIABLE) or Path(home) / "mmtrain" / "remote"),
            int(_positive(environment, CACHE_SIZE_VARIABLE, DEFAULT_CACHE_GIB) * 2**30),
            _positive(environment, TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S),
            max(1, int(_positive(environment, ATTEMPTS_VARIABLE, DEFAULT_ATTEMPTS))),
        )


def remote_index_folder() -> Path:
    """Return where indexes of remote files are cached. Raises `DataError` as `RemoteSettings.from_environment`."""
    return RemoteSettings.from_environment().cache_folder / "indexes"


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise DataError(f"environment variable {name}: found {text!r}, allowed: a number above 0")
    return value
