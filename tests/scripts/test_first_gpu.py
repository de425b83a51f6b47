"""`scripts/first_gpu.py`, with this machine's CPU in place of a GPU."""

import importlib.metadata
import json
import os
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from mmtrain.models.attention import attend
from mmtrain.program import ScheduleKind
from mmtrain.recipe import Recipe
from scripts import bench_gpu, first_gpu
from scripts.gpu import (
    compile_attention,
    correctness,
    fast,
    flash_attn_4,
    limited,
    pack,
    requirements,
    right,
    session,
    training_run,
)
from scripts.gpu.cases import BenchCase, first_cases
from scripts.gpu.findings import first_json
from scripts.gpu.limited import ROOT, CommandResult, Deadline
from scripts.gpu.preset_plans import gpus_of_first_cases, plan_finding, plan_findings
from scripts.gpu.session import Session
from tests.flow.test_nccl import ENTER_IN_DIFFERENT_ORDERS

CPU = torch.device("cpu")
# Commands that never end by themselves, after they have left something.
SAY_AND_HANG = "echo begun; exec tail -f /dev/null"


def _hang(*first: str) -> list[str]:
    return ["sh", "-c", "; ".join([*first, SAY_AND_HANG])]


@pytest.fixture
def run(tmp_path: Path) -> Session:
    """A session with a minute, which no test takes."""
    return Session("right", tmp_path, tmp_path, Deadline(60))


def _rows(run: Session) -> list[tuple[str, str]]:
    return [(finding.check, finding.verdict) for finding in run.findings]


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
    ("code", "verdict"),
    [(0, "ok"), (1, "WRONG"), (4, "failed"), (5, "left out"), (-signal.SIGABRT, "failed"), (None, "failed")],
)
def test_only_tests_that_fail_say_that_numbers_are_wrong(
    run: Session, monkeypatch: pytest.MonkeyPatch, code: int | None, verdict: str
) -> None:
    """Not a plugin that is missing, nor kernels whose compilation takes all the time."""
    monkeypatch.setattr(session, "run_limited", lambda *_, **__: CommandResult(code, "the last line", 3.0))
    right.run_device_tests(run)
    assert _rows(run)[0] == ("pytest-recorder", verdict)
    assert len(run.findings) == len(right.DEVICE_TESTS), "the others run all the same"


def test_all_tests_that_need_a_gpu_are_run() -> None:
    files = (ROOT / "tests").glob("[!s]*/test_*.py")
    skipped = [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]
    assert {str(file.relative_to(ROOT)) for file in skipped} == {*right.DEVICE_TESTS, right.ATTENTION_TESTS}


