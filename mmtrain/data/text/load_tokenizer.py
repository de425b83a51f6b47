"""Load the tokenizer that a recipe names."""

import json
from pathlib import Path

from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.sample_tokenizer import SampleTokenizer
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.errors import DataError, ModelFolderError
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.media_markup import Markups
from mmtrain.families.model_folder import find_family


def load_tokenizer(path: Path) -> SampleTokenizer:
    """Load the folder of a Hugging Face model with its chat template, or a `tokenizers` file with mmtrain's format.

    Raises `DataError`.
    """
    if path.is_dir():
        return TemplateTokenizer.load(path, _family_markups(path))
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
