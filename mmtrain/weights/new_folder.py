"""Describe a run that started from random weights as a folder of the family that its model belongs to."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mmtrain.data.text.chat_tokenizer import write_chat_folder
from mmtrain.data.text.folder_templates import find_templates, read_json, template_files
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.data.text.tokenizer_folder import read_tokenizer_folder
from mmtrain.families.family import NewModel
from mmtrain.families.folder_files import (
    CONFIG_FILE,
    CONVERSATION_FILES,
    GENERATION_FILE,
    IMAGE_PROCESSOR_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from mmtrain.families.registry import NewFolder, choose_family
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.modalities import VISION

_CLASS_OF_FILE = "PreTrainedTokenizerFast"  # takes all of `tokenizer.json`
_SETTINGS_OF_CLASSES = ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token")


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
            max_tokens=recipe.data.sample_tokens,
        )
    )


def write_new_files(recipe: Recipe, folder: NewFolder, draft: Path, torch_dtype: str) -> tuple[str, ...]:
    """Write config, processors, tokenizer and chat template; return notes. Raises DataError for the tokenizer."""
    write_tokenizer_files(recipe.data.tokenizer_path, draft)
    for name, content in folder.files.items():
        stated = {**content, "torch_dtype": torch_dtype} if name == CONFIG_FILE else content
        (draft / name).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    if IMAGE_PROCESSOR_FILE in folder.files and not (draft / TEMPLATE_FILE).exists():
        # A processor does not see the template that the settings of a tokenizer hold.
        template = find_templates(draft, has_processor=True).default.source
        (draft / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return _keep_tokenizer(recipe.data.tokenizer_path, draft)


def _keep_tokenizer(source: Path, draft: Path) -> tuple[str, ...]:
    """Let transformers cut text as the run did; return a note if it cannot.

    transformers chooses the class of a tokenizer by the type of the model too: that of a LLaVA takes all of
    `tokenizer.json`, while that of the LLM whose tokenizer it is may take its vocabulary only. Then the file gets what
    the class of training made of it, and the settings of that class are left out.
    """
    if source.is_dir():
        folder = read_tokenizer_folder(source)
        trained, named = folder.tokenizer, folder.special_tokens
    else:
        trained, named = Tokenizer.from_file(str(draft / TOKENIZER_FILE)), {}
    if _opens_as(draft, trained, named):
        return ()
    trained.save(str(draft / TOKENIZER_FILE))
    stated = {**named, **read_json(draft / TOKENIZER_CONFIG_FILE), "tokenizer_class": _CLASS_OF_FILE}
    stated = {key: value for key, value in stated.items() if key not in _SETTINGS_OF_CLASSES}
    (draft / TOKENIZER_CONFIG_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    if _opens_as(draft, trained, named):
        return ()
    model_type = read_json(draft / CONFIG_FILE).get("model_type")
    return (
        f"for models of the type {model_type}, AutoTokenizer cuts text in its own way, whatever the tokenizer says; "
        "open this one by PreTrainedTokenizerFast.from_pretrained, or its ids are not those of training",
    )


def _opens_as(draft: Path, trained: Tokenizer, named: Mapping[str, str]) -> bool:
    """Return whether transformers opens a folder's tokenizer as the one of training, with its named tokens."""
    opened = read_tokenizer_folder(draft)
    return opened.tokenizer.to_str() == trained.to_str() and named.items() <= opened.special_tokens.items()


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
