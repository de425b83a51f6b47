"""Explain why a run failed: each rank writes a report into `failures/`; together they name the rank that failed first.

When one rank fails the others lose their connection to it, or wait for it in vain, and often it is one of those that a
user sees first. Reports are files because the ranks can no longer communicate, and torchrun hides exit codes.
"""

import contextlib
import json
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from mmtrain.durable_files import write_whole
from mmtrain.errors import FolderTaken, RunError, StoppedAndSaved
from mmtrain.program import Recv, Send, action_to_text
from mmtrain.redaction import process_redactor
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.rendezvous import ranks_text
from mmtrain.runtime.resilience.device_errors import describe_device_error
from mmtrain.runtime.resilience.signals import stopped_early_text
from mmtrain.runtime.run_folder import read_run_state, write_run_state
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.world import Address

FAILURES_FOLDER = "failures"
FailureKind = Literal["error", "lost peer", "hang", "stopped"]  # stopped: by a signal, with nothing to save
# How long a rank waits for the reports of the others. A rank whose report comes later is said to be dead, so this
# outlasts a busy processor and a slow file server.
REPORT_COLLECTION_S = 5.0
REPORT_POLL_S = 0.05
_LIFE_SUFFIX = ".alive"
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
)
# Of NCCL: what fails on this rank alone, or for a reason that no lost peer explains.
_OWN_FAULT_TEXTS = (
    "out of memory",
    "unhandled cuda error",
    "invalid argument",
    "invalid usage",
    "Duplicate GPU",
)


@dataclass(frozen=True)
class Failure:
    """What one rank was doing when it failed, or when the run hung."""

    rank: int
    kind: FailureKind
    step: int | None
    doing: str  # action in the program's text form, or a phase
    stuck_s: float  # since its last progress
    is_collective: bool = False  # what it does ends only when other ranks do it too
    peer: int | None = None  # the rank it waits for
    missing: str | None = None  # the action of `peer` that it waits for
    error: str | None = None
    stragglers: str | None = None  # ranks that were slow before
    files: str | None = None  # the file of a checkpoint that it reads or writes, and how fast that went

    def to_text(self) -> str:
        """Return one line for the user."""
        where = f"rank {self.rank}" + (f", step {self.step}" if self.step is not None else "") + f", in `{self.doing}`"
        if self.kind != "hang":
            return f"{where}: {self.error}"
        if self.files:
            return f"{where}: {self.files}"
        if self.missing:
            return f"{where}: waited {self.stuck_s:.0f} s for `{self.missing}` on rank {self.peer}, which never ran"
        if self.is_collective:
            return f"{where}: waited {self.stuck_s:.0f} s for other ranks to take part"
        return f"{where}: made no progress for {self.stuck_s:.0f} s"


def describe_failure(rank: int, activity: Activity, kind: FailureKind, error: str | None = None) -> Failure:
    """Describe what this rank is doing now."""
    _, message = activity.reached()
    peer: int | None = None
    missing: str | None = None
    if message is not None:
        peer = message.peer
        opposite = Send if isinstance(message, Recv) else Recv  # what we receive the peer sends, and vice versa
        missing = action_to_text(opposite(message.edge, message.src, message.dst, rank, message.payload))
    return Failure(
        rank=rank,
        kind=kind,
        step=activity.step,
        doing=activity.text(),
        stuck_s=activity.stuck_s(),
        is_collective=activity.is_collective,
        peer=peer,
        missing=missing,
        error=error,
        stragglers=activity.stragglers,
        files=activity.files.to_text() if activity.in_files else None,
    )


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write this rank's report where the others find it."""
    path = _path(run_dir, failure.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, process_redactor()(json.dumps(asdict(failure))) + "\n")


def read_failures(run_dir: Path) -> list[Failure]:
    """Return all reports so far that can be read, in the order in which they were written."""
    reports: list[tuple[int, Failure]] = []
    for path in (run_dir / FAILURES_FOLDER).glob("rank-*.json"):
        # A rank whose report is damaged or was removed meanwhile counts as silent, which is what is known of it.
        with contextlib.suppress(OSError, ValueError, TypeError):
            reports.append((path.stat().st_mtime_ns, Failure(**json.loads(path.read_bytes()))))
    return [failure for _, failure in sorted(reports, key=lambda report: report[0])]


def clear_failures(run_dir: Path) -> None:
    """Remove the reports of an earlier attempt."""
    shutil.rmtree(run_dir / FAILURES_FOLDER, ignore_errors=True)


def explain_failures(
    failures: Sequence[Failure], world_size: int, hosts: Sequence[str] = (), living: Collection[int] = ()
) -> str:
    """Name the failure that caused the others, then what followed on other ranks.

    An error comes before a lost connection. Where no rank has an error of its own, the cause is a rank without a
    report: it is dead, or, in a run that hangs, may be stopped by the system; else a rank that waits for no other, of
    several the one stuck for longest. `hosts` are those of all ranks; `living` ranks have shown that they run.
    """
    errors = [f for f in failures if f.kind == "error"]
    silent_ranks = sorted(set(range(world_size)) - {f.rank for f in failures} - set(living))
    if errors:
        cause = errors[0]
    elif silent_ranks and any(f.kind == "hang" for f in failures):
        lead = f"rank {silent_ranks[0]} left no report: it is dead, or stopped by the system"
        return _explanation(lead, None, failures)
    elif silent_ranks:
        of_hosts = f" on {', '.join(sorted({hosts[rank] for rank in silent_ranks}))}" if hosts else ""
        is_gone = "is gone" if len(silent_ranks) == 1 else "are gone"
        lead = f"{ranks_text(silent_ranks)}{of_hosts} {is_gone} without a report: killed, or the node is lost"
        return _explanation(lead, None, failures)
    else:
        waits_for_none = [f for f in failures if f.kind == "hang" and f.missing is None and not f.is_collective]
        cause = max(waits_for_none or failures, key=lambda f: f.stuck_s)
    return _explanation(cause.to_text(), cause, failures)


