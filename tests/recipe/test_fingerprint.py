"""A dumped recipe loads back equal, and the fingerprint changes exactly with settings that plans depend on."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.recipe import Recipe, dump_recipe, load_recipe, recipe_fingerprint
from mmtrain.recipe.loading.recipe_loader import plan_settings

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6)
paths = names.filter(lambda n: n not in (".", "..")).map(lambda n: f"/data/{n}")
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    heads = draw(st.sampled_from([1, 2, 4]))
    source = st.fixed_dictionaries({"path": paths, "image_root": st.none() | paths, "weight": st.floats(1e-6, 10_000)})
    lr = draw(st.floats(1e-9, 1))
    return Recipe.model_validate(
        {
            "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
            "model": {
                "vision": draw(st.none() | st.just({"layers": 1, "hidden": 8 * heads, "heads": heads, "ffn": 8})),
                "llm": {
                    "layers": draw(st.integers(1, 10**18)),
                    "hidden": 8 * heads,
                    "heads": heads,
                    "ffn": 8,
                    "vocab": 64,
                    "freeze": draw(st.booleans()),
                },
            },
            "data": {
                "sources": draw(st.lists(source, min_size=1, max_size=3)),
                "tokenizer": draw(paths),
                "seq_len": 4096,
                "image": {"std": draw(st.tuples(positive, positive, positive))},
            },
            "train": {
                "steps": 100,
                "global_batch": 2,
                "optimizer": {
                    "lr": lr,
                    "min_lr": draw(st.floats(0, lr)),
                    "clip_norm": draw(st.none() | positive),
                    "schedule": draw(st.sampled_from(["cosine", "linear", "constant"])),
                },
            },
            "run_dir": draw(st.none() | names),
        }
    )


@given(recipes())
def test_a_dumped_recipe_loads_back_equal(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.yaml"
        path.write_text(dump_recipe(recipe), encoding="utf-8", newline="")
        again = load_recipe(path, env={}).recipe
    assert again == recipe
    assert recipe_fingerprint(again) == recipe_fingerprint(recipe)


def test_a_loaded_recipe_dumps_from_anywhere(base: Path, tmp_path: Path) -> None:
    recipe = load_recipe(base, env={}).recipe
    moved = tmp_path / "elsewhere" / "recipe.yaml"
    moved.parent.mkdir()
    moved.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(moved, env={}).recipe == recipe


@pytest.mark.parametrize(
    ("override", "moves"),
    [
        ("model.llm.layers=3", True),
        ("model.vision.freeze=true", True),
        ("model.vision=null", True),
        ("data.seq_len=4096", True),
        ("data.image.max_pixels=10000", True),
        ("data.sources.0.path=other.json", True),
        ("data.limits.max_member_bytes=1000", True),
        ("data.tokenizer=other.json", True),
        ("parallel.placement=unified", True),
        ("parallel.llm.recompute=all", True),
        ("cluster.ranks=4", True),
        ("train.global_batch=8", True),
        ("train.precision=bf16", True),
        ("name=other", False),
        ("model.llm.lr_scale=0.1", False),
        ("data.max_bad_rate=0.5", False),
        ("data.prefetch=0", False),
        ("data.validation.0.path=v.json", False),
        ("train.steps=11", False),
        ("train.seed=1", False),
        ("train.optimizer.lr=0.1", False),
        ("train.checkpoint.every=7", False),
        ("run_dir=elsewhere", False),
    ],
)
def test_the_fingerprint_covers_what_a_plan_depends_on(base: Path, override: str, moves: bool) -> None:
    before, after = load_recipe(base, env={}).recipe, load_recipe(base, [override], {}).recipe
    assert before != after
    assert (recipe_fingerprint(before) != recipe_fingerprint(after)) == moves
    assert (plan_settings(before) != plan_settings(after)) == moves


def test_the_fingerprint_ignores_the_folders_of_files(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / base.name
    copy.parent.mkdir()
    copy.write_text(base.read_text(encoding="utf-8"), encoding="utf-8")
    original, copied = load_recipe(base, env={}).recipe, load_recipe(copy, env={}).recipe
    assert original.data.sources[0].path != copied.data.sources[0].path
    assert recipe_fingerprint(original) == recipe_fingerprint(copied)
    assert plan_settings(original) == plan_settings(copied)


def test_the_fingerprint_is_stable(base: Path) -> None:
    recipe = load_recipe(base, ["data.tokenizer=/t.json", "data.sources=[{path: /s.json}]"], {}).recipe
    assert recipe_fingerprint(recipe) == recipe_fingerprint(Recipe.model_validate_json(recipe.model_dump_json()))
    assert len(recipe_fingerprint(recipe)) == 64
