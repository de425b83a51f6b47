"""Blocks 1, 2 and 4 of `first_gpu.py`: correctness, the table of MFU, and kernels. Block 3 is in `training_run.py`."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import bench_gpu
from scripts.gpu.cases import DRY_TOKENS, MODELS, TINY_MODELS, TOKENS, BenchCase, bench_cases, kernel_choices
from scripts.gpu.findings import BlockReport, Finding, Verdict, describe_machine
from scripts.gpu.limited import CommandResult, Deadline, kernel_cache, python_command, run_limited
from scripts.gpu.requirements import missing_test_packages

NVIDIA_SMI_LIMIT_S, CEILINGS_LIMIT_S, COMPARISONS_LIMIT_S, PYTEST_LIMIT_S, DOCTOR_LIMIT_S = 20, 60, 300, 120, 60
DRY_LIMITS_FACTOR = 6  # a dry run shows that everything runs, beside whatever else a CPU does
PYTEST_TESTS_FAILED = 1  # its exit code
# Of a 7B model's head, with all tokens of a microbatch as targets, and with half.
LOSS_SIZES = ("--tokens", "8192", "--hidden", "3584", "--vocab", "152064", "--targets", "1.0", "0.5", "--rounds", "5")
DRY_LOSS_SIZES = ("--tokens", "32", "--hidden", "16", "--vocab", "64", "--targets", "1.0", "--rounds", "2")
LOSS_LIMIT_S = 90
DEVICE_TESTS = ("tests/models/test_cuda.py", "tests/runtime/test_recorder.py")


@dataclass(frozen=True)
class BlockContext:
    """What every block gets."""

    folder: Path  # for logs, JSON and traces
    deadline: Deadline
    dry: bool

    @property
    def environment(self) -> dict[str, str]:
        """What a command's environment has besides this one's."""
        return dict(bench_gpu.cpu_only()) if self.dry else kernel_cache(self.folder)

    def limit_s(self, seconds: float) -> float:
        """Return the limit of a command that may take `seconds`, within what is left of the block."""
        return min(seconds * (DRY_LIMITS_FACTOR if self.dry else 1), self.deadline.left_s)

    def run(self, name: str, command: list[str], limit_s: float, **more: Any) -> CommandResult:
        """Run a command within its limit and the block's; its output goes to NAME.log."""
        env = {**self.environment, **more.pop("env", {})}
        return run_limited(command, self.limit_s(limit_s), self.folder / f"{name}.log", env=env, **more)

    def dry_run_flag(self) -> list[str]:
        """Return the flag of commands that can run dry."""
        return ["--dry-run"] if self.dry else []


def check_correctness(context: BlockContext, report: BlockReport) -> None:
    """Block 1: versions, ceilings, comparisons with the CPU, `mmtrain doctor`, and the tests that need a GPU."""
    for name, value in describe_machine().items():
        report.add(name, value)
    if shutil.which("nvidia-smi") and not context.dry:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
        report.add("nvidia-smi", context.run("nvidia-smi", query, NVIDIA_SMI_LIMIT_S).output.strip())
    _run_rows(context, report, "ceilings", CEILINGS_LIMIT_S)
    _run_rows(context, report, "correctness", COMPARISONS_LIMIT_S)
    _ask_doctor(context, report)
    _run_device_tests(context, report)


def _ask_doctor(context: BlockContext, report: BlockReport) -> None:
    links = ["--no-links"] if context.dry else []
    doctor = python_command("-m", "mmtrain", "doctor", "--json", "--run-dir", context.folder.absolute(), *links)
    ended = context.run("doctor", doctor, DOCTOR_LIMIT_S)
    if ended.code != 0:
        report.add("mmtrain doctor", _how_ended(ended), "failed")
        return
    found = json.loads(ended.output[ended.output.index("{") :])
    report.add("mmtrain doctor", f"{found['flops'] / 1e12:.4g} TFLOP/s of GEMMs, preset {found['preset']}", "ok")
    for finding in found["findings"]:
        report.add(f"doctor: {finding['kind']}", f"{finding['what']}: {finding['remedy']}")


