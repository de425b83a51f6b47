"""Encode conversations with tools by a chat template of their own, where a folder has one, as transformers does."""

from collections.abc import Sequence
from typing import Any

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import Sample
from mmtrain.data.text.sample_tokenizer import BadConversationError, EncodedSample, LengthCounter, MediaFeatures
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.data.text.tokenizer_folder import TokenizerFolder
from mmtrain.errors import DataError
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings

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


class ToolUseTokenizer:
    """A tokenizer with one template for conversations with tools, and one for all others.

    Models with media have one template for both: their processors know no other.
    """

    def __init__(self, plain: TemplateTokenizer, folder: TokenizerFolder, special_tokens: SpecialTokenSettings) -> None:
        """Encode by `plain` what has no tools, and by the template of `folder` what has.

        special_tokens: those that texts may spell.
        """
        self._plain = plain
        self._with_tools: TemplateTokenizer | None = None
        self._reason = ""
        try:
            self._with_tools = TemplateTokenizer(folder, special_tokens=special_tokens, usual_tools=(_PROBE_TOOL,))
        except DataError as error:  # as of a template that data without tools does not need
            self._reason = str(error)
        both = [plain] if self._with_tools is None else [plain, self._with_tools]
        self.item_ids, self.query_id = plain.item_ids, plain.query_id
        self.greedy, self.vocab_size = plain.greedy, plain.vocab_size
        self.writes_items_apart, self.writes_times = plain.writes_items_apart, plain.writes_times
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
