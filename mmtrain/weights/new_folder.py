"""Describe a run that started from random weights as a folder of the family that its model belongs to."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtrain.data.text.chat_folder import write_chat_folder
from mmtrain.data.text.folder_templates import template_files
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.families.choose_family import NewFolder, choose_family
from mmtrain.families.folder_files import CONFIG_FILE, CONVERSATION_FILES, GENERATION_FILE, TEMPLATE_FOLDER
from mmtrain.families.new_model import NewModel
from mmtrain.recipe import Recipe
from mmtrain.recipe.llm_settings import LlmSettings
from mmtrain.recipe.modalities import VISION


def describe_new_folder(recipe: Recipe) -> NewFolder:
    """Return the family of the recipe's model and the JSON files of its folder.

    Raises UserError for a model that no family can state, and DataError for its tokenizer.
    """
    tokenizer = load_recipe_tokenizer(recipe)
    return choose_family(
        NewModel(
            units=_units(recipe),
            image=recipe.data.image.model_dump(),
            feature_tokens={modality: token_ids[0] for modality, token_ids in tokenizer.item_ids.items()},
            video_token=tokenizer.item_ids.get(VISION.name, (None,))[-1],
            end_ids=tuple(sorted(tokenizer.end_ids)),
            max_tokens=recipe.data.seq_len,
        )
    )


def write_new_files(recipe: Recipe, folder: NewFolder, draft: Path, torch_dtype: str) -> None:
    """Write config, processors, tokenizer and chat template. Raises DataError for the tokenizer."""
    write_tokenizer_files(recipe.data.tokenizer_path, draft)
    for name, content in folder.files.items():
        stated = {**content, "torch_dtype": torch_dtype} if name == CONFIG_FILE else content
        (draft / name).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")


def write_tokenizer_files(source: Path, draft: Path) -> None:
    """Write tokenizer, chat template and the tokens that end an answer, of a folder or a file of mmtrain's chat format.

    Raises DataError for one that is gone or no tokenizer.
    """
    if not source.is_dir():
        write_chat_folder(draft, source)
        return
    for name in (*CONVERSATION_FILES, GENERATION_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    copy_further_templates(source, draft)


def copy_further_templates(source: Path, draft: Path) -> None:
    """Copy the chat templates that have files of their own, beside that of the folder."""
    for file in template_files(source):
        (draft / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(file, draft / TEMPLATE_FOLDER / file.name)


def _units(recipe: Recipe) -> dict[str, Mapping[str, Any]]:
    """Return the settings of every unit, without values that stand for others; a generator has a folder of its own."""
    model = recipe.model
    units: dict[str, Mapping[str, Any]] = {name: unit.model_dump() for name, unit in model.all_encoders.items()}
    units["llm"] = {**model.llm.model_dump(), **_resolved(model.llm)}
    return units


def _resolved(llm: LlmSettings) -> dict[str, int]:
    return {"kv_heads": llm.kv_heads or llm.heads, "head_dim": llm.head_dim or llm.hidden // llm.heads}
