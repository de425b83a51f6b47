"""Errors that a GPU reports of itself, by fakes of CUDA's texts and of the kernel's log."""

import socket
from pathlib import Path

import pytest

from mmtrain.errors import RunError
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.resilience import device_errors
from mmtrain.runtime.resilience.device_errors import describe_device_error, newest_xid
from mmtrain.runtime.resilience.failures import read_failures, report_failures
from mmtrain.runtime.run_owner import FolderClaim

ECC = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`")
LAUNCH = RuntimeError("CUDA error: unspecified launch failure")
LOST_GPU = "[71.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n"
OF_PROGRAM = "[70.0] NVRM: Xid (PCI:0000:3b:00): 13, pid=812, name=python, Graphics Exception\n"
HERE = "0000:3b:00"


@pytest.mark.parametrize(
    ("error", "log", "said"),
    [
        (ECC, "", "the GPU reports uncorrectable ECC error."),
        (ECC, LOST_GPU, "the GPU reports uncorrectable ECC error (Xid 79: the GPU has fallen off the bus)."),
        (
            LAUNCH,
            OF_PROGRAM + LOST_GPU,
            "the GPU reports an error of its own (Xid 79: the GPU has fallen off the bus).",
        ),
        (LAUNCH, OF_PROGRAM, None),
        (LAUNCH, LOST_GPU.replace("3b", "5e"), None),
        (ValueError("a bug"), LOST_GPU, None),
    ],
)
def test_errors_of_devices_name_the_node_and_what_the_gpu_reports(error: Exception, log: str, said: str | None) -> None:
    text = describe_device_error(error, 3, lambda: HERE, lambda: log)
    if said is None:
        assert text is None
    else:
        assert text is not None
        assert text.startswith(f"rank 3 on {socket.gethostname()}, GPU at {HERE}: {said}")


def test_the_newest_line_counts_and_a_gpu_whose_address_is_unknown_takes_any() -> None:
    log = LOST_GPU + LOST_GPU.replace("): 79", "): 48") + OF_PROGRAM
    assert newest_xid(log, HERE) == 48
    assert newest_xid(log.replace("3b:00)", "5e:00)"), None) == 48
    assert newest_xid("", HERE) is None


def test_a_rank_whose_gpu_fails_reports_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_errors, "read_kernel_log", lambda: LOST_GPU)
    node = f"rank 2 on {socket.gethostname()}"
    with (
        pytest.raises(RunError, match=f"{node}: the GPU reports uncorrectable ECC"),
        report_failures(FolderClaim(tmp_path, "run", "claim"), 2, Activity()),
    ):
        raise ECC
    [failure] = read_failures(tmp_path)
    assert failure.error is not None
    assert node in failure.error
