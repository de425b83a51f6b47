"""`mmtrain doctor` on this machine, in words and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

from mmtrain.cli.doctor import health_lines
from mmtrain.runtime.profiling.diagnostics import Diagnostic
from mmtrain.runtime.profiling.doctor import MachineReport, examine_machine


def _doctor(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "mmtrain", "doctor", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_knows_this_machine(tmp_path: Path) -> None:
    found = json.loads(_doctor("--json", folder=tmp_path))
    assert {"python", "torch", "megatron-core", "mmtrain"} <= set(found["versions"])
    assert found["backends"]["gloo"]
    assert found["attention"]["sdpa"] is None
    assert found["attention"]["reference"] is None
    assert "cores" in found["devices"][0]
    assert set(found["messages"]) == {"p2p", "all_reduce", "broadcast", "all_gather", "reduce_scatter"}
    assert all(seconds > 0 for pair in found["messages"].values() for seconds in pair)
    assert all(f["kind"] in ("slow", "missing") and f["what"] and f["remedy"] for f in found["findings"])
    assert found["flops"] > 1e8
    assert {"soundfile", "pyarrow"} <= set(found["versions"])
    assert not any("pip install 'mmtrain[" in f["remedy"] for f in found["findings"])
    assert not (tmp_path / "runs").exists()


def test_in_words_it_says_what_is_used_and_why_not_the_rest(tmp_path: Path) -> None:
    words = "\n".join(health_lines(examine_machine(tmp_path, links=False)))
    assert "sdpa is used" in words or "flash_attn is used" in words or "varlen is used" in words
    assert "all_reduce" not in words
    assert "Versions" in words
    assert "FLOP/s on one" in words


def test_what_is_missing_is_told_with_the_commands_it_is_missing_for() -> None:
    missing = Diagnostic("missing", "av, for samples with videos", "pip install 'mmtrain[video]'", ("plan", "train"))
    health = MachineReport({}, ["2 cores"], None, {}, {"sdpa": None}, 1e11, {}, [missing])
    words = health_lines(health)
    assert "Missing     av, for samples with videos [plan, train]: pip install 'mmtrain[video]'" in words
    assert "Slow        nothing found" in words
