"""`first_gpu.py --part right`: does this machine compute what the tests hold CPUs to, and does a whole run work?

Nothing in the first steps is timed, so they run side by side. Then come the ceilings of every other figure, alone, and
the commands that a user types: plan, train, SIGTERM, resume, evaluate.
"""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from scripts.gpu.findings import Verdict, describe_machine, first_json
from scripts.gpu.limited import python_command
from scripts.gpu.requirements import missing_test_packages, versions_out_of_bounds
from scripts.gpu.session import Session
from scripts.gpu.training_run import make_data, train_and_resume

# Each in a process of its own, for some leave torch or Megatron-core prepared for a CPU.
DEVICE_TESTS = (
    "tests/runtime/test_recorder.py",
    "tests/runtime/test_snapshot_copy.py",
    "tests/runtime/test_step_prefetcher.py",
    "tests/models/test_fused_kernels.py",
)
ATTENTION_TESTS = "tests/models/test_cuda.py"  # FlashAttention-4 compiles fifteen kernels for them
DEVICE_TEST_LIMIT_S, ATTENTION_TESTS_LIMIT_S = 40, 150
# typer and click of some images warn of each other, which mmtrain's own tests would take for an error.
PYTEST_OPTIONS = ("-q", "-rfE", "-o", "filterwarnings=", "-p", "no:cacheprovider")
# 1: tests failed; 5: none was collected. Any other exit code, as for a missing plugin, says nothing of numbers.
PYTEST_VERDICTS: Mapping[int, Verdict] = {0: "ok", 1: "WRONG", 5: "left out"}
NVIDIA_SMI_LIMIT_S, ALLOCATOR_LIMIT_S, CEILINGS_LIMIT_S, DOCTOR_LIMIT_S, PRESETS_LIMIT_S = 20, 60, 40, 60, 60
COMPARISONS_LIMIT_S = 150  # on one GPU; the meshes of several take as long again
EXPANDABLE_SEGMENTS = (
    "import torch; x = torch.ones(2**28, device='cuda'); print(torch.cuda.get_device_name(), float(x.sum()))"
)


def check(session: Session) -> None:
    """Run the part."""
    sequences = [compare_with_cpu, run_attention_tests, run_device_tests, prepare_run]
    session.run_side_by_side(*sequences, *([plan_on_presets] if session.dry else []))
    session.run_rows("ceilings", CEILINGS_LIMIT_S)
    session.guard(train_and_resume)


def describe(session: Session) -> None:
    """Report versions and the card, and whether the allocator's segments can grow. Both parts begin with it."""
    for name, value in describe_machine().items():
        session.add(name, value)
    session.add("packages outside of pyproject.toml's bounds", "; ".join(versions_out_of_bounds()) or "none")
    if session.dry:
        return
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
        session.run("nvidia-smi", query, NVIDIA_SMI_LIMIT_S)
    grows = session.run(
        "expandable-segments",
        python_command("-c", EXPANDABLE_SEGMENTS),
        ALLOCATOR_LIMIT_S,
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    if grows.code != 0:  # they need the driver's virtual memory, which not every virtual machine has
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"


def compare_with_cpu(session: Session) -> None:
    """Compare attention, training and, with several GPUs, meshes with one process on the CPU."""
    has_meshes = session.dry or torch.cuda.device_count() > 1
    session.run_rows("correctness", COMPARISONS_LIMIT_S * (2 if has_meshes else 1))


def run_device_tests(session: Session) -> None:
    """Run the tests that are skipped without a GPU, but for those of attention."""
    for file in DEVICE_TESTS:
        run_tests(session, file, DEVICE_TEST_LIMIT_S)


def run_attention_tests(session: Session) -> None:
    """Run the tests that compare attention and a stage with the reference and with a CPU."""
    run_tests(session, ATTENTION_TESTS, ATTENTION_TESTS_LIMIT_S)


def run_tests(session: Session, file: str, limit_s: float) -> None:
    """Run the tests of a file; that they fail means that something is WRONG."""
    name = f"pytest-{file.rpartition('test_')[2].removesuffix('.py')}"
    if missing := missing_test_packages():
        session.add(name, f"not installed: {', '.join(missing)}", "left out")
        return
    session.run(name, python_command("-m", "pytest", file, *PYTEST_OPTIONS), limit_s, PYTEST_VERDICTS)


def prepare_run(session: Session) -> None:
    """Make the data of the run, and ask `mmtrain doctor`."""
    make_data(session)
    # Only stdout is JSON, and warnings go to stderr.
    answer = session.folder / "doctor.json"
    links = "--links" if torch.cuda.device_count() > 1 and not session.dry else "--no-links"
    arguments = ["doctor", "--json", "--run-dir", session.work.absolute(), links]
    if session.mmtrain("doctor", arguments, DOCTOR_LIMIT_S, stdout=answer):
        report_doctor(session, first_json(answer.read_text(encoding="utf-8")))


def report_doctor(session: Session, found: dict[str, Any]) -> None:
    """Add what `mmtrain doctor` found."""
    session.add("doctor: preset", found["preset"])
    for finding in found["findings"]:
        session.add(f"doctor: {finding['kind']}", f"{finding['what']}: {finding['remedy']}")


def plan_on_presets(session: Session) -> None:
    """Plan the first cases on each preset."""
    session.run_rows("preset_plans", PRESETS_LIMIT_S)
