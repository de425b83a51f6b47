"""Hidden drafts of folders: those of processes that were killed go, others stay."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from mmtrain.weights.write_tensors import draft_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from mmtrain.weights.write_tensors import draft_folder
with draft_folder(Path(sys.argv[1]), "model") as draft:
    (draft / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_draft_of_a_killed_export_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "first")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".first.*.draft"))) == 1
    with draft_folder(tmp_path / "second", "model") as draft:
        (draft / "config.json").write_text("{}")
        assert [path.name for path in tmp_path.iterdir()] == [draft.name]
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_drafts_of_running_exports_and_what_is_no_draft_stay(tmp_path: Path) -> None:
    others = [".a.draft", ".b.removed.draft", ".c.99999999999999999999.draft", f".d.{os.getpid()}.draft"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".e.1234567.draft").write_text("a file of somebody")
    with draft_folder(tmp_path / "first", "model"), draft_folder(tmp_path / "second", "model"):
        assert len(list(tmp_path.iterdir())) == len(others) + 3
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".e.1234567.draft", "first", "second"}


def test_a_draft_that_another_process_holds_stays(tmp_path: Path) -> None:
    held = tmp_path / f".first.{2**22 + 1}.draft"  # above all numbers of processes: one of another machine
    held.mkdir()
    holder = os.open(held, os.O_RDONLY)

    fcntl.flock(holder, fcntl.LOCK_EX)
    with draft_folder(tmp_path / "second", "model"):
        assert held.exists()
    os.close(holder)
    with draft_folder(tmp_path / "third", "model"):
        assert not held.exists()
