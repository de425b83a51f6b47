"""Start the ranks of a run on this machine, pass stop signals on to them, and end them together.

Ranks whose launcher is gone stop: nobody would end or restart them, and a new start of the run would find them alive.
"""

import contextlib
import gc
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Self

import torch

from mmtrain.errors import (
    EndedBySignal,
    LaunchError,
    MmtrainError,
    RankDied,
    RunError,
    StoppedAndSaved,
    UserError,
)
from mmtrain.runtime.rendezvous import ranks_text
from mmtrain.runtime.resilience.failures import is_lost_peer
from mmtrain.runtime.resilience.lost_output import ignore_lost_output
from mmtrain.runtime.resilience.signals import STOP_SIGNALS, SignalPipe, stopped_early_text
from mmtrain.runtime.world import Address, forget_launcher, leave_own_world
from mmtrain.system_errors import system_errors_named

PEER_FAILURE_GRACE_S = 3.0  # in which ranks may end by themselves, and report why, after a peer failed
PEER_STOP_GRACE_S = 5.0  # the same, after a peer has stopped and saved

# Below those that Linux gives to connections, of which a run opens many while its ranks have yet to meet.
_PORTS = range(20_000, 32_768)
_MAX_PORTS_TRIED = 100
LAUNCHER_POLL_S = 1.0
END_POLL_S = 0.5  # between two questions whether ranks must end because of ranks of another machine


@dataclass(frozen=True)
class _RankExit:
    """How a rank ended that did not succeed."""

    rank: int
    code: int
    message: str
    secondary: bool  # it only lost its connection to another rank, or torch ended it for that


def launch_local(
    num_ranks: int,
    target: Callable[[Address], None],
    saves_on_stop: bool = False,
    end_limit_s: float | None = None,
) -> None:
    """Run `target` in `num_ranks` processes of this machine and wait for all of them; see `launch_here`."""
    launch_here(local_addresses(num_ranks), target, saves_on_stop, end_limit_s=end_limit_s)


def local_addresses(num_ranks: int) -> list[Address]:
    """Return the addresses of ranks that all run on this machine, and meet at a free port of it."""
    port = free_port()
    return [Address(rank, num_ranks, rank, "127.0.0.1", port, "mmtrain") for rank in range(num_ranks)]


def launch_here(
    addresses: Sequence[Address],
    target: Callable[[Address], None],
    saves_on_stop: bool = False,
    must_end: Callable[[], bool] | None = None,
    end_limit_s: float | None = None,
) -> None:
    """Run `target` as these ranks, in a process of this machine for each, and wait for all of them.

    On CPU the ranks are forked, so that torch and Megatron are imported once; CUDA does not survive a fork, and a
    program that calls this may have chosen to spawn (`multiprocessing.set_start_method`). When a rank fails the others
    are ended and the first failure is raised here, so that the user reads one message. Stop signals are passed on, and
    the ranks get all the time they need to save; a second Ctrl-C ends them at once.

    That holds for a `target` that listens to stop signals and saves (`saves_on_stop`), also if this process is killed:
    then its ranks get SIGTERM. The ranks of any other target end at once.

    must_end: asked from time to time; True where ranks of other machines have failed, which the ranks here may wait
    for in vain. Then they are ended, and RunError is raised.

    end_limit_s: after a rank has succeeded, the others may run so much longer. Those that do not end are killed; their
    work is done with that of the one that succeeded. None: any time.
    """
    # Two calls rather than a computed name: the type of a context depends on its name.
    must_spawn = torch.cuda.is_available() or mp.get_start_method(allow_none=True) == "spawn"
    context = mp.get_context("spawn") if must_spawn else mp.get_context("fork")
    ranks: dict[BaseProcess, Connection] = {}
    leave_own_world()
    with SignalPipe() as signals:
        # Blocked, a signal that comes before a rank listens stays pending; its default action would end the rank.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            # A process group that this process has left ends its threads when it is collected. They do not survive a
            # fork, so a rank that collected it would wait for them for ever: ranks collect nothing made before them.
            gc.freeze()
            for address in addresses:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(target, address, sender, saves_on_stop), name=f"rank {address.rank}"
                )
                process.start()
                sender.close()
                ranks[process] = receiver
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _watch(ranks, [address.rank for address in addresses], signals, saves_on_stop, must_end, end_limit_s)
        finally:
            gc.unfreeze()
            _kill(ranks)