def test_a_step_over_its_limit_is_ended_and_what_it_left_is_kept(run: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = '[{"check": "GEMM", "found": "1 TFLOP/s", "verdict": "ok"}]'
    monkeypatch.setattr(session, "python_command", lambda *words: _hang(f"echo '{rows}' > {words[2]}"))
    assert run.run_rows("ceilings", 3) is None
    assert _rows(run) == [("ceilings", "failed"), ("GEMM", "ok")]
    assert run.findings[0].found.endswith("begun")
    assert run.findings[0].found.startswith("its time was over")
    assert (run.folder / "ceilings.log").read_text() == "begun\n"
    assert [row["check"] for row in _results(run)["rows"]] == ["ceilings", "GEMM"]


def _results(run: Session) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = json.loads((run.folder / f"results-{run.part}.json").read_text())
    return found


def test_steps_that_a_case_timed_are_kept_if_its_profile_hangs(run: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = {"step_s": 2.0, "mfu": 0.5, "tokens_per_s": 1e4}
    result: dict[str, object] = {
        "case": {},
        "problem": None,
        "steps": pace,
        "text_steps": None,
        "idle_share": None,
        "kernels": "",
    }
    result |= {"predicted_step_s": 1.9, "predicted_gib": 2.0, "allocated_gib": 2.1, "losses": [2.0, 1.0]}
    result |= {"recomputed_layers": {"llm": 3}, "waits_for_device": [], "allocator": {}}
    monkeypatch.setattr(fast, "CASE_LIMIT_S", 0.5)
    monkeypatch.setattr(bench_gpu, "python_command", lambda *w: _hang(f"echo '{json.dumps(result)}' > '{w[3]}'"))
    case = BenchCase("tiny", 128, "auto", "auto", dry=True)
    fast.measure_case(run, case)
    [finding] = run.findings
    assert (finding.check, finding.verdict) == (case.name, "failed")
    assert finding.found.startswith("MFU 50.0%; step 2 s, predicted 1.9 s")
    assert "3 layers recomputed" in finding.found
    monkeypatch.setattr(bench_gpu, "python_command", lambda *_: _hang())
    fast.measure_case(run, case)
    assert run.findings[1].found.startswith("ended after its")
    assert len(_results(run)["cases"]) == 2


def test_no_step_starts_without_time(run: Session) -> None:
    run.deadline = Deadline(session.MIN_TIME_TO_START_S - 1)
    assert run.run("plan", ["false"], 60).code is None
    assert run.limit_s("a case", 60) is None
    assert _rows(run) == [("plan", "left out"), ("a case", "left out")]
    assert not (run.folder / "plan.log").exists()


def test_what_is_not_timed_runs_at_the_same_time_and_an_error_is_a_row(run: Session) -> None:
    both = threading.Barrier(2, timeout=60)

    def breaks(run: Session) -> None:
        both.wait()
        raise KeyError("flops")

    def goes_on(run: Session) -> None:
        both.wait()
        run.add("the other", "done", "ok")

    run.run_side_by_side(breaks, goes_on)
    assert sorted(_rows(run)) == [("the other", "ok"), ("the script: breaks", "failed")]


def test_who_stops_the_script_stops_what_it_has_started(run: Session) -> None:
    has_started = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def never() -> bool:
        has_started.set()
        return False

    def hangs(run: Session) -> None:
        run.run("hangs", _hang(), 60, stop_when=never)
        run.run("next", ["true"], 60)

    def is_stopped(run: Session) -> None:
        has_started.wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            run.run_side_by_side(hangs, is_stopped)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert _rows(run) == [("hangs", "failed"), ("next", "left out")]
    assert not limited._RUNNING


def test_rows_are_no_markup(run: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """`[cuda]` would vanish from a table of rich, and `[/` end it with an error."""
    text = "no module in [/opt/x]: pip install 'mmtrain[cuda]'"
    run.add(f"train [{text}]", text)
    assert f"train [{text}]: {text}" in capsys.readouterr().out
    Console(width=200).print(bench_gpu.table([{"case": vars(BenchCase("tiny", 128, "auto")), "problem": text}]))
    assert text in capsys.readouterr().out


def test_the_answer_of_doctor_is_found_between_other_lines() -> None:
    assert first_json('{"a": {"b": 1}}') == {"a": {"b": 1}}
    assert first_json('a library: {note}\n{broken\n{\n  "a": 1\n}\nUserWarning: {bye}\n') == {"a": 1}
    with pytest.raises(ValueError, match="substring"):
        first_json("nothing")


def test_stdout_alone_is_the_answer(run: Session) -> None:
    answer = run.folder / "answer.json"
    ended = run.run("doctor", ["sh", "-c", "echo '{}'; echo a warning >&2"], 60, stdout=answer)
    assert answer.read_text() == "{}\n"
    assert ended.output == "a warning\n"


@pytest.mark.parametrize("free_gib", [10, 30])
def test_a_run_needs_room_for_its_checkpoints(run: Session, monkeypatch: pytest.MonkeyPatch, free_gib: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free_gib * 2**30))
    assert training_run.has_disk(run) == (free_gib == 30)
    [finding] = run.findings
    assert finding.found.startswith(f"{free_gib}.0 GiB are free in {run.work}, and the run's checkpoints take 18 GiB")
    assert finding.verdict == ("ok" if free_gib == 30 else "failed")


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


def test_the_first_cases_fit_on_every_large_gpu() -> None:
    rows = list(plan_findings())
    assert len(rows) == 2 * len(gpus_of_first_cases()) == 22
    assert {row.verdict for row in rows} == {""}
    [row] = [row for row in rows if row.check == "plan on h200-141g: 0.6B + 3B, 8192 tokens"]
    assert row.found.endswith("127 GiB, 0 layers recomputed")
    too_large = plan_finding(BenchCase("0.6B + 7B, partly frozen", 8192, "auto", "auto"), "h100-80g")
    assert too_large.verdict == "failed"
    assert too_large.found.startswith("no plan: ")


def test_a_card_of_80_gb_gets_smaller_cases() -> None:
    best, other = ("auto", "auto"), ("varlen", "auto")
    small, large = ([case.name for case in first_cases(gib, best, other)] for gib in (79.6, 139.8))
    assert small[0] == "0.6B + 1.5B, 4096 tokens, auto, auto"
    assert large[:2] == ["0.6B + 3B, 8192 tokens, auto, auto", "0.6B + 3B, 8192 tokens, varlen, auto"]


@pytest.mark.parametrize(
    ("code", "best", "other"),
    [(0, "auto", "varlen"), (1, "varlen", "varlen"), (-11, "varlen", "varlen"), (None, "varlen", "varlen")],
)
def test_cases_do_not_run_on_attention_that_is_broken(
    run: Session, monkeypatch: pytest.MonkeyPatch, code: int | None, best: str, other: str
) -> None:
    monkeypatch.setattr(fast, "backend_problems", lambda *_: {"flash_attn_4": None})
    monkeypatch.setattr(Session, "run_rows", lambda *_: code)
    choices = fast.choose_kernels(run)
    assert [choice[0] for choice in choices] == [best, other]
    assert len(set(choices)) == 2
    monkeypatch.setattr(fast, "backend_problems", lambda *_: {"flash_attn_4": "it is not installed"})
    assert fast.choose_kernels(run) == (("auto", "auto"), ("auto", "torch"))
    assert _rows(run) == [("flash_attn_4", "left out")]


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


@pytest.mark.parametrize(("difference", "code"), [(1e-2, 0), (5e-2, 0), (0.1, 1), (float("nan"), 1), ("no heads", 0)])
def test_only_what_computes_nonsense_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float | str, code: int
) -> None:
    rows = [correctness.Row("bf16", difference, correctness.ATTENTION_TOLERANCE[torch.bfloat16])]
    monkeypatch.setattr(flash_attn_4, "attention_rows", lambda *_: iter(rows))
    monkeypatch.setattr(sys, "argv", ["flash_attn_4", str(tmp_path / "rows.json")])
    assert flash_attn_4.main() == code
    assert json.loads((tmp_path / "rows.json").read_text())[0]["check"] == "bf16"


def test_another_package_called_scripts_cannot_win() -> None:
    """Any regular package on the path would win over a folder without `__init__.py`."""
    assert (ROOT / "scripts" / "__init__.py").exists()


def test_versions_that_were_never_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.versions_out_of_bounds() == []
    right_version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.25.1" if n == "typer" else right_version(n))
    assert requirements.versions_out_of_bounds() == ["typer 0.25.1 (<1,>=0.29.2)"]


def test_the_compiler_of_flash_attention_4_is_found_where_pip_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site" / "nvidia_cutlass_dsl" / "dsl_packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    first_gpu.use_packages(tmp_path / "site")
    first_gpu.use_packages(tmp_path / "none")
    assert sys.path.count(str(packages)) == 1
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), "elsewhere", str(packages)]


