"""What `doctor` finds missing or slow on simulated machines."""

import sys
from collections import namedtuple
from dataclasses import replace
from email.message import Message
from pathlib import Path

import pytest
import torch

from mmtrain.costs import preset
from mmtrain.costs.hardware import GIB
from mmtrain.extras import EXTRAS
from mmtrain.machine_limits import MachineLimits
from mmtrain.runtime.profiling import host_diagnostics as host
from mmtrain.runtime.profiling.diagnostics import (
    accelerator_diagnostics,
    attention_diagnostics,
    throughput_diagnostics,
)
from mmtrain.runtime.profiling.host_diagnostics import host_diagnostics, package_diagnostics, unmet_requirements
from mmtrain.system_calls import num_scheduled_cores

CPU = preset("cpu-core")
FAST = CPU.peak_flops("fp32") * CPU.gemm_efficiency


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mmtrain be installed without requirements, also where these tests run from a tree that is not."""
    monkeypatch.setattr(host.importlib.metadata, "requires", lambda _: [])
    monkeypatch.setattr(host.importlib.metadata, "metadata", lambda _: Message())


@pytest.mark.usefixtures("installed")
def test_a_missing_package_names_the_extra_and_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (module for extra in EXTRAS for module in extra.modules):
        monkeypatch.setitem(sys.modules, module, None)
    by_remedy = {f.remedy: f for f in package_diagnostics()}
    assert by_remedy.keys() == {f"pip install 'mmtrain[{extra.name}]'" for extra in EXTRAS}
    training = by_remedy["pip install 'mmtrain[train]'"]
    assert training.what.startswith("torch, megatron-core, einops and tensorboard, for ")
    assert {"train", "verify", "data tiny-model"} <= {*training.commands}
    assert by_remedy["pip install 'mmtrain[report]'"].commands == ("report", "data stats")
    assert "train" in by_remedy["pip install 'mmtrain[video]'"].commands
    assert "data digits" in by_remedy["pip install 'mmtrain[audio]'"].commands
    assert {f.kind for f in by_remedy.values()} == {"missing"}


@pytest.mark.usefixtures("installed")
def test_a_package_that_fails_to_load_is_reported_apart_from_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libsndfile.so: cannot open")

    monkeypatch.setattr(host.importlib, "import_module", broken)
    assert all("cannot open" in f.what and "pip" not in f.remedy for f in package_diagnostics())


def test_unsupported_and_absent_versions_are_reported() -> None:
    assert list(unmet_requirements(["numpy>=1", 'none-such>=1; extra == "dev"'])) == []
    [old, absent] = unmet_requirements(["numpy<1", "none-such>=2"])
    assert old.what.endswith("mmtrain supports <1")
    assert absent.remedy == "pip install 'none-such>=2'"


def test_a_package_of_an_extra_may_be_absent_but_not_of_another_version() -> None:
    optional = ["numpy<1; extra == 'video'", "none-such>=1; extra == 'video'", "pytest<1; extra == 'dev'"]
    [old] = unmet_requirements(optional, ["video"])
    assert old.what.startswith("numpy ")
    assert old.remedy == "pip install 'numpy<1'"


def test_of_two_pins_that_of_this_python_is_compared() -> None:
    now, later = f"{sys.version_info[0]}.{sys.version_info[1]}", f"{sys.version_info[0]}.{sys.version_info[1] + 1}"
    pins = [f"numpy==1; python_version < '{later}'", f"numpy==2; python_version >= '{later}'"]
    [other] = unmet_requirements(pins)
    assert other.what.endswith("mmtrain supports ==1")
    assert other.remedy == "pip install 'numpy==1'"
    [other] = unmet_requirements([pin.replace(later, now) for pin in pins])
    assert other.remedy == "pip install 'numpy==2'"


def test_a_gpu_that_torch_cannot_use_is_reported_as_missing_support(tmp_path: Path) -> None:
    [none] = accelerator_diagnostics(False, False, {}, tmp_path / "nvidia0")
    assert none.kind == "slow"
    (tmp_path / "nvidia0").touch()
    [unused] = accelerator_diagnostics(False, False, {}, tmp_path / "nvidia0")
    assert unused.kind == "missing"
    assert torch.__version__ in unused.what


def test_gpus_that_differ_or_are_old_or_in_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("H100", (9, 0), 80), ("V100", (7, 0), 16)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: cards[i][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: cards[i][1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (cards[i][2] * GIB - i * 4 * GIB, cards[i][2] * GIB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    texts = [f.what for f in accelerator_diagnostics(True, False, {"flash_attn": "not installed", "varlen": "too old"})]
    assert [words for words in texts if "NCCL" in words]
    reasons = "flash_attn: not installed; varlen: too old"
    assert f"attention has no fused kernel for packed sequences ({reasons})" in texts
    assert "GPUs differ (H100, V100): every step waits for the slowest" in texts
    assert "GPU 1, V100, has no bf16 units" in texts
    assert "4 of 16 GiB of GPU 1 are used by other processes" in texts
    assert [words for words in texts if "cannot reach the memory of GPU 0" in words]
    assert len(texts) == 6


def test_gemms_and_messages_slower_than_the_preset_assumes_are_reported() -> None:
    link = CPU.intra_node.bytes_per_s
    assert list(throughput_diagnostics(CPU, "fp32", FAST, {"p2p": [1e-4, 2**22 / link]})) == []
    assert list(throughput_diagnostics(CPU, "fp32", FAST, {})) == []
    gemms, messages = throughput_diagnostics(CPU, "fp32", FAST / 4, {"p2p": [1e-4, 10 * 2**22 / link]})
    assert "25% of what the preset cpu-core assumes" in gemms.what
    assert "10% of what the preset cpu-core assumes" in messages.what
    assert "profile" in gemms.remedy
    unlike = replace(CPU, fp32_flops=10 * CPU.fp32_flops)
    assert len(list(throughput_diagnostics(unlike, "fp32", FAST, {}))) == 1


def test_low_limits_of_the_system_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage(2**26, 0, 2**26))
    monkeypatch.setattr(host, "user_limit", lambda what: 256)
    limits = MachineLimits(cores=0.5, memory_bytes=GIB, num_processes=100)
    texts = [f.what for f in host_diagnostics(tmp_path / "runs" / "new", GIB, limits)]
    assert f"0.1 GiB of disk free in {tmp_path}" in texts
    assert "256 open files allowed; many ranks and workers need more" in texts
    assert "1.0 GiB of memory free: each rank needs half a GiB before any model" in texts
    cores = f"0.5 of the {num_scheduled_cores()} cores"
    assert f"this container may use {cores}: more ranks and workers than that are throttled" in texts
    assert "100 processes and threads allowed; each rank has dozens" in texts
    assert "this container may use 1.0 GiB of memory; processes beyond that are killed" in texts


def test_a_system_with_enough_of_everything_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage(2**50, 0, 2**50))
    monkeypatch.setattr(host, "user_limit", lambda what: None)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert list(host_diagnostics(tmp_path, 64 * GIB, MachineLimits(1024.0, 64 * GIB, 2**20))) == []
    assert list(host_diagnostics(tmp_path, 64 * GIB, MachineLimits())) == []


def test_attention_at_another_rate_than_the_preset_assumes_is_reported() -> None:
    assert list(attention_diagnostics(preset("h200-141g"), "flash_attn_4")) == []
    assert list(attention_diagnostics(preset("h200-141g").with_attention("varlen"), "varlen")) == []
    assert list(attention_diagnostics(CPU, "sdpa")) == []
    [other] = attention_diagnostics(preset("h200-141g"), "varlen")
    assert (
        "the preset h200-141g assumes attention by flash_attn_3 or flash_attn_4, and `auto` selects varlen"
        in other.what
    )


@pytest.mark.parametrize(("capability", "is_reported"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_a_gpu_without_the_attention_kernels_made_for_it_is_reported(
    capability: tuple[int, int], is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    older: dict[str, str | None] = {"flash_attn_3": "absent", "flash_attn_4": "absent", "flash_attn": "absent"}
    found = list(accelerator_diagnostics(True, True, older | {"varlen": None}))
    assert [f.remedy for f in found] == (["pip install 'mmtrain[cuda]'"] if is_reported else [])
    assert list(accelerator_diagnostics(True, True, older | {"varlen": None, "flash_attn_4": None})) == []
