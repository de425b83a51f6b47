"""Train on file systems that cannot sync or lock, as of FUSE and SMB: their answers come from a preloaded library."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.checkpoint import open_newest_good
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from tests.flow.runs import RECIPE

SHIM = """
#include <errno.h>
#include <stdlib.h>
static int fail(const char *name) { errno = atoi(getenv(name)); return -1; }
int fsync(int file) { return fail("SYNC_ERRNO"); }
int fdatasync(int file) { return fail("SYNC_ERRNO"); }
int flock(int file, int operation) { return fail("LOCK_ERRNO"); }
"""
ODD = [
    (errno.EINVAL, errno.ENOSYS),
    (errno.ENOSYS, errno.EPERM),
    (errno.EOPNOTSUPP, errno.EBADF),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that answers for the file system."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c"], cwd=folder, check=True)
    return folder / "shim.so"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate_demo(folder, seed=1, train=40, heldout=40)
    return folder


def train(data: Path, run_dir: Path, shim: Path, sync: int, lock: int) -> subprocess.CompletedProcess[str]:
    """Train two steps with a checkpoint after each, in a process of its own."""
    settings = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    settings += [f"data.tokenizer={data}/tokenizer.json", "train.steps=2", "train.checkpoint.every=1"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    environment = os.environ | {"LD_PRELOAD": str(shim), "SYNC_ERRNO": str(sync), "LOCK_ERRNO": str(lock)}
    command = [sys.executable, "-m", "mmtrain", "train", str(RECIPE), "--run-dir", str(run_dir), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "lock"), ODD)
def test_a_run_goes_on_where_files_cannot_be_synced_or_locked(
    data: Path, tmp_path: Path, shim: Path, sync: int, lock: int
) -> None:
    done = train(data, tmp_path / "run", shim, sync, lock)
    assert done.returncode == 0, done.stderr
    assert open_newest_good(tmp_path / "run" / CHECKPOINTS_FOLDER, on_bad=pytest.fail).step == 2


@pytest.mark.slow
def test_a_disk_that_fails_ends_the_run(data: Path, tmp_path: Path, shim: Path) -> None:
    done = train(data, tmp_path / "run", shim, errno.EIO, errno.ENOSYS)
    assert done.returncode == 1
    assert f"mmtrain: {tmp_path / 'run'}" in done.stderr
    assert "Input/output error; the disk or its server fails" in done.stderr
    assert "Traceback" not in done.stderr