def test_parts_join_to_the_same_bytes(tmp_path: Path) -> None:
    content = {pack.ARCHIVE: {"megatron.py": b"a" * 100}, pack.PIECES: {"flash.so": bytes(range(256)) * 4000}}
    for name, files in content.items():
        with tarfile.open(tmp_path / name, "w:xz", preset=0) as archive:
            for file, written in files.items():
                (tmp_path / file).write_bytes(written)
                archive.add(tmp_path / file, f"{pack.SITE}/{file}")
    whole, pieces = tmp_path / pack.ARCHIVE, tmp_path / pack.PIECES
    part_bytes = whole.stat().st_size + pack.MIB // 16 + pieces.stat().st_size // 3 + 1
    parts = pack.split(whole, pieces, tmp_path / "packed", part_bytes)
    assert [part.name for part in parts] == ["part-1", "part-2", "part-3"]
    assert max(sum(file.stat().st_size for file in part.iterdir()) for part in parts) <= part_bytes
    work = tmp_path / "work"
    for number, part in enumerate(parts, 1):  # each comes with a call of its own
        shutil.copytree(part, tmp_path / f"call-{number}" / part.name)
        said = pack.unpack(tmp_path / f"call-{number}", work)
        assert (said[0].endswith("by an earlier call")) == (number > 1)
        assert ("must wait" in said[1]) == (number < 3)
    for files in content.values():
        for file, written in files.items():
            assert (work / pack.SITE / file).read_bytes() == written
    (tmp_path / "call-2" / "part-2" / f"{pack.PIECES}.2").write_bytes(b"torn")
    shutil.rmtree(work)
    for number in (3, 1):
        pack.unpack(tmp_path / f"call-{number}", work)
    assert "attention.tar.xz is damaged" in pack.unpack(tmp_path / "call-2", work)[1]
    (tmp_path / "call-2" / "part-2" / pack.ARCHIVE).write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"mmtrain\.tar\.xz is damaged"):
        pack.unpack(tmp_path / "call-2", tmp_path / "other")
    with pytest.raises(ValueError, match="a part must hold more than"):
        pack.split(whole, pieces, tmp_path / "packed", 1000)
    with pytest.raises(ValueError, match="holds no folder part-1"):
        pack.unpack(tmp_path / "nowhere", work)


