"""`mmtrain doctor` on this machine, as text and as JSON."""

import json
import re
from pathlib import Path

import pytest

from mmtrain.cli.doctor import health_lines
from mmtrain.runtime.profiling.doctor import examine_machine
from mmtrain.runtime.profiling.host_diagnostics import Diagnostic
from mmtrain.runtime.profiling.host_report import MachineReport
from tests.forked_command import run_forked


@pytest.mark.slow  # times messages between two processes
def test_json_describes_this_machine(tmp_path: Path) -> None:
    done = run_forked(tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"python", "torch", "megatron-core", "mmtrain"} <= set(report["versions"])
    assert report["backends"]["gloo"]
    assert report["attention"]["sdpa"] is None
    assert report["attention"]["reference"] is None
    assert "cores" in report["devices"][0]
    assert set(report["messages"]) == {"p2p", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(seconds > 0 for pair in report["messages"].values() for seconds in pair)
    assert all(f["kind"] in ("slow", "missing") and f["what"] and f["remedy"] for f in report["findings"])
    assert report["flops"] > 1e8
    assert {"soundfile", "pyarrow"} <= set(report["versions"])
    extras = {f["remedy"] for f in report["findings"] if "pip install 'mmtrain[" in f["remedy"]}
    assert extras <= {"pip install 'mmtrain[trackio]'"}  # the one that is not among `all`
    commands = {state["command"]: state for state in report["commands"]}
    assert all(state["is_ready"] for state in commands.values())
    assert commands["train"]["needs"] == {"train": True}
    assert commands["data digits"]["needs"] == {"audio": True}
    assert not (tmp_path / "runs").exists()


def test_the_text_names_the_attention_kernel_that_is_used(tmp_path: Path) -> None:
    text = "\n".join(health_lines(examine_machine(tmp_path, links=False)))
    assert re.search(r"Attention +(sdpa|varlen|flash_attn\w*) is used", text)
    assert "all_reduce" not in text
    assert re.search(r"Kernels +rotation of queries and keys: (torch|liger-kernel) \(", text)
    assert "Versions" in text
    assert "FLOP/s on one" in text


def test_a_missing_package_is_listed_with_the_commands_that_need_it() -> None:
    missing = Diagnostic("missing", "av, for samples with videos", "pip install 'mmtrain[video]'", ("plan", "train"))
    health = MachineReport({}, ["2 cores"], None, {}, {"sdpa": None}, {128: "sdpa"}, [], 1e11, {}, [missing])
    lines = health_lines(health)
    assert "Missing     av, for samples with videos [plan, train]: pip install 'mmtrain[video]'" in lines
    assert "Slow        nothing found" in lines


def test_the_text_says_which_kernel_heads_of_each_width_use() -> None:
    problems = {"flash_attn_4": None, "flash_attn": "not installed", "varlen": None, "sdpa": None}
    chosen = {128: "flash_attn_4", 256: "varlen", 512: "sdpa"}
    lines = health_lines(MachineReport({}, ["8 cores", "GPU 0: B200"], None, {}, problems, chosen, [], 1e15))
    uses = "flash_attn_4 is used for heads of up to 128 features, varlen is used for heads of up to 256 features"
    assert f"Attention   {uses}, sdpa for wider ones" in lines
    assert "            flash_attn: not installed" in lines
