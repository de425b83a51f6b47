"""Load the tokenizer that a recipe names."""

from pathlib import Path

from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.media_markup import Markups
from mmtrain.data.text.sample_tokenizer import SampleTokenizer
from mmtrain.data.text.template_tokenizer import TemplateTokenizer


def load_tokenizer(path: Path, family_markups: Markups | None = None) -> SampleTokenizer:
    """Load the folder of a Hugging Face model with its chat template, or a `tokenizers` file with mmtrain's format.

    family_markups: how the model's family writes media, where the folder does not say it.

    Raises `DataError`.
    """
    if path.is_dir():
        return TemplateTokenizer.load(path, family_markups)
    return ChatTokenizer.load(path)
