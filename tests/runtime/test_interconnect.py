"""What `mmtrain doctor` says of drivers, GPUs that reach each other, and networks."""

import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

from mmtrain.runtime.profiling.doctor import gpu_software_versions, peer_lines
from mmtrain.runtime.profiling.host_report import network_diagnostics, network_lines

Address = namedtuple("Address", ["family", "address"])
Stats = namedtuple("Stats", ["isup", "speed"])


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        "lo": [Address(socket.AF_INET, "127.0.0.1")],
        "eth0": [Address(socket.AF_INET6, "fe80::1"), Address(socket.AF_INET, "10.0.0.4")],
        "ib0": [Address(socket.AF_INET, "10.1.0.4")],
        "down0": [Address(socket.AF_INET, "10.2.0.4")],
    }
    stats = {"lo": Stats(True, 0), "eth0": Stats(True, 10_000), "ib0": Stats(True, 0), "down0": Stats(False, 0)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC 12.2", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build\n", "580.95"),
    ],
)  # fmt: skip
def test_the_driver_is_read_from_its_file(tmp_path: Path, text: str, version: str) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    assert gpu_software_versions(file)["nvidia-driver"] == version
    assert "nvidia-driver" not in gpu_software_versions(tmp_path / "none")


def test_gpus_that_reach_each_other_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, other: {gpu, other} == {0, 1})
    lines = peer_lines(3)
    assert lines[:3] == ["GPU 0 reaches 1 directly", "GPU 1 reaches 0 directly", "GPU 2 reaches no other GPU directly"]
    assert peer_lines(1) == []


def test_networks_that_other_machines_can_reach_are_listed() -> None:
    lines = network_lines({"GLOO_SOCKET_IFNAME": "ib0"})
    assert lines[:2] == ["eth0 10.0.0.4, 10 Gb/s", "ib0 10.1.0.4"]
    assert lines[-1] == "GLOO_SOCKET_IFNAME=ib0"
    assert not any("down0" in line or "127.0.0.1" in line for line in lines)


@pytest.mark.parametrize(
    ("variable", "value", "is_found"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "bond0,ib", True),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", True),
        ("NCCL_SOCKET_IFNAME", "bond0", False),
    ],
)
def test_a_variable_that_names_no_interface_is_a_finding(variable: str, value: str, is_found: bool) -> None:
    findings = [*network_diagnostics({variable: value})]
    assert (not findings) == is_found
    assert all(f"{variable}: {value} found" in finding.what and "eth0" in finding.what for finding in findings)
