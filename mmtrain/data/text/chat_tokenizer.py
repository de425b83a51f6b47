"""Encode conversations as token ids and labels, with a `tokenizers` JSON file.

The chat format (the spaces and line breaks here are for reading only; there are none between the parts):

    <|system|>text<|end|> <|user|>text<|image|><|image|>text<|end|> <|assistant|>answer<|end|>

What an assistant thought (`reasoning_content`) comes in front of its answer, as the templates of Qwen write it:

    <|assistant|><think>
    thought
    </think>

    answer<|end|>

An image that the assistant draws is as many queries as its generator reads, between two marks. The LLM learns to write
the first mark; the second follows the last query, whatever the LLM would write there:

    <|assistant|>Here it is: <|gen|><|query|><|query|><|/gen|><|end|>

`write_chat_folder` writes the same format as the tokenizer side of a Hugging Face folder: with a chat template.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import IMAGE_MARK, MEDIA_ROLES, Role, Sample, Turn, written_text
from mmtrain.data.formats.tool_calls import read_thought
from mmtrain.data.text.greedy_settings import GreedySettings
from mmtrain.data.text.sample_tokenizer import (
    IGNORE_INDEX,
    BadConversationError,
    EncodedSample,
    LengthCounter,
    MediaFeatures,
    MediumFeatures,
    find_marks,
    total_features,
)
from mmtrain.data.text.spelled_tokens import SpelledToken, spell_tokens
from mmtrain.data.text.template_facts import ThoughtEnd
from mmtrain.data.text.token_counter import TokenCounter
from mmtrain.errors import DataError
from mmtrain.families.folder_files import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES, VISION

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
IMAGE_TOKEN = VISION.placeholder  # in every tokenizer; those of other modalities only if their models need them
ROLE_TOKENS: dict[Role, str] = {
    "system": "<|system|>",
    "user": "<|user|>",
    "tool": "<|user|>",  # what a tool says is context, as what a user says
    "assistant": "<|assistant|>",
}
SPECIAL_TOKENS = (PAD_TOKEN, *dict.fromkeys(ROLE_TOKENS.values()), END_TOKEN, IMAGE_TOKEN)
DRAW_TOKENS = ("<|gen|>", "<|query|>", "<|/gen|>")  # all of them in tokenizers of models with a generator
_NUM_DRAW_MARKS = 2  # around the queries of an image
_NUM_TURN_TOKENS = 2  # of every turn besides its text: its role, and its end
_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type == 'audio' -%}
                {{- '<|audio|>' -}}
            {%- else -%}
                {{- '<|image|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


class ChatTokenizer:
    """A byte-level BPE tokenizer that knows the chat format."""

    warnings: tuple[str, ...] = ()
    greedy = GreedySettings()
    writes_items_apart = False
    writes_rows_apart = False
    writes_times = False

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """Wrap a tokenizer; messages call it `name`. Raises `DataError` if it lacks one of `SPECIAL_TOKENS`."""
        placeholders = _mark_special_tokens(tokenizer, name)
        tokenizer.encode_special_tokens = True  # a text that spells a special token is text, or users could forge turns
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._roles: dict[Role, int] = {role: self._special_id(token) for role, token in ROLE_TOKENS.items()}
        self._end_id = self._special_id(END_TOKEN)
        self.end_ids = frozenset({self._end_id})
        self.item_ids: dict[str, tuple[int, ...]] = {
            modality: (self._special_id(token),) for modality, token in placeholders.items()
        }
        has_draw_tokens = all(tokenizer.token_to_id(token) is not None for token in DRAW_TOKENS)
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._any_special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        self._draw_ids = [self._special_id(token) for token in DRAW_TOKENS] if has_draw_tokens else []
        self.query_id = self._draw_ids[1] if has_draw_tokens else None
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, path: Path) -> "ChatTokenizer":
        """Read a `tokenizers` JSON file. Raises `DataError`."""
        return cls(_read_tokenizer(path), str(path))

    def encode(self, sample: Sample, features: MediaFeatures) -> EncodedSample:
        """Encode all turns of a sample; see `SampleTokenizer.encode`. Each answer ends with `<|end|>`."""
        _check_no_tools(sample)
        ids, is_target = self._encode_turns(sample, sample.turns, features)
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        labels[:-1] = np.where(is_target[1:], ids[1:], IGNORE_INDEX)
        return EncodedSample(ids, labels)

    def length_counter(self, max_tokens: int) -> LengthCounter:
        """Return a function that counts what `encode` returns; see `SampleTokenizer.length_counter`."""
        count = TokenCounter(self._tokenizer)

        def count_sample(sample: Sample, features: MediaFeatures) -> tuple[int, int]:
            _check_no_tools(sample)
            num_ids = sum([total_features(medium) for media in features.values() for medium in media])
            num_targets = 0
            marks = find_marks(sample)
            num_mark_characters = max(map(len, marks)) * sum(map(len, features.values()))
            num_characters = sum([len(turn.text) for turn in sample.turns]) - num_mark_characters
            min_tokens = count.min_tokens(num_characters)
            if min_tokens > max_tokens:
                return min_tokens, 0
            first_mark, *other_marks = marks
            for turn in sample.turns:
                parts = _answer_parts(turn, sample)
                if turn.role in MEDIA_ROLES and other_marks:
                    parts = re.split("|".join((first_mark, *other_marks)), turn.text)
                elif turn.role in MEDIA_ROLES:
                    parts = turn.text.split(first_mark)
                num_text_tokens = sum(map(count, map(written_text, parts)))
                num_ids += num_text_tokens + _NUM_TURN_TOKENS
                if turn.role == "assistant":
                    num_images = len(parts) - 1
                    num_ids += _NUM_DRAW_MARKS * num_images
                    num_targets += turn.is_learned * (num_text_tokens + num_images + 1)
            return num_ids, num_targets

        return count_sample

    def prompt_ids(self, sample: Sample, features: MediaFeatures) -> IntArray:
        """Encode everything before the last answer, up to and including its `<|assistant|>`: generation starts here."""
        ids, _ = self._encode_turns(sample, sample.turns[: sample.last_answer], features)
        return np.append(ids, self._roles["assistant"])

    def describe_missing_item_token(self, modality: str) -> str:
        """Say which special token of a modality the tokenizer lacks."""
        placeholder = MODALITIES[modality].placeholder
        return (
            f"it lacks the special token {placeholder}; add it with `Tokenizer.add_special_tokens` of the `tokenizers` "
            "library and save it"
        )

    def left_as_text(self, sample: Sample) -> set[str]:
        """Return the special tokens that texts of a sample spell: all stay text."""
        texts = [_text_of(turn) for turn in sample.turns]
        return {token for text in texts for token in self._any_special.findall(text)}

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of the ids without special tokens."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int] | IntArray) -> list[SpelledToken]:
        """Return each of the ids as text, special tokens by their names."""
        return spell_tokens(self._tokenizer, [int(i) for i in ids])

    def final_answer(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of a generated answer behind its thoughts, without space around it."""
        return self.final_text(self.decode(ids))

    def final_text(self, text: str) -> str:
        """Return what an answer says behind its thoughts, as data spells it, without space around it."""
        return ThoughtEnd().cut_text(text)

    def _encode_turns(
        self, sample: Sample, turns: Sequence[Turn], features: MediaFeatures
    ) -> tuple[IntArray, np.ndarray]:
        """Return the ids of some turns of a sample, and which of them are targets."""
        ids: list[int] = []
        is_target: list[bool] = []
        marks = find_marks(sample)
        remaining = {modality: iter(counts) for modality, counts in features.items()}
        for turn in turns:
            if turn.role == "assistant":
                body, is_body_target = self._encode_answer(_answer_parts(turn, sample), remaining)
                ids += [self._roles[turn.role], *body, self._end_id]
                of_answer = [False, *is_body_target, True]
                is_target += of_answer if turn.is_learned else [False] * len(of_answer)
                continue
            if turn.role in MEDIA_ROLES:
                body = self._encode_with_items(turn.text, marks, remaining)
            else:
                body = self._encode_text(turn.text)
            ids += [self._roles[turn.role], *body, self._end_id]
            is_target += [False] * (len(body) + 2)
        return np.array(ids, dtype=np.int64), np.array(is_target, dtype=bool)

    def _encode_answer(
        self, parts: Sequence[str], remaining: Mapping[str, Iterator[MediumFeatures]]
    ) -> tuple[list[int], list[bool]]:
        """Encode the texts of an answer with an image between every two; return ids, and which of them are targets."""
        ids = self._encode_text(parts[0])
        is_target = [True] * len(ids)
        for part in parts[1:]:
            start_id, query_id, stop_id = self._draw_ids
            num_queries = total_features(next(remaining[GENERATOR]))
            text_ids = self._encode_text(part)
            ids += [start_id, *[query_id] * num_queries, stop_id, *text_ids]
            is_target += [True, *[False] * (num_queries + 1), *[True] * len(text_ids)]
        return ids, is_target

    def _encode_with_items(
        self, text: str, marks: Mapping[str, str], remaining: Mapping[str, Iterator[MediumFeatures]]
    ) -> list[int]:
        """Encode a user's text; each mark becomes the next number of item tokens of its modality."""
        ids: list[int] = []
        for part in re.split(f"({'|'.join(marks)})", text):
            if part in marks:
                modality = marks[part]
                ids += self.item_ids[modality] * total_features(next(remaining[modality]))
            else:
                ids += self._encode_text(part)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(written_text(text), add_special_tokens=False).ids
        return ids

    def _special_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)


