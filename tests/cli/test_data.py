"""`mmtrain data stats` and `mmtrain data group`, on files on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.recipe import load_recipe
from tests.cli.conftest import RunMmtrain

RECIPE = Path(__file__).parents[2] / "recipes/demo.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(made, seed=1, train=120, heldout=4)
    return made


def test_stats_counts_two_sources_together(run_mmtrain: RunMmtrain, folder: Path, tmp_path: Path) -> None:
    done = run_mmtrain(
        "data", "stats", folder / "train.json", folder / "heldout.json", "--png", tmp_path / "stats.png", "--json"
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["samples"] == 124
    assert output["spreads"][0]["name"] == "characters of text"
    assert output["quarantined"] == {}
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_stats_with_a_recipe_count_tokens(run_mmtrain: RunMmtrain, folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: {RECIPE}\ndata: {{tokenizer: {folder}/tokenizer.json}}\n")
    done = run_mmtrain("data", "stats", folder / "train.json", "--recipe", recipe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LLM tokens: ")
    assert "\nvision tokens in " in done.stdout
    assert "120 samples, none quarantined" in done.stdout
    assert "Composition of samples: shares of their LLM tokens" in done.stdout
    as_json = run_mmtrain("data", "stats", folder / "train.json", "--recipe", recipe, "--json")
    shares = json.loads(as_json.stdout)["composition"]
    assert [share["unit"] for share in shares] == ["vision", "text"]
    assert sum(share["of_all_tokens"] for share in shares) == pytest.approx(1)
    assert all(sum(share["counts"]) == 120 for share in shares)


def test_stats_of_a_recipe_show_which_samples_only_several_ranks_can_hold(
    run_mmtrain: RunMmtrain, folder: Path
) -> None:
    values = [f"data.sources.0.path={folder}/train.json", f"data.tokenizer={folder}/tokenizer.json", "data.seq_len=100"]
    values += ["parallel.placement=unified", "parallel.llm.cp=2"]
    settings = [part for value in values for part in ("--set", value)]
    done = run_mmtrain("data", "stats", "--recipe", RECIPE, *settings, "--json")
    assert done.returncode == 0, done.stderr
    [entry] = json.loads(done.stdout)["long_samples"]
    index = build_index(load_recipe(RECIPE, values).recipe)
    tokens = np.asarray(index.lengths.tokens)
    assert (entry["ranks"], entry["most_tokens"]) == (2, 50)
    assert 0 < entry["samples"] < 1
    assert entry["samples"] == pytest.approx((tokens > 50).mean())
    assert entry["tokens"] == pytest.approx(tokens[tokens > 50].sum() / tokens.sum())
    shown = run_mmtrain("data", "stats", "--recipe", RECIPE, *settings).stdout
    [row] = [line for line in shown.splitlines() if f"{entry['samples']:.2%}" in line]
    assert f"{entry['tokens']:.2%}" in row


def test_stats_of_a_recipe_show_its_mixture(run_mmtrain: RunMmtrain, folder: Path) -> None:
    sources = (
        f"[{{path: {folder}/train.json, share: {{0: 0.7, 100: 0.2}}}}, "
        f"{{path: {folder}/heldout.json, share: {{0: 0.3, 100: 0.8}}}}]"
    )
    settings = ["--set", f"data.sources={sources}", "--set", f"data.tokenizer={folder}/tokenizer.json"]
    done = run_mmtrain("data", "stats", "--recipe", RECIPE, *settings, "--set", "train.steps=200")
    assert done.returncode == 0, done.stderr
    assert "124 samples, none quarantined" in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if "heldout.json" in line)
    assert [cell.strip() for cell in row.split("│")[2:7:1] if "%" in cell] == ["30.00%", "80.00%"]
    nothing = run_mmtrain("data", "stats")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "name data files, or a recipe" in nothing.stderr


def test_group_compares_the_methods(run_mmtrain: RunMmtrain, folder: Path) -> None:
    settings = [f"data.sources.0.path={folder}/train.json", f"data.tokenizer={folder}/tokenizer.json"]
    overrides = [part for setting in [*settings, "data.grouping=isf"] for part in ("--set", setting)]
    done = run_mmtrain("data", "group", RECIPE, *overrides, "--replicas", 2, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["replicas"] == 2
    assert [row["method"] for row in output["methods"] if row["chosen"]] == ["isf"]
    assert set(output["methods"][0]["dist_ratio"]) == {"llm", "vision"}
    table = run_mmtrain("data", "group", RECIPE, *overrides)
    assert "4 replicas side by side" in table.stdout
    assert "│ isf *" in table.stdout


def test_group_names_samples_of_stated_lengths_by_number(run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("data", "group", RECIPE.parent / "whatif/internvl_26b.yaml", "--set", "data.seq_len=4096")
    assert done.returncode == 0, done.stderr
    assert "the largest is sample " in " ".join(done.stdout.split())


def test_group_shows_isf_by_rounds_and_thresholds(run_mmtrain: RunMmtrain, folder: Path) -> None:
    values = [f"data.sources.0.path={folder}/train.json", f"data.tokenizer={folder}/tokenizer.json"]
    values += ["data.grouping=isf", "data.isf.rounds=3", "data.isf.encoder_budget=items"]
    overrides = [part for value in values for part in ("--set", value)]
    done = run_mmtrain("data", "group", RECIPE, *overrides, "--replicas", 2, "--isf", "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert [row["rounds"] for row in output["rounds"]] == [0, 1, 2, 3]
    compared = json.loads(run_mmtrain("data", "group", RECIPE, *overrides, "--replicas", 2, "--json").stdout)
    [of_recipe] = [row for row in compared["methods"] if row["method"] == "isf"]
    assert output["rounds"][-1]["score"]["dist_ratio"] == of_recipe["dist_ratio"]
    assert of_recipe["pad_ratio"] is None
    assert all(0 < row["score"]["pad_ratio"] < 1 for row in output["rounds"])
    slacks = [row["slack"] for row in output["thresholds"]]
    assert slacks == [1 / 64, 1 / 32, 1 / 16, 1 / 32]
    *exact, one_item = (row["encoder_slack"] for row in output["thresholds"])
    assert exact == [0, 0, 0]
    lengths = build_index(load_recipe(RECIPE, values).recipe).lengths
    num_items = len(lengths.items["vision"].tokens)
    assert one_item == pytest.approx(1 / (368 * num_items // lengths.tokens.sum())), "one of the budget's items"
    table = run_mmtrain("data", "group", RECIPE, *overrides, "--isf").stdout
    assert "ISF with 4 replicas side by side, after each round" in table
    assert "│ 3.12% │" in " ".join(table.split())


def test_a_missing_source_is_one_message(run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("data", "stats", "/no/such.json")
    assert done.returncode == 2
    assert done.stderr.startswith("mmtrain: ")
    assert "/no/such.json" in done.stderr


def test_tiny_model_says_what_it_wrote(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("data", "tiny-model", "qwen2", "--out", tmp_path / "q")
    assert done.returncode == 0, done.stderr
    assert "a tiny qwen2 of 755,840 parameters" in done.stdout
    assert (tmp_path / "q" / "config.json").exists()
