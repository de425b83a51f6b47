"""Load the tokenizer that a recipe names."""

import json
from pathlib import Path

from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.sample_tokenizer import SampleTokenizer
from mmtrain.data.text.template_tokenizer import DEFAULT_SPECIAL_TOKENS, TemplateTokenizer
from mmtrain.errors import DataError, ModelFolderError
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.media_markup import Markups
from mmtrain.families.model_folder import find_family
from mmtrain.recipe.data_settings import DataSettings
from mmtrain.recipe.text_settings import SpecialTokenSettings


def load_recipe_tokenizer(data: DataSettings) -> SampleTokenizer:
    """Load the tokenizer of a recipe that has samples, as its settings want it. Raises `DataError`."""
    return load_tokenizer(data.tokenizer_path, data.special_tokens)


def load_tokenizer(path: Path, special_tokens: SpecialTokenSettings = DEFAULT_SPECIAL_TOKENS) -> SampleTokenizer:
    """Load the folder of a Hugging Face model with its chat template, or a `tokenizers` file with mmtrain's format.

    Raises `DataError`, also for `special_tokens` with mmtrain's own format, in which no text becomes such a token.
    """
    if path.is_dir():
        return TemplateTokenizer.load(path, _family_markups(path), special_tokens)
    if special_tokens != DEFAULT_SPECIAL_TOKENS:
        raise DataError(
            f"data.special_tokens: found {special_tokens.model_dump()}, but in mmtrain's own chat format "
            f"({path}) no text becomes a special token: leave it out, or name the folder of a model as data.tokenizer"
        )
    return ChatTokenizer.load(path)


def _family_markups(path: Path) -> Markups:
    """Return how the family of a folder's model writes media; nothing if the folder holds no model of a known one."""
    config_path = path / CONFIG_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        return find_family(config, config_path).markups if isinstance(config, dict) else {}
    except (FileNotFoundError, ModelFolderError):
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {config_path} cannot be read: {error}") from None
