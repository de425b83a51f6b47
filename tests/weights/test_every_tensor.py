"""Each tensor of a folder is read, carried along, known to hold nothing, or named; each that is missing is named."""

import json
import re
from pathlib import Path

import pytest

from mmtrain.errors import ModelFolderError
from mmtrain.families import FAMILIES, ModelFolder, read_model_folder
from mmtrain.families.stored_tensors import StoredWeight
from mmtrain.families.weight_layouts import respell
from mmtrain.weights import FolderTensors
from mmtrain.weights.match_tensors import match_tensors

# Each spelling of each family; the first of a family in `make test`.
LAYOUTS = [
    pytest.param(name, number, marks=[pytest.mark.slow] if number else [])
    for name, family in FAMILIES.items()
    for number in range(len(family.spellings))
]
BUFFERS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.embeddings.position_ids")


def _folder(path: Path, family: str) -> ModelFolder:
    (path / "config.json").write_text(json.dumps(FAMILIES[family].tiny["config.json"]))
    return read_model_folder(path)


def _tensors(folder: ModelFolder, spelling: int) -> dict[str, StoredWeight]:
    """Return the headers of all tensors of a tiny model in one spelling of its family."""
    sources = [*folder.family.weights(folder.settings), *folder.settings.carried]
    return {
        tensor: StoredWeight("model.safetensors", "F32", shape, (0, 0))
        for source in respell(sources, folder.family.spellings[spelling])
        for tensor, shape in source.tensor_shapes().items()
    }


def _error(folder: ModelFolder, tensors: dict[str, StoredWeight]) -> str:
    with pytest.raises(ModelFolderError) as caught:
        match_tensors(folder, FolderTensors(folder.path, tensors))
    return str(caught.value)


@pytest.mark.parametrize(("family", "spelling"), LAYOUTS)
def test_each_tensor_is_needed_and_no_other_is_passed_over(family: str, spelling: int, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    tensors = _tensors(folder, spelling)
    whole = match_tensors(folder, FolderTensors(tmp_path, tensors))
    assert not whole.passed_over
    used = {tensor for source in whole.sources.values() for tensor in source.tensor_shapes()}
    assert used | set(whole.carried) == tensors.keys()
    for name in sorted({re.sub(r"\d+", "1", tensor) for tensor in tensors} & tensors.keys()):  # one layer of each kind
        fewer = {tensor: weight for tensor, weight in tensors.items() if tensor != name}
        assert f"{name}: missing" in _error(folder, fewer)
        stray = name.replace(".weight", ".gate").replace(".bias", ".gate")
        if stray not in tensors:
            assert f"{stray}: not a tensor of this model" in _error(folder, {**tensors, stray: tensors[name]})


@pytest.mark.parametrize("family", FAMILIES)
def test_only_buffers_are_passed_over_and_they_are_told(family: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    tensors = _tensors(folder, 0)
    buffer = StoredWeight("model.safetensors", "F32", (4,), (0, 0))
    known = [name for name in BUFFERS if name.endswith(folder.family.ignored(folder.settings))]
    assert known
    matched = match_tensors(folder, FolderTensors(tmp_path, {**tensors, **dict.fromkeys(known, buffer)}))
    assert matched.passed_over == tuple(sorted(known))


@pytest.mark.parametrize(("family", "unit"), [("llava", "vision"), ("llava", "llm"), ("qwen2_audio", "audio")])
def test_a_unit_needs_its_own_tensors_only_and_knows_them(family: str, unit: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    tensors = _tensors(folder, 0)
    matched = match_tensors(folder, FolderTensors(tmp_path, tensors), unit=unit)
    used = {tensor for source in matched.sources.values() for tensor in source.tensor_shapes()}
    only = FolderTensors(tmp_path, {name: tensors[name] for name in used})
    assert match_tensors(folder, only, unit=unit).sources.keys() == matched.sources.keys()
    stray = (
        next(name for name in sorted(used) if ".layers." in name).replace(".weight", ".gate").replace(".bias", ".gate")
    )
    with pytest.raises(ModelFolderError, match=f"{re.escape(stray)}: not a tensor of this model"):
        match_tensors(folder, FolderTensors(tmp_path, {**tensors, stray: only.tensors[min(used)]}), unit=unit)