def _run_device_tests(context: BlockContext, report: BlockReport) -> None:
    """Run the tests last: where kernels are compiled at their first use, they may take all that is left."""
    if missing := missing_test_packages():
        report.add("tests of the device", f"not installed: {', '.join(missing)}", "left out")
        return
    options = ["-q", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    ended = context.run("pytest", python_command("-m", "pytest", *DEVICE_TESTS, *options), PYTEST_LIMIT_S)
    # Whatever else ends pytest, such as a missing plugin or the limit, says nothing about numbers.
    verdicts: dict[int | None, Verdict] = {0: "ok", PYTEST_TESTS_FAILED: "WRONG"}
    report.add(f"pytest {' '.join(DEVICE_TESTS)}", _how_ended(ended), verdicts.get(ended.code, "failed"))


def _run_rows(context: BlockContext, report: BlockReport, module: str, limit_s: float) -> None:
    """Run a module that writes findings to a file, and take over those that it has written, whole run or not."""
    rows = context.folder / f"{module}.json"
    rows.unlink(missing_ok=True)
    command = python_command("-m", f"scripts.gpu.{module}", rows.absolute(), *context.dry_run_flag())
    ended = context.run(module, command, limit_s)
    for row in json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else ():
        finding = Finding(**row)
        report.add(finding.check, finding.found, finding.verdict)
    if ended.code != 0:
        report.add(f"{module}, after {ended.seconds:.0f} s", _how_ended(ended), "failed")


def _how_ended(ended: CommandResult) -> str:
    how = "its time was over" if ended.code is None else f"exit code {ended.code}"
    return f"{how}: {ended.last_line}"


def measure_mfu(context: BlockContext, report: BlockReport) -> None:
    """Block 2: `bench_gpu.py` on every combination that there is time for."""
    for setting, value in bench_gpu.automatic_choices(context.dry).items():
        report.add(f"train.{setting}: auto", value)
    models = list(TINY_MODELS if context.dry else MODELS)
    tokens = DRY_TOKENS[:1] if context.dry else TOKENS
    attention = bench_gpu.usable_backends(context.dry)[: 1 if context.dry else None]
    cases = bench_cases(models, tokens, attention, bench_gpu.usable_kernels(context.dry), context.dry)
    rows = bench_gpu.run_cases(cases, context.folder / "mfu", context.deadline)
    for row in rows:
        case = BenchCase(**row["case"])
        if row["problem"]:
            left_out = str(row["problem"]).startswith("left out")
            report.add(case.name, str(row["problem"]), "left out" if left_out else "failed")
        else:
            report.add(case.name, describe_row(row))
    waits = list(dict.fromkeys(line for row in rows for line in row.get("waits_for_device", ())))
    report.add("lines at which a step waits for the GPU", "; ".join(waits) or "none")


def describe_row(row: dict[str, Any]) -> str:
    """Return the figures of a case as one line."""
    steps, text = row["steps"], row["text_steps"]
    idle = "" if row["idle_share"] is None else f", device idle {row['idle_share']:.1%}"
    return (
        f"MFU {steps['mfu']:.1%} (text alone {text['mfu']:.1%}), step {steps['step_s']:.4g} s (predicted "
        f"{row['predicted_step_s']:.4g} s), {steps['tokens_per_s']:,.0f} LLM tokens/s "
        f"({steps['tokens_per_s'] / text['tokens_per_s']:.0%} of text's), {row['allocated_gib']:.1f} GiB (predicted "
        f"{row['predicted_gib']:.1f} GiB){idle}"
    )


def list_kernels(context: BlockContext, report: BlockReport) -> None:
    """Block 4: forms of the loss; the best case of block 2 again, with kernels, a timeline and the allocator."""
    loss = python_command("scripts/bench_loss.py", *(DRY_LOSS_SIZES if context.dry else LOSS_SIZES))
    ended = context.run("loss", loss, LOSS_LIMIT_S)
    for line in ended.output.splitlines():
        share, separator, figures = line.partition(" with a target: ")
        if separator:
            report.add(f"loss, {share} of the tokens with a target", figures)
    if ended.code != 0:
        report.add("loss", _how_ended(ended), "failed")
    case = best_case(context.folder / "mfu" / bench_gpu.RESULT_FILE, context.dry)
    trace = context.folder / "step-trace.json.gz"
    limit_s = context.limit_s(bench_gpu.CASE_LIMIT_S)
    row = bench_gpu.run_case(case, context.folder / "best-case", limit_s, with_kernels=True, trace=trace)
    if row["problem"]:
        report.add(case.name, str(row["problem"]), "failed")
        return
    (context.folder / "kernels.txt").write_text(row["kernels"], encoding="utf-8")
    report.add(case.name, describe_row(row))
    report.add("kernels of a step, by time", str(context.folder / "kernels.txt"), "ok")
    report.add("timeline of a step, for Perfetto", f"{trace}, {trace.stat().st_size / 2**20:.1f} MiB", "ok")
    for name, value in row["allocator"].items():
        report.add(f"allocator: {name}", str(value))


def best_case(results: Path, dry: bool) -> BenchCase:
    """Return the case with the highest MFU in the results of block 2; without any, the first case."""
    rows = json.loads(results.read_text(encoding="utf-8"))["cases"] if results.exists() else []
    measured = [row for row in rows if not row["problem"] and row["case"]["dry"] == dry]
    if measured:
        return BenchCase(**max(measured, key=lambda row: float(row["steps"]["mfu"]))["case"])
    model, tokens = next(iter(TINY_MODELS if dry else MODELS)), (DRY_TOKENS if dry else TOKENS)[0]
    return BenchCase(model, tokens, "auto", kernel_choices()[0], dry)