def collect_failures(
    run_dir: Path, world_size: int, limit_s: float, wait: Callable[[float], object] = time.sleep
) -> list[Failure]:
    """Return the reports of all ranks, or of those that wrote one in time; the first to be written first."""
    deadline = time.monotonic() + limit_s
    failures = read_failures(run_dir)
    while len(failures) < world_size and time.monotonic() < deadline:
        wait(REPORT_POLL_S)
        failures = read_failures(run_dir)
    return failures


def show_life(run_dir: Path, rank: int) -> None:
    """Show the ranks that look for one that is gone that this rank runs: it may not need its peers for a while."""
    with contextlib.suppress(OSError):
        _path(run_dir, rank).with_suffix(_LIFE_SUFFIX).touch()


def read_living(run_dir: Path) -> set[int]:
    """Return the ranks that have shown that they run."""
    return {int(path.stem.removeprefix("rank-")) for path in (run_dir / FAILURES_FOLDER).glob(f"rank-*{_LIFE_SUFFIX}")}


def record_early_stop(claim: FolderClaim, rank: int, activity: Activity) -> None:
    """Write that a signal stops this rank before the first step: the others end too, and none is to blame.

    Where another rank has failed, the launcher sends that signal, and the run's state stays what that rank wrote.
    """
    if not claim.is_held():
        return
    with contextlib.suppress(OSError):  # a full disk must not keep this rank from ending
        has_failed = any(failure.kind != "stopped" for failure in read_failures(claim.run_dir))
        write_failure(claim.run_dir, describe_failure(rank, activity, "stopped", "a stop signal"))
        if not has_failed:
            write_run_state(claim.run_dir, "stopped")


def is_stopped_early(run_dir: Path) -> bool:
    """Return whether a rank has written that a signal stopped it before the first step."""
    return any(failure.kind == "stopped" for failure in read_failures(run_dir))


@contextlib.contextmanager
def report_failures(claim: FolderClaim, rank: int, activity: Activity, hosts: Sequence[str] = ()) -> Iterator[None]:
    """Write a report, and the run's state, when the body of `with` fails on this rank.

    Nothing is written into a folder that another run has taken: its ranks would read the report as one of their own.
    With the `hosts` of all ranks, a rank that has lost a peer finds out which one is gone, and raises RunError that
    names it: for ranks whose launcher does not.
    """
    run_dir = claim.run_dir
    try:
        yield
    except (StoppedAndSaved, FolderTaken):
        raise
    except Exception as error:
        if not claim.is_held():
            raise
        of_device = describe_device_error(error, rank)
        kind: FailureKind = "lost peer" if of_device is None and is_lost_peer(error) else "error"
        text = process_redactor()(of_device or f"{type(error).__name__}: {error}")
        # A full disk or a lost mount must not hide the failure itself.
        with contextlib.suppress(OSError):
            if kind == "lost peer" and is_stopped_early(run_dir):
                raise StoppedAndSaved(stopped_early_text("a signal to another rank")) from error
            write_failure(run_dir, describe_failure(rank, activity, kind, text))
            stacks_path(run_dir, rank).write_text(process_redactor()(traceback.format_exc()), encoding="utf-8")
            if kind == "error" or read_run_state(run_dir).get("status") != "failed":
                write_run_state(run_dir, "failed", error=f"rank {rank}: {text}")
            if kind == "lost peer" and hosts:
                raise _explained_loss(run_dir, rank, hosts) from error
        if of_device is not None:
            raise RunError(of_device) from error
        raise


def _explained_loss(run_dir: Path, rank: int, hosts: Sequence[str]) -> RunError | StoppedAndSaved:
    """Return what a rank that lost a peer raises when the others have reported; one rank speaks for all."""
    failures = collect_failures(run_dir, len(hosts), REPORT_COLLECTION_S)
    if any(failure.kind == "stopped" for failure in failures):
        return StoppedAndSaved(stopped_early_text("a signal to another rank"))
    explanation = explain_failures(failures, len(hosts), hosts, read_living(run_dir))
    if rank == min((failure.rank for failure in failures), default=rank):
        write_run_state(run_dir, "failed", error=explanation)
        return RunError(explanation)
    return RunError(explanation.splitlines()[0])


@contextlib.contextmanager
def lost_peers_named(address: Address) -> Iterator[None]:
    """Raise RunError in place of what torch says of a lost connection where no folder holds reports of all ranks.

    Ranks of our own launcher raise it as it is: the launcher sees which rank has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if address.launcher == "mmtrain" or not is_lost_peer(error):
            raise
        raise RunError(
            f"rank {address.rank} of {address.world_size} lost the connection to another rank, which has ended or "
            f"cannot be reached: look for that rank's own message ({str(error).splitlines()[0]})"
        ) from error


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error says no more than that another rank is gone."""
    if isinstance(error, dist.DistBackendError) and any(text in str(error) for text in _OWN_FAULT_TEXTS):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER_TEXTS)


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return _path(run_dir, rank).with_suffix(".stacks.txt")


def _explanation(lead: str, cause: Failure | None, failures: Sequence[Failure]) -> str:
    by_rank = sorted(failures, key=lambda f: f.rank)
    lines = [lead, *(f"  secondary: {f.to_text()}" for f in by_rank if f is not cause)]
    stragglers = next((f.stragglers for f in failures if f.stragglers), None)
    if stragglers is not None:
        lines.append(f"  before that: {stragglers}")
    return "\n".join(lines)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FAILURES_FOLDER / f"rank-{rank}.json"
