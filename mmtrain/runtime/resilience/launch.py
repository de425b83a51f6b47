"""Start the ranks of a run on this machine, pass stop signals on to them, and end them together."""

import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from mmtrain.errors import MmtrainError, RunError, StoppedAndSaved, UserError
from mmtrain.runtime.resilience.failures import is_lost_peer
from mmtrain.runtime.resilience.signals import STOP_SIGNALS, SignalPipe
from mmtrain.runtime.world import Address

PEER_FAILURE_GRACE_S = 3.0  # how long ranks may take to end by themselves, and say why, after a peer failed
PEER_STOP_GRACE_S = 5.0  # the same after a peer has stopped and saved


@dataclass(frozen=True)
class _RankExit:
    """How a rank ended badly."""

    rank: int
    code: int
    message: str
    secondary: bool  # it only lost another rank


def launch_local(num_ranks: int, target: Callable[[Address], None]) -> None:
    """Run `target` in `num_ranks` processes of this machine and wait for all of them.

    On CPU the ranks are forked, so that torch and Megatron are imported once; CUDA does not survive a fork. When a
    rank fails the others are ended, and the failure where it began is raised here: the user reads one message. Stop
    signals are passed on, and the ranks given all the time they need to save; a second Ctrl-C ends them at once.
    """
    # Two calls rather than a computed name: the type of a context depends on its name.
    context = mp.get_context("spawn") if torch.cuda.is_available() else mp.get_context("fork")
    port = free_port()
    ranks: dict[BaseProcess, Connection] = {}
    with SignalPipe() as signals:
        # A rank keeps a signal that comes before it listens; taken as a default, it would end the rank unsaved.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                address = Address(rank, num_ranks, rank, "127.0.0.1", port, "mmtrain")
                process = context.Process(target=_rank_main, args=(target, address, sender), name=f"rank {rank}")
                process.start()
                sender.close()
                ranks[process] = receiver
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _watch(ranks, signals)
        finally:
            _end(ranks)


def _rank_main(target: Callable[[Address], None], address: Address, report: Connection) -> None:
    signal.set_wakeup_fd(-1)  # after a fork this would still be the launcher's
    for number in STOP_SIGNALS:
        # Ctrl-C reaches the whole process group, and is the launcher's to pass on.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    threading.Thread(target=_follow_parent, name="mmtrain-parent", daemon=True).start()
    code = 0
    try:
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
    # Threads of a library must not keep a failed rank alive while its peers wait for it.
    os._exit(code)


def _follow_parent() -> None:
    """End with the launcher: killed, it could not end its ranks."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _watch(ranks: dict[BaseProcess, Connection], signals: SignalPipe) -> None:
    """Wait until all ranks ended well; raise what the rank reported where it began to go wrong."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    processes, reports = list(ranks), list(ranks.values())
    ends: list[_RankExit] = []
    deadline, interrupts = float("inf"), 0
    while running and (left := deadline - time.monotonic()) > 0:
        ready = wait([*running, signals.reader], None if left == float("inf") else left)
        if signals.reader in ready:
            asked = signals.read()
            interrupts += asked.count(signal.SIGINT)
            if interrupts > 1:
                raise RunError("interrupted twice: all ranks were ended without saving")
            print("mmtrain: stopping after this step, then saving; Ctrl-C ends at once", file=sys.stderr, flush=True)
            _signal([p for p in processes if p.is_alive()], signal.SIGTERM)
        for sentinel in [s for s in list(running) if s in ready]:
            rank = running.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode:
                ends.append(_how(rank, processes[rank], reports[rank]))
                deadline = min(
                    deadline, time.monotonic() + (PEER_STOP_GRACE_S if ends[-1].code == 75 else PEER_FAILURE_GRACE_S)
                )
    if ends:
        raise _verdict(ends)


def _how(rank: int, process: BaseProcess, report: Connection) -> _RankExit:
    """Take a rank's own words, or read them off its exit code."""
    try:
        code, message, secondary = report.recv()
        return _RankExit(rank, code, message, secondary)
    except EOFError:  # it could not report: killed from outside, or out of memory
        code = process.exitcode or 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _RankExit(rank, code, f"rank {rank} {how}", False)


def _verdict(ends: list[_RankExit]) -> MmtrainError:
    """The failure where it began: a rank that was killed cannot have lost another; then the first with a reason."""
    failed = [end for end in ends if end.code != StoppedAndSaved.exit_code]
    if not failed:
        return StoppedAndSaved(ends[0].message)
    first = min(failed, key=lambda end: (end.code >= 0, end.secondary))
    lost = sorted(end.rank for end in failed if end.secondary and end is not first)
    aside = f"; secondary: rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} lost a peer" if lost else ""
    kind = UserError if first.code == UserError.exit_code else RunError
    return kind(first.message + aside)


def _signal(processes: Iterable[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, number)


def _end(ranks: Iterable[BaseProcess]) -> None:
    """Kill what is left: asked to end, a rank would try to finish a step that a dead peer will not finish."""
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
