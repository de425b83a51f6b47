"""Start the ranks of a run on this machine, and end them together."""

import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from mmtrain.errors import MmtrainError, RunError, StoppedAndSaved, UserError
from mmtrain.runtime.world import Address

GRACE_S = 5.0  # how long ranks may take to end by themselves after a peer failed


def launch_local(num_ranks: int, target: Callable[[Address], None]) -> None:
    """Run `target` in `num_ranks` processes of this machine and wait for all of them.

    On CPU the ranks are forked, so that torch and Megatron are imported once; CUDA does not survive a fork. When a
    rank fails the others are ended, and the failure that came first is raised here: the user reads one message.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: no host name need resolve
    # Two calls rather than a computed name: the type of a context depends on its name.
    context = mp.get_context("spawn") if torch.cuda.is_available() else mp.get_context("fork")
    port = free_port()
    ranks: dict[BaseProcess, Connection] = {}
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        address = Address(rank, num_ranks, rank, "127.0.0.1", port, "mmtrain")
        process = context.Process(target=_rank_main, args=(target, address, sender), name=f"rank {rank}")
        process.start()
        sender.close()
        ranks[process] = receiver
    try:
        _watch(ranks)
    finally:
        _end(list(ranks))


def _rank_main(target: Callable[[Address], None], address: Address, report: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the launcher decides
    code = 0
    try:
        target(address)
    except MmtrainError as e:
        code = e.exit_code
        report.send((code, str(e)))
    except BaseException as e:
        code = 1
        print(f"rank {address.rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        report.send((code, f"rank {address.rank} failed: {type(e).__name__}: {e}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a library must not keep a failed rank alive while its peers wait for it.
    os._exit(code)


def _watch(ranks: dict[BaseProcess, Connection]) -> None:
    """Wait until all ranks ended well; raise what the first rank to fail reported."""
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = wait(list(running))
        for process in [running.pop(sentinel) for sentinel in list(running) if sentinel in ended]:
            process.join()
            if process.exitcode:
                raise _failure(process, ranks[process])


def _failure(process: BaseProcess, report: Connection) -> MmtrainError:
    try:
        code, message = report.recv()
    except EOFError:  # it could not report: killed from outside, or out of memory
        code = process.exitcode or 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RunError(f"{process.name} {how}; the other ranks were stopped")
    kinds: dict[int, type[MmtrainError]] = {2: UserError, 75: StoppedAndSaved}
    return kinds.get(code, RunError)(message)


def _end(ranks: list[BaseProcess]) -> None:
    """Ask the ranks that still run to end, wait, then kill what is left."""
    deadline = time.monotonic() + GRACE_S
    for process in ranks:
        if process.is_alive():
            process.terminate()
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