def _rank_main(target: Callable[[Address], None], address: Address, report: Connection, saves_on_stop: bool) -> None:
    signal.set_wakeup_fd(-1)  # after a fork this would still be the launcher's
    forget_launcher()
    ignore_lost_output()
    for number in STOP_SIGNALS:
        # Ctrl-C reaches the whole process group, but the launcher passes it on. What nohup ignores stays ignored.
        is_ignored = number == signal.SIGINT or signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    when_orphaned = partial(stop_orphan, address.rank) if saves_on_stop else partial(os._exit, 1)
    threading.Thread(target=_wait_for_launcher, args=(when_orphaned,), name="mmtrain-parent", daemon=True).start()
    code = 0
    try:
        with system_errors_named():
            target(address)
    except MmtrainError as e:
        code = e.exit_code
        report.send((code, str(e), False))
    except BaseException as e:
        code = 1
        print(f"rank {address.rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        report.send((code, f"rank {address.rank} failed: {type(e).__name__}: {e}", is_lost_peer(e)))
    sys.stdout.flush()
    sys.stderr.flush()
    # A library's threads must not keep a failed rank alive while its peers wait for it.
    os._exit(code)


def _wait_for_launcher(when_orphaned: Callable[[], None]) -> None:
    """Call `when_orphaned` when the launcher ends: a launcher that was killed cannot end its ranks."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    when_orphaned()


def _watch(
    ranks: dict[BaseProcess, Connection],
    numbers: Sequence[int],
    signals: SignalPipe,
    saves_on_stop: bool,
    must_end: Callable[[], bool] | None,
    end_limit_s: float | None,
) -> None:
    """Wait until all ranks have succeeded; raise the failure that caused the others, or the signal that ended them.

    numbers: of the ranks, in their order.
    """
    running = {process.sentinel: index for index, process in enumerate(ranks)}
    processes, reports = list(ranks), list(ranks.values())
    exits: list[_RankExit] = []
    deadline_s: float | None = None  # none until a rank has failed, or has succeeded where there is a limit
    num_interrupts = 0
    while running:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        if must_end is not None:
            left_s = END_POLL_S if left_s is None else min(left_s, END_POLL_S)
        ready = wait([*running, signals.reader], left_s)
        if signals.reader in ready:
            received = signals.read()
            if not saves_on_stop:
                raise EndedBySignal(f"ended by {received[0].name}")
            num_interrupts += received.count(signal.SIGINT)
            if num_interrupts > 1:
                raise RunError("interrupted twice: all ranks were ended without saving")
            print(
                "mmtrain: stopping after this step, then saving (before the first step, at once); Ctrl-C ends at once",
                file=sys.stderr,
                flush=True,
            )
            _send_signal([process for process in processes if process.is_alive()], signal.SIGTERM)
        for sentinel in [sentinel for sentinel in running if sentinel in ready]:
            index = running.pop(sentinel)
            processes[index].join()
            if not processes[index].exitcode and end_limit_s is not None and deadline_s is None:
                deadline_s = time.monotonic() + end_limit_s
            if processes[index].exitcode:
                rank_exit = _read_exit(numbers[index], processes[index], reports[index])
                exits.append(rank_exit)
                has_stopped = rank_exit.code == StoppedAndSaved.exit_code
                grace_end_s = time.monotonic() + (PEER_STOP_GRACE_S if has_stopped else PEER_FAILURE_GRACE_S)
                deadline_s = grace_end_s if deadline_s is None else min(deadline_s, grace_end_s)
        if not ready and must_end is not None and must_end():
            break
    if exits:
        raise _first_failure(exits)
    if running and deadline_s is None:
        raise RunError("ended with ranks of other processes, one of which has failed")
    if running:
        names = ranks_text(sorted(numbers[index] for index in running.values()))
        text = f"{names} did not end within {end_limit_s:g} s after the first rank, whose work is done with theirs"
        print(f"mmtrain: {text}: stopped by the system, or hanging; killed", file=sys.stderr, flush=True)


def _read_exit(rank: int, process: BaseProcess, report: Connection) -> _RankExit:
    """Read a rank's own report, or else its exit code."""
    try:
        code, message, secondary = report.recv()
        return _RankExit(rank, code, message, secondary)
    except EOFError:  # it could not report: killed from outside, or out of memory
        code = process.exitcode or 1
        if code == StoppedAndSaved.exit_code:  # it ended at once, without its main thread
            return _RankExit(rank, code, stopped_early_text("a signal"), secondary=False)
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        # NCCL's watchdog ends a rank by SIGABRT when a peer is gone or a collective takes too long.
        return _RankExit(rank, code, f"rank {rank} {reason}", secondary=code == -signal.SIGABRT)


def _first_failure(exits: list[_RankExit]) -> MmtrainError:
    """Return the failure that caused the others: a rank that was killed, else the first that did not lose a peer.

    Of ranks that all look like victims, one that was killed comes first.
    """
    failed = [rank_exit for rank_exit in exits if rank_exit.code != StoppedAndSaved.exit_code]
    stopped = [rank_exit for rank_exit in exits if rank_exit.code == StoppedAndSaved.exit_code]
    # A rank that was about to start the first step loses those that ended at once.
    if stopped and all(rank_exit.secondary for rank_exit in failed):
        return StoppedAndSaved(stopped[0].message)
    cause = min(failed, key=lambda rank_exit: (rank_exit.secondary, rank_exit.code >= 0))
    secondary = sorted(rank_exit.rank for rank_exit in failed if rank_exit.secondary and rank_exit is not cause)
    message = cause.message
    if secondary:
        ranks = "rank" if len(secondary) == 1 else "ranks"
        message += f"; secondary: {ranks} {', '.join(map(str, secondary))} lost a peer"
    if cause.code < 0:
        return RankDied(message, cause.rank)
    error_type = UserError if cause.code == UserError.exit_code else RunError
    return error_type(message)


def _send_signal(processes: Iterable[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, number)


def _kill(ranks: Iterable[BaseProcess]) -> None:
    """Kill the processes that still run: a rank that was asked to end would wait for a dead peer's step."""
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()


def free_port() -> int:
    """Return a port on which no process listens, and which no connection takes before a rank listens there."""
    for port in random.SystemRandom().sample(_PORTS, _MAX_PORTS_TRIED):
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port
    raise LaunchError(
        f"no port to meet at: {_MAX_PORTS_TRIED} of the ports {_PORTS.start} to {_PORTS.stop - 1} are taken; end what "
        "listens there, or start the ranks with torchrun --master-port"
    )


class LauncherMonitor:
    """Sends this process SIGTERM when the process that started it has ended, so that the run saves and stops.

    It runs in a thread, and notices that the parent of this process changed. The system's own notice of a parent's
    death (PR_SET_PDEATHSIG) must be asked for before the parent dies, and is lost when the parent's thread ends.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._launcher_pid = rank, os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mmtrain-launcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LAUNCHER_POLL_S):
            if os.getppid() != self._launcher_pid:
                stop_orphan(self._rank)
                return


def stop_orphan(rank: int) -> None:
    """Make this rank, whose launcher is gone, save and stop as after SIGTERM; so do the others with it."""
    with contextlib.suppress(OSError):  # the reader of this output may be gone too
        print(f"mmtrain: rank {rank}: its launcher is gone; stopping after this step, then saving", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def has_watching_launcher(address: Address, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank's parent stays as long as the run: torchrun's agent, or SLURM's step daemon.

    Anyone else may set torchrun's variables, start ranks in the background and leave.
    """
    return address.launcher == "slurm" or (address.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in env)
