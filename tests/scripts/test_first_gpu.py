"""`scripts/first_gpu.py`, with this machine's CPU in place of a GPU."""

import importlib.metadata
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmtrain.models.attention import attend
from mmtrain.program import ScheduleKind
from mmtrain.recipe import Recipe
from scripts import bench_gpu, first_gpu
from scripts.gpu import blocks, correctness, requirements
from scripts.gpu.blocks import BlockContext, best_case
from scripts.gpu.findings import BlockReport
from scripts.gpu.limited import CommandResult, Deadline
from tests.flow.test_nccl import ENTER_IN_DIFFERENT_ORDERS

CPU = torch.device("cpu")


def _verdicts() -> dict[str, str]:
    return {row.check: row.finding().verdict for row in correctness.attention_rows(CPU)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_it_says_that_it_needs_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_gpu.py"])
    assert first_gpu.main() == 2
    assert "sees no CUDA device here" in capsys.readouterr().err


def test_backends_that_agree_are_told_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "HEAD_WIDTHS", (64,))
    verdicts, right = _verdicts(), attend
    sdpa = [f"attention sdpa, torch.{dtype}, heads of 64" for dtype in ("float32", "bfloat16")]
    assert [verdicts[check] for check in sdpa] == ["ok", "ok"]
    assert verdicts["attention flash_attn, torch.float32, heads of 64"] == "left out"
    monkeypatch.setattr(correctness, "attend", lambda *a: right(*a) * (1.001 if a[-1].backend == "sdpa" else 1))
    assert _verdicts()[sdpa[0]] == "WRONG"
    monkeypatch.setattr(correctness, "attend", lambda *a: right(*a) * (float("nan") if a[-1].backend == "sdpa" else 1))
    assert _verdicts()[sdpa[0]] == "WRONG"


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "ok"), (1, "WRONG"), (4, "failed"), (-signal.SIGABRT, "failed"), (None, "failed")]
)
def test_only_tests_that_fail_say_that_numbers_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, verdict: str
) -> None:
    """Not a plugin that is missing, nor kernels whose compilation takes all the time."""
    monkeypatch.setattr(blocks, "run_limited", lambda *_, **__: CommandResult(code, "the last line", 3.0))
    report = BlockReport(1, "correctness")
    blocks._run_device_tests(BlockContext(tmp_path, Deadline(60), dry=False), report)
    [finding] = report.findings
    assert (finding.verdict, finding.check) == (verdict, f"pytest {' '.join(blocks.DEVICE_TESTS)}")


def test_comparisons_go_on_after_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [correctness.Row("first", 1.0, 1e-3), correctness.Row("second", 0.0, 1e-3)]
    monkeypatch.setattr(correctness, "rows", lambda *_, **__: iter(rows))
    monkeypatch.setattr(sys, "argv", ["correctness", str(tmp_path / "rows.json"), "--dry-run"])
    correctness.main()
    assert [row["verdict"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["WRONG", "ok"]


def test_kernels_that_must_be_compiled_are_compared_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "_worst_attention_difference", lambda *_: 0.0)
    monkeypatch.setattr(correctness, "training_rows", lambda *_: iter([correctness.Row("training", 0.0)]))
    monkeypatch.setattr(correctness, "mesh_rows", lambda *_: iter([correctness.Row("mesh", 0.0)]))
    checks = [row.check for row in correctness.rows(CPU, 1, correctness.train_here)]
    assert [check.startswith("attention flash_attn_4") for check in checks].index(True) == checks.index("mesh") + 1
    assert all(check.startswith("attention flash_attn_4") for check in checks[checks.index("mesh") + 1 :])


def test_meshes_that_might_hang_come_first_and_none_starts_without_time() -> None:
    ran: list[tuple[int, str]] = []

    def run(settings: Recipe, meshes: correctness.Meshes, kind: ScheduleKind = "1f1b") -> correctness.Curve:
        if meshes:
            ran.append((correctness.num_ranks(meshes), kind))
        return [(1.0, 2.0)]

    checks = [row.check for row in correctness.mesh_rows(6, run, Deadline(60))]
    assert checks[: len(ENTER_IN_DIFFERENT_ORDERS)] == [f"mesh: {case}" for case in ENTER_IN_DIFFERENT_ORDERS]
    assert len(checks) == len(set(checks)) == len(ran) > 50
    assert {kind for _, kind in ran} == {"1f1b", "coarse"}
    assert {ranks for ranks, _ in ran} == {2, 3, 4, 5, 6}
    ran.clear()
    left_out = list(correctness.mesh_rows(6, run, Deadline(0)))
    assert ran == []
    assert [row.check for row in left_out] == checks
    assert {row.finding().verdict for row in left_out} == {"left out"}


def test_missing_packages_are_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.missing_packages() == requirements.missing_test_packages() == []
    monkeypatch.setattr(importlib.metadata, "version", _version_without("megatron-core", "hypothesis"))
    assert requirements.missing_test_packages() == ["hypothesis"]
    assert {missing.partition("==")[0] for missing in requirements.missing_packages()} == {"megatron-core"}


def _version_without(*names: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    return version


def test_a_wrong_row_ends_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finds_a_wrong_row(context: BlockContext, report: BlockReport) -> None:
        assert 0 < context.deadline.left_s <= 60 * 6
        report.add("one", "differs by 1.0e+00, allowed 1e-03", "WRONG")

    ran: list[int] = []
    blocks = {
        1: first_gpu.Block("wrong", finds_a_wrong_row, 60),
        2: first_gpu.Block("not run", lambda context, report: ran.append(2), 60),
    }
    monkeypatch.setattr(first_gpu, "BLOCKS", blocks)
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", "--dry-run", "--out", str(tmp_path)])
    assert first_gpu.main() == 1
    assert ran == []
    assert "nothing else is worth measuring" in capsys.readouterr().err
    [finding] = json.loads((tmp_path / "block-1.json").read_text())["findings"]
    assert finding["verdict"] == "WRONG"


def test_the_best_case_has_the_highest_mfu_of_those_that_ran(tmp_path: Path) -> None:
    results = tmp_path / bench_gpu.RESULT_FILE
    assert best_case(results, dry=True).model == "tiny"
    case = {"model": "tiny", "tokens": 128, "attention": "auto", "kernels": None, "dry": True}
    rows = [
        {"case": case, "problem": None, "steps": {"mfu": 0.4}},
        {"case": {**case, "attention": "sdpa"}, "problem": None, "steps": {"mfu": 0.5}},
        {"case": {**case, "attention": "varlen"}, "problem": "out of memory"},
    ]
    results.write_text(json.dumps({"cases": rows}))
    assert best_case(results, dry=True).attention == "sdpa"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first-gpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "rows"), [(1, 20), (2, 3), (3, 10), (4, 3)])
def test_every_block_runs_dry(out: Path, number: int, rows: int) -> None:
    report = first_gpu.run_block(number, out, dry=True)
    assert [finding for finding in report.findings if finding.verdict in ("WRONG", "failed")] == []
    assert len(report.findings) >= rows
    assert json.loads((out / f"block-{number}.json").read_text())["block"] == number