def _answer_parts(turn: Turn, sample: Sample) -> list[str]:
    """Return the texts of a turn without media: of an answer those before, between and behind the images it draws."""
    text = _text_of(turn)
    if turn.role != "assistant" or not sample.target_images:
        return [text]
    first, *others = turn.text.split(IMAGE_MARK)
    return [text.removesuffix(turn.text) + first, *others]


def _text_of(turn: Turn) -> str:
    """Return the text of a turn without media, with what an assistant thought in front of it."""
    thought = read_thought(turn.fields) if turn.fields and turn.role == "assistant" else ""
    return f"<think>\n{thought.strip()}\n</think>\n\n{turn.text}" if thought else turn.text


def _check_no_tools(sample: Sample) -> None:
    """Raise `BadConversationError` for a sample with tools: leaving them out would teach something else."""
    if sample.tools or any('"tool_calls"' in turn.fields for turn in sample.turns):
        raise BadConversationError(
            "it describes or calls tools, for which mmtrain's own chat format has no place; write them into its "
            "texts, or name the folder of a model whose chat template takes tools as data.tokenizer",
            kind="tools",
        )


def load_chat_vocabulary(path: Path) -> Tokenizer:
    """Read a `tokenizers` JSON file with the special tokens of the chat format. Raises `DataError`."""
    tokenizer = _read_tokenizer(path)
    _mark_special_tokens(tokenizer, str(path))
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data.tokenizer: {path}: no such file; expected a `tokenizers` JSON file") from None
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise DataError(f"data.tokenizer: {path}: not a `tokenizers` JSON file: {error}") from None


