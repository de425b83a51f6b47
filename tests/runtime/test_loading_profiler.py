"""What preparing data takes from a rank without a core to spare, as `mmtrain profile` measures it."""

from pathlib import Path

import pytest

from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.machine_limits import CORE_COUNT_VARIABLE
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.profiling.loading_profiler import measure_loading

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("demo")
    generate_demo(folder, seed=0, train=200, heldout=10)
    sources = [f"data.sources=[{{path: {folder / 'train.json'}}}]", f"data.tokenizer={folder / 'tokenizer.json'}"]
    return load_recipe(DEMO, [*sources, "data.validation=[]", "train.validate_every=0"]).recipe


def test_each_unit_has_its_own_cost_of_a_token(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_COUNT_VARIABLE, "2")
    seconds = {entry.layer: entry.token_s for entry in measure_loading(recipe, build_index(recipe), 2)}
    assert set(seconds) == {"patch_embed", "embedding"}
    assert all(1e-7 < token_s < 1e-3 for token_s in seconds.values())


def test_ranks_with_cores_to_spare_prepare_data_beside_their_passes(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_COUNT_VARIABLE, "4")
    assert measure_loading(recipe, build_index(recipe), 2) == ()


def test_a_recipe_of_stated_lengths_prepares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_COUNT_VARIABLE, "2")
    stated = tmp_path / "lengths.csv"
    stated.write_text("text,vision\n" + "20,4x4\n" * 40, encoding="utf-8")
    settings = ["data.tokenizer=null", f"data.sources=[{{path: {stated}, format: lengths}}]", "data.validation=[]"]
    recipe = load_recipe(DEMO, [*settings, "train.validate_every=0"]).recipe
    assert measure_loading(recipe, build_index(recipe), 2) == ()
