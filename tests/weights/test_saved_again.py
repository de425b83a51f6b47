"""Folders that the installed version of `transformers` opened and saved, twice, are read as the folder before."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.families.weight_layouts import respell
from mmtrain.weights import FolderTensors
from mmtrain.weights.match_tensors import match_tensors
from mmtrain.weights.tiny_model import write_tiny_model
from tests.weights.comparison import content, export_again
from tests.weights.pretrained import qwen2_audio, recipe_from, save


def _described(folder: Path) -> dict[str, Any]:
    read = read_model_folder(folder)
    matched = match_tensors(read, FolderTensors.of(folder))
    data = {section: dict(read.data_settings(section)) for section in read.settings.data}
    return {
        "model": read.settings.model,
        "data": data,
        "ours": sorted(matched.sources),
        "carried": len(matched.carried),
    }


def _save_processor(folder: Path, saved: Path) -> None:
    """Save the processor, or copy it where saving needs torchvision, which is not in every environment."""
    from transformers import AutoProcessor

    try:
        AutoProcessor.from_pretrained(folder).save_pretrained(saved)
    except (ImportError, ValueError, OSError) as error:
        has_no_media = not (folder / "preprocessor_config.json").exists()  # Gemma 4's, whose towers stay aside
        if not has_no_media and "torchvision" not in str(error).lower():
            raise
        for path in folder.glob("*.json"):
            if not (saved / path.name).exists():
                shutil.copyfile(path, saved / path.name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_as_before(family: str, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[family], folder, seed=3, num_train=4)
    first = folder
    for number in range(2):
        saved = tmp_path / f"saved-{number}"
        model_class = getattr(transformers, FAMILIES[family].architectures[0])
        model_class.from_pretrained(folder).save_pretrained(saved)
        _save_processor(folder, saved)
        assert _described(saved) == _described(first)
        folder = saved


@pytest.mark.parametrize("spelling", range(len(FAMILIES["qwen2_audio"].spellings)))
def test_each_spelling_of_qwen2_audio_comes_back(spelling: int, tmp_path: Path) -> None:
    """Versions 5.10 to 5.23 of `transformers` wrote one `model.` more than those before and after."""
    folder = save(qwen2_audio(), tmp_path / "model")
    read, path = read_model_folder(folder), folder / "model.safetensors"
    stored, tensors = match_tensors(read, FolderTensors.of(folder)).sources, load_file(path)
    names = {}
    for source in respell(read.family.weights(read.settings), read.family.spellings[spelling]):
        pairs = zip(stored[source.name].blocks, source.blocks, strict=True)
        names |= {block.tensor: respelled.tensor for block, respelled in pairs}
    assert names.keys() == tensors.keys()
    save_file({names[name]: tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    assert content(export_again(folder, recipe_from(folder))) == content(folder)
