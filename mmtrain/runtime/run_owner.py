"""`run.lock`: which process owns the folder of a run; `resilience.folder_lock` takes ownership and gives it back."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mmtrain.errors import FolderTaken

LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one machine."""

    pid: int
    start: str  # tells it from a later one with the same pid


@dataclass(frozen=True)
class FolderOwner:
    """The content of `run.lock`: the process that owns the folder, or owned it last."""

    run_id: str  # stays the same when the run is resumed; drafts of checkpoints carry it
    claim_id: str  # of one start of the run
    host: str
    machine: str  # one boot of one machine or container: where `pid` and `process_start` can be looked up
    pid: int
    process_start: str  # tells the process from a later one with the same pid
    since: str  # for people
    released: bool = False
    # The launcher that starts the ranks again after a failure (--max-restarts), and keeps the folder meanwhile.
    launcher_pid: int | None = None
    launcher_start: str = ""

    @property
    def process(self) -> ProcessIdentity:
        """The owner itself."""
        return ProcessIdentity(self.pid, self.process_start)

    @property
    def launcher(self) -> ProcessIdentity | None:
        """The launcher that keeps the folder while no rank runs; None if nobody does."""
        return None if self.launcher_pid is None else ProcessIdentity(self.launcher_pid, self.launcher_start)

    def to_text(self) -> str:
        """Name the process for the user."""
        return f"process {self.pid} on {self.host}, since {self.since}"

    def to_bytes(self) -> bytes:
        """Return the content of `run.lock`."""
        return (json.dumps(asdict(self)) + "\n").encode()


@dataclass(frozen=True)
class FolderClaim:
    """One run's claim on its folder, known to all of its ranks."""

    run_dir: Path
    run_id: str
    claim_id: str

    def is_held(self) -> bool:
        """Return whether no other run has taken the folder since; a lock file that is gone or unreadable names none."""
        owner = read_owner(self.run_dir)
        return owner is None or owner.claim_id == self.claim_id

    def require(self) -> None:
        """Raise FolderTaken if another run has taken the folder."""
        owner = read_owner(self.run_dir)
        if owner is not None and owner.claim_id != self.claim_id:
            raise FolderTaken(
                f"{self.run_dir} was taken over by {owner.to_text()} (with --force-unlock, or while this run gave no "
                "sign of life). This run ends without saving, since only one may write there"
            )


def read_owner(run_dir: Path) -> FolderOwner | None:
    """Return the owner, or the last one; None where the lock file is missing, damaged or cannot be read."""
    try:
        return FolderOwner(**json.loads((run_dir / LOCK_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