def _mark_special_tokens(tokenizer: Tokenizer, name: str) -> dict[str, str]:
    """Mark the tokens of the chat format as special, and return the placeholder of each modality that has one.

    Raises `DataError` if one of `SPECIAL_TOKENS` is missing.
    """
    missing = [t for t in SPECIAL_TOKENS if tokenizer.token_to_id(t) is None]
    if missing:
        raise DataError(
            f"data.tokenizer: {name} lacks the special tokens {' '.join(missing)}; add them with "
            "`Tokenizer.add_special_tokens` of the `tokenizers` library, save it, and raise model.llm.vocab to "
            "its size; or name the folder of a model with a chat template instead"
        )
    placeholders = {
        modality.name: modality.placeholder
        for modality in MODALITIES.values()
        if tokenizer.token_to_id(modality.placeholder) is not None
    }
    draw_tokens = [token for token in DRAW_TOKENS if tokenizer.token_to_id(token) is not None]
    present = dict.fromkeys((*SPECIAL_TOKENS, *placeholders.values(), *draw_tokens))
    tokenizer.add_special_tokens(list(present))  # their ids stay
    return placeholders


def write_chat_folder(folder: Path, tokenizer_file: Path) -> None:
    """Write the files by which a folder's tokenizer and template encode as `ChatTokenizer` does with a file.

    They differ in one thing: in a folder a line break right after the mark of an image belongs to the mark. Raises
    `DataError` for a file that is no such tokenizer.
    """
    tokenizer = load_chat_vocabulary(tokenizer_file)
    tokenizer.encode_special_tokens = False  # the template writes them as text
    tokenizer.save(str(folder / TOKENIZER_FILE))
    media = {
        f"{modality.media[0]}_token": modality.placeholder
        for modality in MODALITIES.values()
        if tokenizer.token_to_id(modality.placeholder) is not None
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "extra_special_tokens": media,
    }
    generation = {"eos_token_id": tokenizer.token_to_id(END_TOKEN), "pad_token_id": tokenizer.token_to_id(PAD_TOKEN)}
    for name, content in ((TOKENIZER_CONFIG_FILE, settings), (GENERATION_FILE, generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(_TEMPLATE, encoding="utf-8")
