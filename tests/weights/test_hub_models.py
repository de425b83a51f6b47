"""`model.hf: org/name`, against a stand-in of the hub."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from mmtrain.errors import ModelFolderError, RecipeError
from mmtrain.families.hub_models import fetch_weights
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.weights import FolderTensors
from tests.distributed import fork_ranks
from tests.waiting import poll
from tests.weights.comparison import pretrained_of, unit_stage
from tests.weights.hub_server import COMMIT, StandInHub, serve_model
from tests.weights.pretrained import qwen2, save

REPO = "some-org/tiny-model.1"
NOT_FETCHED = {"README.md", "pytorch_model.bin", "modeling.py", "original/params.json", "original/model.safetensors"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in several files of weights, with files beside them that must not be fetched."""
    folder = save(qwen2(), tmp_path_factory.mktemp("hub") / "model", max_shard_size="40KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "original").mkdir()
    for name in NOT_FETCHED:
        (folder / name).write_text("not this")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with serve_model(REPO, model) as served:
        for name, value in served.constants(tmp_path / "cache").items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield served


def _recipe(folder: Path, name: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
name: tiny
model: {{hf: "{name}"}}
data: {{sources: [{{path: train.json}}], tokenizer: tok.json, seq_len: 64}}
train: {{steps: 1, global_batch: 1, optimizer: {{lr: 1e-3}}}}
"""
    )
    return load_recipe(path, env={}).recipe


@pytest.mark.parametrize("name", [REPO, f"{REPO}@v1", f"{REPO}@{COMMIT}"])
def test_a_recipe_fetches_the_config_and_training_the_weights(
    hub: StandInHub, model: Path, tmp_path: Path, name: str
) -> None:
    recipe = _recipe(tmp_path, name)
    folder = recipe.model.hf
    assert folder is not None
    assert folder.name == COMMIT
    assert recipe.model.llm.hidden == 48
    small = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    small.add("additional_chat_templates/tool_use.jinja")
    assert set(hub.fetched) == small | {"model.safetensors.index.json"}

    hub.fetched.clear()
    stage = unit_stage(recipe)
    assert torch.equal(dict(stage.named_parameters())["layers.1.input_layernorm.weight"], _first_norm(model))
    assert sorted(hub.fetched) == sorted(file.name for file in model.glob("*.safetensors"))
    assert not NOT_FETCHED & {str(file.relative_to(folder)) for file in folder.rglob("*")}

    hub.fetched.clear()
    assert _recipe(tmp_path, name).model.hf == folder
    pretrained_of(recipe).close()
    assert hub.fetched == []


def _first_norm(model: Path) -> torch.Tensor:
    tensors = FolderTensors.of(model)
    return tensors.read("model.layers.0.input_layernorm.weight", ((0, 48),))


def test_the_folder_that_a_run_saved_fetches_the_weights_of_its_commit(hub: StandInHub, tmp_path: Path) -> None:
    folder = _recipe(tmp_path, REPO).model.hf
    saved = _recipe(tmp_path, str(folder))
    assert saved.model.hf == folder
    pretrained_of(saved).close()
    assert any(name.endswith(".safetensors") for name in hub.fetched)


def test_a_folder_of_the_same_name_takes_precedence(hub: StandInHub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "some-org").mkdir()
    (tmp_path / REPO).symlink_to(model)
    recipe = _recipe(tmp_path, REPO)
    assert recipe.model.hf == tmp_path / REPO
    pretrained_of(recipe).close()
    assert hub.fetched == []


def test_the_cache_serves_without_a_network(hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe(tmp_path, REPO)
    pretrained_of(recipe).close()
    hub.fetched.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert _recipe(tmp_path, REPO).model.hf == recipe.model.hf
    pretrained_of(recipe).close()
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some-org/other", "there is no folder some-org/other, and the hub at http://127.0.0.1:"),
        (f"{REPO}@v2", f"{REPO} of the hub at .* has no branch, tag or commit v2"),
    ],
)
def test_a_model_or_revision_that_does_not_exist_is_named(
    hub: StandInHub, tmp_path: Path, name: str, text: str
) -> None:
    with pytest.raises(RecipeError, match=rf"model\.hf: {text}"):
        _recipe(tmp_path, name)


def test_a_gated_model_says_where_its_terms_are(hub: StandInHub, tmp_path: Path) -> None:
    hub.is_gated = True
    with pytest.raises(RecipeError, match=rf"is gated: accept its terms at {hub.url}/{REPO}, then log in"):
        _recipe(tmp_path, REPO)


def test_without_network_or_package_the_message_says_what_to_do(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(RecipeError, match=rf"HF_HUB_OFFLINE forbids it\): .* `hf download {REPO}`"):
            _recipe(tmp_path, REPO)
    recipe = _recipe(tmp_path, REPO)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelFolderError, match=r"model\.hf: .* complete in the cache"):
            pretrained_of(recipe)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RecipeError, match=r"pip install 'mmtrain\[hf\]'"):
        _recipe(tmp_path, REPO)


def test_a_model_with_pickled_weights_only_is_rejected(tmp_path: Path, hub: StandInHub, model: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((model / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_text("pickle")
    hub.folder = pickled
    recipe = _recipe(tmp_path, REPO)
    with pytest.raises(ModelFolderError, match=rf"{REPO} of the hub has no model\.safetensors"):
        pretrained_of(recipe)


def test_folders_outside_of_the_cache_are_left_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    fetch_weights(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["other.safetensors"]


def _fetch_as_one_of_two(rank: int, _size: int, _: Path, constants: dict[str, object], folder: Path) -> dict[str, str]:
    """Load the recipe and its weights; return the sum of every file of the model's folder."""
    for name, value in constants.items():
        setattr(huggingface_hub.constants, name, value)
    own = folder / f"rank-{rank}"
    own.mkdir()
    model = _recipe(own, REPO).model.hf
    assert model is not None
    (own / "fetches-weights").touch()
    fetch_weights(model)
    FolderTensors.of(model).close()
    return _sums(model)


def _sums(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_ranks_that_fetch_at_once_share_what_one_of_them_fetches(model: Path, tmp_path: Path) -> None:
    """No byte of weights is sent before both processes have asked for weights."""

    def wait_for_both(name: str) -> None:
        if name.endswith(".safetensors"):
            poll(lambda: len(list(tmp_path.glob("rank-*/fetches-weights"))) == 2)

    with serve_model(REPO, model) as hub:
        hub.before_sending = wait_for_both
        sums = fork_ranks(2, _fetch_as_one_of_two, hub.constants(tmp_path / "cache"), tmp_path)
    assert sums[0] == sums[1]
    assert sums[0] == {name: total for name, total in _sums(model).items() if name not in NOT_FETCHED}
    assert sorted(hub.fetched) == sorted(sums[0]), "each file is sent once"
