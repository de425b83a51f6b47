"""`scripts/bench_gpu.py` and what it shares with `first_gpu.py`, on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import recipe_fingerprint
from scripts import bench_gpu
from scripts.gpu.cases import MODELS, TOKENS, BenchCase, bench_cases
from scripts.gpu.findings import predicted_allocation_gib
from scripts.gpu.kernel_profile import union_length
from scripts.gpu.limited import Deadline, run_limited
from scripts.gpu.synthetic import SIZES, SyntheticSamples
from tests.plans import plan_recipe


@pytest.mark.parametrize("model", MODELS)
def test_the_models_have_the_sizes_of_their_names_and_fit_on_one_h200(model: str) -> None:
    case = BenchCase(model, TOKENS[0], "auto")
    recipe = case.recipe()
    shape = build_model_shape(recipe)
    assert [unit.name for unit in shape.units] == ["vision", "llm"]
    samples = SyntheticSamples(recipe, SIZES)
    plan = plan_recipe(
        recipe,
        samples.lengths,
        world_size=1,
        hardware="h200-141g",
        recipe_sha256=recipe_fingerprint(recipe),
    )
    assert plan.schedule.num_microbatches["llm"] == case.num_microbatches == 4
    assert 0.3 < plan.predicted.mfu < 0.76
    # Inputs have no margin, and one rank has no communicators.
    [kinds] = plan.predicted.memory_kinds_gib.values()
    [peak_gib] = plan.predicted.peak_memory_gib.values()
    counted_gib = (peak_gib - kinds["inputs"]) / (1 + MEMORY_MARGIN) + kinds["inputs"]
    assert predicted_allocation_gib(plan.predicted) == pytest.approx(counted_gib, rel=1e-3)


def test_every_combination_is_a_case_and_those_that_say_most_come_first() -> None:
    cases = bench_cases(list(MODELS), TOKENS, ["auto", "sdpa"], ["auto", "torch"], dry=False)
    assert len(cases) == len(set(cases)) == len(MODELS) * len(TOKENS) * 4
    models, choices, lengths = cases[:3], cases[3:6], cases[6:9]
    assert [case.model for case in models] == [case.model for case in lengths] == list(MODELS)
    assert {(case.attention, case.kernels) for case in (*models, *lengths)} == {("auto", "auto")}
    assert [case.tokens for case in (*models, *choices, *lengths)] == [TOKENS[0]] * 6 + [TOKENS[1]] * 3
    assert {(case.model, case.attention, case.kernels) for case in choices} == {
        ("0.6B + 3B", "sdpa", "auto"),
        ("0.6B + 3B", "auto", "torch"),
        ("0.6B + 3B", "sdpa", "torch"),
    }


def test_what_auto_takes_is_no_case_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_gpu.usable_backends(dry=True) == ["auto"]
    assert bench_gpu.usable_kernels(dry=True) == ["auto"]
    assert bench_gpu.automatic_choices(dry=True) == {"attention": "sdpa", "kernels": "torch"}
    usable = {"flash_attn_4": None, "varlen": None, "flash_attn": "not installed", "sdpa": None, "reference": None}
    monkeypatch.setattr(bench_gpu, "backend_problems", lambda *_: usable)
    monkeypatch.setattr(bench_gpu, "choose_backend", lambda *_: "flash_attn_4")
    monkeypatch.setattr(bench_gpu, "fused_problem", lambda _: None)
    assert bench_gpu.usable_backends(dry=False) == ["auto", "varlen", "sdpa"]
    assert bench_gpu.usable_kernels(dry=False) == ["auto", "torch"]


def test_kernels_that_overlap_count_once() -> None:
    assert union_length([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert union_length([]) == 0


def test_a_command_that_takes_too_long_is_ended_and_what_it_said_is_kept(tmp_path: Path) -> None:
    endless = ["sh", "-c", "echo begun; exec sleep 600"]  # starts at once, also on a busy machine
    ended = run_limited(endless, 2, tmp_path / "log")
    assert ended.code is None
    assert ended.last_line == "begun"
    assert Deadline(0).left_s == 0


def test_a_case_without_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench_gpu.run_cases([BenchCase("tiny", 128, "auto", dry=True)], tmp_path, Deadline(0))
    assert [row["problem"] for row in rows] == ["left out: no time"]
    assert "left out: no time" in capsys.readouterr().out
    assert json.loads((tmp_path / bench_gpu.RESULT_FILE).read_text())["cases"] == rows


@pytest.mark.slow
def test_the_dry_run_measures_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dry-run", "--tokens", "128", "--attention", "auto", "--profile", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *arguments])
    assert bench_gpu.main() == 0
    cases = json.loads((tmp_path / bench_gpu.RESULT_FILE).read_text())["cases"]
    assert {row["problem"] for row in cases} == {None}
    for row in cases:
        assert 0 < row["text_steps"]["mfu"] < 1
        assert 0 < row["steps"]["mfu"] < 1
        assert max(row["losses"]) < row["losses"][0] + 0.5, "steps hold different samples, and a few teach nothing yet"
        assert "aten::mm" in row["kernels"]
    assert "tiny, partly frozen" in capsys.readouterr().out
