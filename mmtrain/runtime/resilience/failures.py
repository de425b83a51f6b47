"""Why a run failed: each rank leaves a report in `failures/`, and together they name the rank where it began.

When one rank fails the others lose their connection to it, or wait for it in vain; what a user sees first in the
output is often one of those. Reports are files because the ranks can no longer talk, and torchrun hides exit codes.
"""

import contextlib
import json
import shutil
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from mmtrain.errors import StoppedAndSaved
from mmtrain.program import Recv, Send, action_to_text
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.run_state import read_run_state, write_run_state

FAILURES_FOLDER = "failures"
FailureKind = Literal["error", "lost peer", "hang"]
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket closed")


@dataclass(frozen=True)
class Failure:
    """What one rank was doing when it failed, or when nothing moved any more."""

    rank: int
    kind: FailureKind
    step: int | None
    doing: str  # action in the program's text form, or a phase
    stuck_s: float  # since anything began on this rank
    together: bool = False  # what it does ends only when other ranks do it too
    peer: int | None = None  # the rank it waits for
    missing: str | None = None  # the action of `peer` that it waits for
    error: str | None = None
    slow: str | None = None  # ranks that were slow before

    def to_text(self) -> str:
        """One line for people."""
        where = f"rank {self.rank}" + (f", step {self.step}" if self.step is not None else "") + f", in `{self.doing}`"
        if self.kind != "hang":
            return f"{where}: {self.error}"
        if self.missing:
            return (
                f"{where}: waited {self.stuck_s:.0f} s for `{self.missing}` on rank {self.peer}, which never happened"
            )
        if self.together:
            return f"{where}: waited {self.stuck_s:.0f} s for other ranks to take part"
        return f"{where}: did not come back for {self.stuck_s:.0f} s"


def describe_failure(rank: int, activity: Activity, kind: FailureKind, error: str | None = None) -> Failure:
    """Describe what this rank is doing now."""
    waiting, peer, missing = activity.waiting, None, None
    if waiting is not None:
        # The other end of the message: what we receive the peer sends, and the other way round.
        other = Send if isinstance(waiting, Recv) else Recv
        peer = waiting.peer
        missing = action_to_text(other(waiting.edge, waiting.src, waiting.dst, rank, waiting.payload))
    return Failure(
        rank,
        kind,
        activity.step,
        activity.text(),
        activity.stuck_s(),
        activity.is_collective,
        peer,
        missing,
        error,
        activity.stragglers,
    )


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Leave this rank's report where the others find it."""
    path = _path(run_dir, failure.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(failure)) + "\n", encoding="utf-8")
    draft.replace(path)


def read_failures(run_dir: Path) -> list[Failure]:
    """All reports so far, in the order in which they were made."""
    paths = sorted((run_dir / FAILURES_FOLDER).glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def clear_failures(run_dir: Path) -> None:
    """Forget the reports of an earlier attempt."""
    shutil.rmtree(run_dir / FAILURES_FOLDER, ignore_errors=True)


def explain_failures(failures: Sequence[Failure], world_size: int) -> str:
    """Say where it began, and then what followed on other ranks.

    An error of its own comes before a lost connection. Where all hang, it is the rank that left no report (it is
    dead, or stopped by the system); else one that waits for nobody; of several the one stuck for longest.
    """
    errors = [f for f in failures if f.kind == "error"]
    silent = sorted(set(range(world_size)) - {f.rank for f in failures})
    if errors:
        first = errors[0]
    elif silent and any(f.kind == "hang" for f in failures):
        lead = f"rank {silent[0]} left no report: it is dead, or stopped by the system"
        return _joined(lead, None, failures)
    else:
        busy = [f for f in failures if f.kind == "hang" and f.missing is None and not f.together]
        first = max(busy or failures, key=lambda f: f.stuck_s)
    return _joined(first.to_text(), first, failures)


@contextlib.contextmanager
def report_failures(run_dir: Path, rank: int, activity: Activity) -> Iterator[None]:
    """Leave a report, and the run's state, when what is inside fails on this rank."""
    try:
        yield
    except StoppedAndSaved:
        raise
    except Exception as error:
        kind: FailureKind = "lost peer" if is_lost_peer(error) else "error"
        text = f"{type(error).__name__}: {error}"
        # A full disk or a lost mount must not hide the failure itself.
        with contextlib.suppress(OSError):
            write_failure(run_dir, describe_failure(rank, activity, kind, text))
            stacks_path(run_dir, rank).write_text(traceback.format_exc(), encoding="utf-8")
            if kind == "error" or read_run_state(run_dir).get("status") != "failed":
                write_run_state(run_dir, "failed", error=f"rank {rank}: {text}")
        raise


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error says no more than that another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's stacks go."""
    return _path(run_dir, rank).with_suffix(".stacks.txt")


def _joined(lead: str, first: Failure | None, failures: Sequence[Failure]) -> str:
    followed = "".join(
        f"\n  secondary: {f.to_text()}" for f in sorted(failures, key=lambda f: f.rank) if f is not first
    )
    slow = next((f"\n  before that: {f.slow}" for f in failures if f.slow), "")
    return lead + followed + slow


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FAILURES_FOLDER / f"rank-{rank}.json"
