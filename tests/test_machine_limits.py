"""Limits of containers are found in control groups of both versions, at the group of this process or above it."""

from pathlib import Path

import pytest

from mmtrain import machine_limits
from mmtrain.machine_limits import (
    MachineLimits,
    drop_thread_binding,
    num_available_cores,
    read_limits,
)
from mmtrain.system_calls import num_scheduled_cores

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
22 1 8:1 / / rw - ext4 /dev/vda rw"""


def machine(root: Path, membership: str, mounts: str, files: dict[str, str]) -> Path:
    """Write what Linux shows of control groups below `root`."""
    written = {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_no_linux_and_no_groups_have_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == MachineLimits()
    assert read_limits(machine(tmp_path, "0::/", V2_MOUNT, {})) == MachineLimits()


def test_version_2_in_the_group_that_the_process_names(tmp_path: Path) -> None:
    files = {"job/step/cpu.max": "150000 100000", "job/memory.max": "1000", "job/step/memory.max": "max"}
    files |= {"job/pids.max": "max", "job/step/pids.max": "77", "other/cpu.max": "1000 100000"}
    assert read_limits(machine(tmp_path, "0::/job/step", V2_MOUNT, files)) == MachineLimits(1.5, 1000, 77)


def test_the_lowest_limit_of_all_groups_around_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000", "a/memory.max": "9", "a/b/memory.max": "5"}
    assert read_limits(machine(tmp_path, "0::/a/b", V2_MOUNT, files)) == MachineLimits(1.0, 5)


def test_version_1_has_a_group_for_each_controller(tmp_path: Path) -> None:
    membership = "4:memory:/box\n3:cpu,cpuacct:/docker/abc\n2:pids:/\n0::/"
    files = {
        "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/box/memory.limit_in_bytes": "4096",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "pids/pids.max": "max",
    }
    assert read_limits(machine(tmp_path, membership, V1_MOUNTS, files)) == MachineLimits(2.5, 4096)


@pytest.mark.parametrize("mounted", ["/docker/abc", "/"])
def test_a_container_that_sees_only_its_own_group(tmp_path: Path, mounted: str) -> None:
    """The group is named as on the host, and mounted without the folders above it."""
    membership = "3:cpu,cpuacct:/docker/abc"
    mounts = f"32 31 0:29 {mounted} /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct"
    files = {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}
    assert read_limits(machine(tmp_path, membership, mounts, files)) == MachineLimits(0.5)


def test_a_group_outside_the_namespace(tmp_path: Path) -> None:
    files = {"memory.max": "123"}
    assert read_limits(machine(tmp_path, "0::/../../elsewhere", V2_MOUNT, files)) == MachineLimits(None, 123)


def test_cores_are_those_of_variable_quota_and_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(cores: float | None) -> None:
        monkeypatch.setattr(machine_limits, "machine_limits", lambda: MachineLimits(cores))

    limit(None)
    assert num_available_cores({}) == num_scheduled_cores()
    limit(0.5)
    assert num_available_cores({}) == 1
    limit(1.9)
    assert num_available_cores({}) == 1
    limit(1e6)
    assert num_available_cores({}) == num_scheduled_cores()
    assert num_available_cores({"PYTHON_CPU_COUNT": "8"}) == 8
    assert num_available_cores({"PYTHON_CPU_COUNT": "default"}) == num_scheduled_cores()


def test_only_binding_leaves_the_environment() -> None:
    environment = {"OMP_PROC_BIND": "close", "KMP_AFFINITY": "compact", "OMP_NUM_THREADS": "4"}
    remark = drop_thread_binding(environment)
    assert environment == {"OMP_NUM_THREADS": "4"}
    assert remark is not None
    assert remark.startswith("ignoring OMP_PROC_BIND, KMP_AFFINITY, which")
    assert drop_thread_binding(environment) is None