def test_compiled_kernels_travel_with_their_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(packages: tuple[str, ...], site: Path) -> None:
        site.mkdir()
        (site / packages[0]).write_text("a wheel")

    monkeypatch.setattr(pack, "download", download)
    kernels = tmp_path / "packed" / limited.KERNELS_FOLDER
    kernels.mkdir(parents=True)
    (kernels / "forward.o").write_bytes(b"cubin")
    work = tmp_path / "work"
    [part] = pack.pack(tmp_path / "packed", 1)
    assert len(pack.unpack(part.parent, work)) == 2
    assert {file.name for file in (work / pack.SITE).iterdir()} == {
        pack.MMTRAIN_PACKAGES[0],
        pack.ATTENTION_PACKAGES[0],
    }
    [folder] = [value for key, value in limited.kernel_cache(work).items() if key.endswith("DIR")]
    assert (Path(folder) / "forward.o").read_bytes() == b"cubin"


def test_packed_versions_are_those_that_mmtrain_allows() -> None:
    there = {"python_version": pack.PYTHON_VERSION, "python_full_version": f"{pack.PYTHON_VERSION}.0"}
    allowed = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, requirements.requirements("train", "cuda"))
        if requirement.marker is None or requirement.marker.evaluate(there)
    }
    packed = dict(name.split("==") for name in (*pack.MMTRAIN_PACKAGES, *pack.ATTENTION_PACKAGES))
    checked = packed.keys() & allowed
    assert checked == {"megatron-core", "pydantic", "liger-kernel", "flash-attn-4"}
    assert [name for name in checked if not allowed[name].contains(packed[name], prereleases=True)] == []


def test_kernels_are_compiled_for_all_that_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = compile_attention.cases()
    assert {(16, 2, 128, True, 0), (16, 16, 80, False, 0)} <= set(cases), "0.6B + 3B"
    assert set(correctness.HEAD_WIDTHS) <= {width for *_, width, _, window in cases if window == 40}
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "has no CUDA" in str(compile_attention.missing_for_compiling())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    assert "not installed here: flash-attn-4" in str(compile_attention.missing_for_compiling())


def test_nothing_is_stopped_by_a_wrong_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def computes_nonsense(run: Session) -> None:
        run.add("one", "differs by 1.0e+00, allowed 1e-03", "WRONG")
        raise OSError("and the disk is full")

    monkeypatch.setattr(right, "check", computes_nonsense)
    monkeypatch.setattr(fast, "measure", lambda run: run.add("MFU", "50%"))
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", "--dry-run", "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert first_gpu.main() == 1
    rows = json.loads((tmp_path / "results-all.json").read_text())["rows"]
    assert [row["verdict"] for row in rows[-4:]] == ["WRONG", "failed", "", ""]
    assert rows[-2]["check"] == "MFU"
    assert "WRONG    one: differs by" in (tmp_path / "progress-all.txt").read_text()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first-gpu")


@pytest.mark.long  # environment B of CI runs the same
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("part", "rows"), [("right", 40), ("fast", 12)])
def test_each_part_runs_dry(out: Path, monkeypatch: pytest.MonkeyPatch, part: str, rows: int) -> None:
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", "--dry-run", "--part", part, "--out", str(out)])
    assert first_gpu.main() == 0, (out / f"progress-{part}.txt").read_text()
    assert len(json.loads((out / f"results-{part}.json").read_text())["rows"]) >= rows
