"""Loading: ancestors, the environment, overrides, paths and origins."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mmtrain.errors import RecipeError
from mmtrain.recipe import load_recipe

Write = Callable[[str, str], Path]


def refusal(path: Path, *overrides: str, **env: str) -> str:
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, overrides, env)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_a_recipe_loads(base: Path) -> None:
    recipe = load_recipe(base, env={}).recipe
    assert recipe.train.optimizer.lr == 1e-3
    assert recipe.model.vision is not None
    assert recipe.model.vision.heads == 4


def test_the_default_environment_is_that_of_the_process(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "77")
    assert load_recipe(base, ["train.steps=${env:STEPS}"]).recipe.train.steps == 77


def test_extends_merges_mappings_and_replaces_lists(base: Path, write: Write) -> None:
    child = write("child.yaml", "extends: base.yaml\ntrain: {steps: 20}\ndata:\n  sources: [{path: a}, {path: b}]\n")
    recipe = load_recipe(child, env={}).recipe
    assert (recipe.train.steps, recipe.train.global_batch) == (20, 4)
    assert [source.path.name for source in recipe.data.sources] == ["a", "b"]


def test_later_ancestors_win_and_the_file_itself_last(base: Path, write: Write) -> None:
    write("fast.yaml", "train: {steps: 1, seed: 1}\n")
    write("big.yaml", "train: {steps: 2, seed: 2, global_batch: 8}\n")
    child = write("child.yaml", "extends: [base.yaml, fast.yaml, big.yaml]\ntrain: {seed: 3}\n")
    train = load_recipe(child, env={}).recipe.train
    assert (train.steps, train.seed, train.global_batch) == (2, 3, 8)


def test_null_removes_a_section(base: Path, write: Write) -> None:
    child = write("child.yaml", "extends: base.yaml\nmodel: {vision: null}\n")
    assert load_recipe(child, env={}).recipe.model.vision is None


def test_a_cycle_of_extends_is_rejected_with_its_chain(base: Path, write: Write) -> None:
    a = write("a.yaml", "extends: sub/b.yaml\n")
    b = write("sub/b.yaml", "extends: ../a.yaml\n")
    assert f"{a} -> {b} -> {a}" in refusal(a)


def test_many_ancestors_in_a_diamond_are_read_once_each(base: Path, write: Write) -> None:
    write("0.yaml", "extends: base.yaml\n")
    for i in range(1, 25):  # 2**24 paths to the base
        write(f"{i}.yaml", f"extends: [{i - 1}.yaml, {i - 1}.yaml]\n")
    assert load_recipe(base.parent / "24.yaml", env={}).recipe.name == "tiny"


def test_a_missing_ancestor_is_named_with_the_line_that_asks_for_it(base: Path, write: Write) -> None:
    child = write("child.yaml", "name: x\nextends: [base.yaml, nope.yaml]\n")
    assert f"{child}:2: extends: there is no file {base.parent / 'nope.yaml'}" in refusal(child)


def test_extends_accepts_only_paths(base: Path, write: Write) -> None:
    assert "extends: found 3; allowed: the path of a recipe" in refusal(write("c.yaml", "extends: [base.yaml, 3]\n"))


def test_data_paths_start_at_the_folder_of_their_file(
    base: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sub/child.yaml", "extends: ../base.yaml\ndata:\n  validation: [{path: v.json, image_root: ../im}]\n")
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    data = load_recipe(Path("../sub/child.yaml"), ["data.sources.1.path=mine.json"], {}).recipe.data
    assert data.tokenizer == base.parent / "tok.json"
    assert [source.path for source in data.sources] == [base.parent / "train.json", elsewhere / "mine.json"]
    assert data.validation[0].path == base.parent / "sub/v.json"
    assert data.validation[0].image_root == base.parent / "im"


def test_an_absolute_path_stays(base: Path) -> None:
    assert load_recipe(base, ["data.tokenizer=/x/t.json"], {}).recipe.data.tokenizer == Path("/x/t.json")


def test_a_cost_table_is_a_path_from_its_file_or_the_name_of_a_shipped_table(base: Path, write: Write) -> None:
    child = write("deep/child.yaml", "extends: ../base.yaml\ncluster: {costs: costs.json}\n")
    assert load_recipe(child, [], {}).recipe.cluster.costs == child.parent / "costs.json"
    assert load_recipe(child, ["cluster.costs=c.json"], {}).recipe.cluster.costs == Path.cwd() / "c.json"
    assert load_recipe(child, ["cluster.costs=cpu-core"], {}).recipe.cluster.costs == Path("cpu-core")
    assert load_recipe(child, ["cluster.costs=tables/mine"], {}).recipe.cluster.costs == Path.cwd() / "tables" / "mine"


def test_origins_name_line_or_override(base: Path, write: Write) -> None:
    child = write("child.yaml", "extends: base.yaml\ntrain:\n  seed: 5\n")
    loaded = load_recipe(child, ["train.steps=3"], {})
    assert loaded.origin("train.steps") == "--set train.steps=3"
    assert loaded.origin("train.seed") == f"{child}:3"
    assert loaded.origin("train.global_batch") == f"{base}:12"
    assert loaded.origin("data.sources.0.path") == f"{base}:7"
    assert loaded.origin("train.precision") == "default"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.optimizer.clip_norm=null", lambda r: r.train.optimizer.clip_norm is None),
        ("train.optimizer.lr=3e-4", lambda r: r.train.optimizer.lr == 3e-4),
        ("train.optimizer.betas=[0.8, 0.99]", lambda r: r.train.optimizer.betas == (0.8, 0.99)),
        ("parallel.llm={tp: 2, dp: 2}", lambda r: (r.parallel.llm.tp, r.parallel.llm.dp) == (2, 2)),
        ("data.sources.0.weight=2", lambda r: r.data.sources[0].weight == 2.0),
        ("data.validation.0.path=v.json", lambda r: len(r.data.validation) == 1),
        ("run_dir=a=b", lambda r: r.run_dir == Path("a=b")),
    ],
)
def test_an_override_sets_a_value(base: Path, override: str, read: Callable[..., bool]) -> None:
    assert read(load_recipe(base, [override], {}).recipe)


def test_a_later_override_wins_and_may_build_on_an_earlier(base: Path) -> None:
    overrides = ["model.vision=null", "model.vision={layers: 1, hidden: 8, heads: 1, ffn: 8}", "model.vision.layers=3"]
    vision = load_recipe(base, overrides, {}).recipe.model.vision
    assert vision is not None
    assert (vision.layers, vision.hidden) == (3, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "allowed: a.b.0=value"),
        ("train.steps=", "allowed: a.b.0=value"),
        ("train..steps=1", "allowed: a.b.0=value"),
        ("=1", "allowed: a.b.0=value"),
        ("data.sources.4.path=x", "data.sources.4: found '4' in a list of 1; allowed: an index from 0 to 1"),
        ("data.sources.first.path=x", "data.sources.first: found 'first' in a list of 1"),
        ("data.sources.-1.path=x", "data.sources.-1: found '-1' in a list of 1"),
        ("name.x.y=1", "name: is 'tiny', not a mapping or a list, so name.x.y cannot be set"),
        ("train.stps=1", "train.stps: unknown key; did you mean steps?"),
        ("train.steps=${env:NOPE}", "train.steps: the environment variable NOPE is not set"),
        ("data.image={size: 1, size: 2}", "data.image.size: written twice"),
    ],
)
def test_bad_overrides(base: Path, override: str, message: str) -> None:
    text = refusal(base, override)
    assert message in text
    assert f"(--set {override})" in text
    assert ": 1 problem\n" in text


def test_an_override_that_is_not_yaml_is_named(base: Path) -> None:
    assert refusal(base, "train.steps=[1").startswith("--set train.steps=[1: not valid YAML")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{path}: the file is empty"),
        ("# nothing\n", "{path}: the file is empty"),
        ("- a\n", "{path}:1: found a list at the top level; allowed: a mapping"),
        ("hello", "{path}:1: found 'hello' at the top level"),
        ("name: [\n", "{path}:2: not valid YAML"),
    ],
)
def test_unusable_files_are_rejected_with_the_reason(write: Write, text: str, message: str) -> None:
    path = write("r.yaml", text)
    assert message.format(path=path) in refusal(path)


def test_missing_files_folders_and_binary_files_are_rejected(tmp_path: Path) -> None:
    missing, binary = tmp_path / "no.yaml", tmp_path / "b.yaml"
    binary.write_bytes(b"name: a\nx: \xff\xfe\n")
    assert refusal(missing) == f"{missing}: cannot read the recipe: {os.strerror(2)}"
    assert refusal(tmp_path) == f"{tmp_path}: cannot read the recipe: {os.strerror(21)}"
    assert refusal(binary).startswith(f"{binary}:2: not UTF-8 text")


def test_a_byte_order_mark_is_no_content(base: Path) -> None:
    base.write_bytes(b"\xef\xbb\xbf" + base.read_bytes())
    assert load_recipe(base, env={}).recipe.name == "tiny"
