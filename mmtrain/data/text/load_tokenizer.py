"""Load the tokenizer that a recipe names."""

import json
from dataclasses import replace
from pathlib import Path

from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.sample_tokenizer import SampleTokenizer
from mmtrain.data.text.template_tokenizer import DEFAULT_SPECIAL_TOKENS, TemplateTokenizer
from mmtrain.data.text.tokenizer_folder import read_tokenizer_folder
from mmtrain.data.text.tool_use_tokenizer import ToolUseTokenizer
from mmtrain.errors import DataError, ModelFolderError
from mmtrain.families.family import Family
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.model_folder import find_family
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings


def load_recipe_tokenizer(recipe: Recipe) -> SampleTokenizer:
    """Load the tokenizer of a recipe that has samples, as its settings want it and its model is served with it.

    Raises `DataError`.
    """
    has_processor = bool(recipe.model.all_encoders)
    return load_tokenizer(recipe.data.tokenizer_path, recipe.model.hf, has_processor, recipe.data.special_tokens)


def load_tokenizer(
    path: Path,
    model_folder: Path | None = None,
    has_processor: bool | None = None,
    special_tokens: SpecialTokenSettings = DEFAULT_SPECIAL_TOKENS,
) -> SampleTokenizer:
    """Load the folder of a Hugging Face model with its chat template, or a `tokenizers` file with mmtrain's format.

    model_folder: the folder of the model that the tokenizer serves, if another.
    has_processor: whether the model is served through a processor, as those with media are; by default as the folder
        says.
    special_tokens: those that texts may spell.

    Raises `DataError`, also for `special_tokens` with mmtrain's own format, in which no text becomes such a token.
    """
    if not path.is_dir():
        if special_tokens != DEFAULT_SPECIAL_TOKENS:
            raise DataError(
                f"data.special_tokens: found {special_tokens.model_dump()}, but in mmtrain's own chat format ({path}) "
                "no text becomes a special token: leave it out, or name the folder of a model as data.tokenizer"
            )
        return ChatTokenizer.load(path)
    family = _family(model_folder or path)
    if has_processor is None:
        has_processor = family is not None and family.has_processor
    folder = read_tokenizer_folder(path, model_folder, has_processor)
    markups = {} if family is None else family.markups
    tokenizer = TemplateTokenizer(folder, markups, has_processor, special_tokens)
    if folder.tool_template is None:
        return tokenizer
    return ToolUseTokenizer(tokenizer, replace(folder, template=folder.tool_template), special_tokens)


def _family(path: Path) -> Family | None:
    """Return the family of a folder's model; None if the folder holds no model of a known one."""
    config_path = path / CONFIG_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        return find_family(config, config_path) if isinstance(config, dict) else None
    except (FileNotFoundError, ModelFolderError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {config_path} cannot be read: {error}") from None
