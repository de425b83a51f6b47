"""Run a command in a process that has imported torch already: importing takes longer than most commands."""

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import fork_ranks


def run_forked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `mmtrain` with these arguments in a forked process."""
    [done] = fork_ranks(1, main_here, folder, arguments)
    assert isinstance(done, subprocess.CompletedProcess)
    return done


def main_here(
    _rank: int, _size: int, scratch: Path, folder: Path, arguments: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Run `mmtrain` with these arguments in this process, which `fork_ranks` started."""
    from mmtrain.cli import main

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    sys.argv = ["mmtrain", *arguments]
    # Of the file descriptors, so that what the command's own processes print is captured too.
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(scratch / name, os.O_CREAT | os.O_WRONLY), number)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = ((scratch / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)
