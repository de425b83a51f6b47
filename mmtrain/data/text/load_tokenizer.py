"""Load the tokenizer that a recipe names.

A folder may have a chat template of its own for conversations with tools, as transformers uses it: `ToolUseTokenizer`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import Sample
from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.sample_tokenizer import (
    BadConversationError,
    EncodedSample,
    LengthCounter,
    MediaFeatures,
    SampleTokenizer,
)
from mmtrain.data.text.spelled_tokens import SpelledToken
from mmtrain.data.text.template_tokenizer import DEFAULT_SPECIAL_TOKENS, DEFAULT_THOUGHTS, TemplateTokenizer
from mmtrain.data.text.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from mmtrain.errors import DataError, ModelFolderError
from mmtrain.families.family import Family, Markups
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.model_folder import find_family
from mmtrain.families.processor_files import read_processor
from mmtrain.families.video_processors import VIDEO_TYPE_KEY
from mmtrain.foreign_json import parse_json
from mmtrain.limited_reads import now_reading_texts
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings, ThoughtSettings

# What the template for tools is probed with. Such templates go through the properties of the parameters.
_PROBE_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "A text."}},
    "required": ["text"],
}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe a text.", "parameters": _PROBE_PARAMETERS},
}


def load_recipe_tokenizer(recipe: Recipe) -> SampleTokenizer:
    """Load the tokenizer of a recipe that has samples, as its settings want it and its model is served with it.

    Raises `DataError`.
    """
    data, has_processor = recipe.data, bool(recipe.model.all_encoders)
    return load_tokenizer(data.tokenizer_path, recipe.model.hf, has_processor, data.special_tokens, data.thoughts)


def load_tokenizer(
    path: Path,
    model_folder: Path | None = None,
    has_processor: bool | None = None,
    special_tokens: SpecialTokenSettings = DEFAULT_SPECIAL_TOKENS,
    thoughts: ThoughtSettings = DEFAULT_THOUGHTS,
) -> SampleTokenizer:
    """Load the folder of a Hugging Face model with its chat template, or a `tokenizers` file with mmtrain's format.

    model_folder: the folder of the model that the tokenizer serves, if another.
    has_processor: whether the model is served through a processor, as those with media are; by default as the folder
        says.
    special_tokens: those that texts may spell.
    thoughts: `enable_thinking` of the template, and whether thoughts are learned.

    Raises `DataError`, also for `special_tokens` and `thoughts` with mmtrain's own format, which knows neither.
    """
    now_reading_texts(f"data.tokenizer: {path}")
    if not path.is_dir():
        if special_tokens != DEFAULT_SPECIAL_TOKENS:
            raise DataError(
                f"data.special_tokens: found {special_tokens.model_dump()}, but in mmtrain's own chat format ({path}) "
                "no text becomes a special token: leave it out, or name the folder of a model as data.tokenizer"
            )
        if thoughts != DEFAULT_THOUGHTS:
            raise DataError(
                f"data.thoughts: found {thoughts.model_dump()}, but mmtrain's own chat format ({path}) has no "
                "template: leave it out, or name the folder of a model as data.tokenizer"
            )
        return ChatTokenizer.load(path)
    family = _family(model_folder or path)
    if has_processor is None:
        has_processor = family is not None and family.has_processor
    folder = read_tokenizer_folder(path, model_folder, has_processor)
    markups = {} if family is None else _markups(family, model_folder or path)
    now_reading_texts(f"data.tokenizer: the chat template of {path}")
    tokenizer = TemplateTokenizer(folder, markups, has_processor, special_tokens, thoughts=thoughts)
    if folder.tool_template is None:
        return tokenizer
    now_reading_texts(f"data.tokenizer: the chat template for tools of {path}")
    return ToolUseTokenizer(tokenizer, replace(folder, template=folder.tool_template), special_tokens, thoughts)


def _family(path: Path) -> Family | None:
    """Return the family of a folder's model; None if the folder holds no model of a known one."""
    config_path = path / CONFIG_FILE
    try:
        config = parse_json(config_path.read_bytes())
        return find_family(config, config_path) if isinstance(config, dict) else None
    except (FileNotFoundError, ModelFolderError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {config_path} cannot be read: {error}") from None


def _markups(family: Family, folder: Path) -> Markups:
    """Return how the processor of a folder writes media."""
    if not family.processor_markups:
        return family.markups
    try:
        stated = read_processor(folder, "video")
    except ModelFolderError as error:
        raise DataError(f"data.tokenizer: {error}") from None
    kind = "" if stated is None else str(stated.config.get(VIDEO_TYPE_KEY))
    return family.processor_markups.get(kind, family.markups)


class ToolUseTokenizer:
    """A tokenizer with one template for conversations with tools, and one for all others.

    Models with media have one template for both: their processors know no other.
    """

    def __init__(
        self,
        plain: TemplateTokenizer,
        folder: TokenizerFolder,
        special_tokens: SpecialTokenSettings,
        thoughts: ThoughtSettings,
    ) -> None:
        """Encode by `plain` what has no tools, and by the template of `folder` what has.

        special_tokens, thoughts: as `load_tokenizer` takes them.
        """
        self._plain = plain
        self._with_tools: TemplateTokenizer | None = None
        self._reason = ""
        try:
            self._with_tools = TemplateTokenizer(
                folder, special_tokens=special_tokens, usual_tools=(_PROBE_TOOL,), thoughts=thoughts
            )
        except DataError as error:  # as of a template that data without tools does not need
            self._reason = str(error)
        both = [plain] if self._with_tools is None else [plain, self._with_tools]
        self.item_ids, self.query_id = plain.item_ids, plain.query_id
        self.greedy, self.vocab_size = plain.greedy, plain.vocab_size
        self.writes_items_apart, self.writes_times = plain.writes_items_apart, plain.writes_times
        self.writes_rows_apart = plain.writes_rows_apart
        self.end_ids = frozenset().union(*(tokenizer.end_ids for tokenizer in both))
        self.warnings = tuple(dict.fromkeys(warning for tokenizer in both for warning in tokenizer.warnings))

    def encode(self, sample: Sample, features: MediaFeatures) -> EncodedSample:
        """Encode all turns of a sample; see `SampleTokenizer.encode`."""
        return self._tokenizer_of(sample).encode(sample, features)

    def length_counter(self, max_tokens: int) -> LengthCounter:
        """Return a function that counts what `encode` returns; see `SampleTokenizer.length_counter`."""
        count_plain = self._plain.length_counter(max_tokens)
        count_with_tools = self._with_tools.length_counter(max_tokens) if self._with_tools else count_plain

        def count(sample: Sample, features: MediaFeatures) -> tuple[int, int]:
            is_plain = self._tokenizer_of(sample) is self._plain
            return (count_plain if is_plain else count_with_tools)(sample, features)

        return count

    def prompt_ids(self, sample: Sample, features: MediaFeatures) -> IntArray:
        """Encode everything before the last answer, with the generation prompt."""
        return self._tokenizer_of(sample).prompt_ids(sample, features)

    def left_as_text(self, sample: Sample) -> set[str]:
        """Return the special tokens that texts of a sample spell and that stay text."""
        return self._tokenizer_of(sample).left_as_text(sample)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of the ids without special tokens."""
        return self._plain.decode(ids)

    def spell(self, ids: Sequence[int] | IntArray) -> list[SpelledToken]:
        """Return each of the ids as text, special tokens by their names."""
        return self._plain.spell(ids)

    def final_answer(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of a generated answer behind its thoughts, without space around it."""
        return self._plain.final_answer(ids)

    def final_text(self, text: str) -> str:
        """Return what an answer says behind its thoughts, as data spells it, without space around it."""
        return self._plain.final_text(text)

    def describe_missing_item_token(self, modality: str) -> str:
        """Say what to do if neither the template nor the folder names a token for a modality's features."""
        return self._plain.describe_missing_item_token(modality)

    def _tokenizer_of(self, sample: Sample) -> TemplateTokenizer:
        if not sample.tools:
            return self._plain
        if self._with_tools is None:
            raise BadConversationError(self._reason)
        return self._with_tools
