"""Encode conversations with the tokenizer and the chat template of a Hugging Face model folder.

The ids are those of `apply_chat_template` of transformers. The template renders the whole conversation and the
tokenizer encodes the whole rendering, so texts merge with what the template writes around them. With a processor, the
tokenizer adds its own special tokens, such as BOS, unless the template has already written BOS.

A setting says which special tokens count as tokens if a text spells them. Those that divide turns stay plain text in
texts of users, unlike in transformers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import MEDIA_ROLES, PLURALS, Sample, Turn
from mmtrain.data.text.answer_spans import AnswerFinder
from mmtrain.data.text.chat_messages import Conversation, ConversationBuilder, TokenEscape, TokensInTexts
from mmtrain.data.text.chat_template import ChatTemplate, Message, RenderError, Rendering, Span, Tools
from mmtrain.data.text.greedy_settings import read_greedy_settings
from mmtrain.data.text.items_apart import ItemsApart, first_features, time_slots
from mmtrain.data.text.rendering_skeletons import SkeletonRenderer
from mmtrain.data.text.sample_tokenizer import (
    IGNORE_INDEX,
    BadConversationError,
    EncodedSample,
    LengthCounter,
    MediaFeatures,
    total_features,
)
from mmtrain.data.text.spelled_tokens import SpelledToken, spell_tokens
from mmtrain.data.text.template_facts import find_thought_end, find_turn_tokens, probe_template
from mmtrain.data.text.token_counter import RenderingCounter
from mmtrain.data.text.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from mmtrain.errors import DataError
from mmtrain.families.family import Markups, MediaMarkup
from mmtrain.recipe.settings.modalities import MODALITIES, MediaKind
from mmtrain.recipe.settings.text_settings import SpecialTokensAllowed, SpecialTokenSettings, ThoughtSettings

BoolArray = NDArray[np.bool_]
DEFAULT_SPECIAL_TOKENS = SpecialTokenSettings()
DEFAULT_THOUGHTS = ThoughtSettings()
_ENABLE_THINKING = "enable_thinking"  # of templates
_ANCHOR = "\U0010ffff"  # a noncharacter of Unicode, which no text may hold


@dataclass(frozen=True)
class _TextTokens:
    """The tokens of a rendering, one feature token for each medium, and the characters that each comes from."""

    ids: IntArray  # (T,)
    starts: IntArray  # (T,)
    ends: IntArray  # (T,)

    def inside(self, span: Span) -> slice:
        """Return the tokens that have a character in a span."""
        first = np.searchsorted(self.ends, span[0], side="right")
        last = np.searchsorted(self.starts, span[1], side="left")
        return slice(int(first), int(last))


class TemplateTokenizer:
    """A tokenizer that encodes conversations as its chat template writes them."""

    query_id: int | None = None  # templates have no place for images in answers

    def __init__(
        self,
        folder: TokenizerFolder,
        family_markups: Markups | None = None,
        has_processor: bool = False,
        special_tokens: SpecialTokenSettings = DEFAULT_SPECIAL_TOKENS,
        usual_tools: Tools = (),
        thoughts: ThoughtSettings = DEFAULT_THOUGHTS,
    ) -> None:
        """Probe the folder's template.

        family_markups: how a model family writes media, where the folder does not say.
        has_processor: whether the model is served through a processor, as those with media are.
        special_tokens: those that texts may spell.
        usual_tools: see `ChatTemplate`.
        thoughts: `enable_thinking` of the template, and whether thoughts are learned.

        Raises `DataError` for a template that cannot be trained with.
        """
        self._tokenizer = folder.tokenizer
        self._path = folder.path
        self._template = _template_of(folder, usual_tools, thoughts)
        self._learns_thoughts = thoughts.learn
        self._start_token = folder.special_tokens.get("bos_token")
        self._added_around = _added_around(self._tokenizer) if has_processor else ((), ())
        added = self._tokenizer.get_added_tokens_decoder()
        added_tokens = [token.content for token in added.values()]
        facts = self._facts = probe_template(self._template, folder, added_tokens, family_markups or {})
        markups = self._facts.markups
        self._learn_media(markups)
        self._added_token = _any_of(added_tokens)
        special = [token.content for token in added.values() if token.special]
        turn_tokens = find_turn_tokens(self._render_in_full, self._facts, folder, special, self._added_token)
        self._protected = list(dict.fromkeys((*special, *turn_tokens, *self._kind_of_text)))
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._is_protected = self._mask_of(map(self._token_id, self._protected))
        self._is_feature = self._mask_of(self._kind_of_token)
        in_texts = partial(self._tokens_in_texts, turn_tokens)
        self._escape = TokenEscape(in_texts(special_tokens.answers), in_texts(special_tokens.prompts))
        parts = {kind: facts.part for kind, facts in self._facts.media.items() if facts.part is not None}
        inserted = {kind: markup.placeholder for kind, markup in markups.items() if kind not in parts}
        self._builder = ConversationBuilder(
            facts.texts_as_parts, facts.has_tool_turns, inserted, self._escape, parts, facts.thoughts_as_parts
        )
        self._render = SkeletonRenderer(self._template.tree, self._render_in_full).render
        self._answers = AnswerFinder(self._render, self._facts, _any_of(turn_tokens))
        special_ids = {token: self._token_id(token) for token in special}
        self._thought_end = find_thought_end(self._render, self._facts, special_ids, _any_of(special))
        self.greedy = read_greedy_settings(folder.path)
        end_ids = set(folder.end_ids)
        if self._facts.terminator:
            end_ids.add(self._token_id(self._facts.terminator))
        self.end_ids = frozenset(end_ids)
        ends = () if self._teaches_end() else (self._describe_missing_end(),)
        self.warnings: tuple[str, ...] = (
            *ends,
            *(map(self._describe_inserted, inserted.items()) if has_processor else ()),
        )

    def _learn_media(self, markups: Mapping[MediaKind, MediaMarkup]) -> None:
        """Keep what is needed to find media in a rendering, and to give them their features."""
        self._expansions = {
            markup.placeholder: time_slots(markup.expansion)
            for markup in markups.values()
            if markup.placeholder != markup.expansion
        }
        self._items_apart = ItemsApart.of(markups, self._tokenizer)
        self.writes_items_apart = any(markup.later_prefix is not None for markup in markups.values())
        self.writes_rows_apart = any(markup.row_break is not None for markup in markups.values())
        self.writes_times = any(markup.writes_times for markup in markups.values())
        self._kind_of_text = {markup.feature_token: kind for kind, markup in markups.items()}
        self._kind_of_token = {self._token_id(token): kind for token, kind in self._kind_of_text.items()}
        # Two kinds may share a feature token; in a rendering both then count as the later kind.
        self._shown_kind = {kind: self._kind_of_text[markup.feature_token] for kind, markup in markups.items()}
        self.item_ids: dict[str, tuple[int, ...]] = {}
        for modality in MODALITIES.values():
            tokens = [markups[kind].feature_token for kind in modality.media if kind in markups]
            if tokens:
                self.item_ids[modality.name] = tuple(dict.fromkeys(map(self._token_id, tokens)))

    def __getstate__(self) -> dict[str, object]:
        """Leave out `_text_tokenizer`, which does not survive pickling; it is rebuilt when it is used."""
        return {name: value for name, value in vars(self).items() if name != "_text_tokenizer"}

    @classmethod
    def load(
        cls,
        path: Path,
        family_markups: Markups | None = None,
        special_tokens: SpecialTokenSettings = DEFAULT_SPECIAL_TOKENS,
    ) -> "TemplateTokenizer":
        """Read a model folder. Raises `DataError`."""
        return cls(read_tokenizer_folder(path), family_markups, special_tokens=special_tokens)

    def encode(self, sample: Sample, features: MediaFeatures) -> EncodedSample:
        """Encode all turns of a sample; see `SampleTokenizer.encode`."""
        conversation = self._conversation(sample, sample.turns)
        ids, is_target = self._encode(conversation, self._render_sample(conversation), features)
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        labels[:-1] = np.where(is_target[1:], ids[1:], IGNORE_INDEX)
        return EncodedSample(ids, labels)

    def length_counter(self, max_tokens: int) -> LengthCounter:
        """Return a function that counts what `encode` returns; see `SampleTokenizer.length_counter`."""
        counter = RenderingCounter(self._tokenizer, self._added_token, self._facts.answer_header)

        def count_sample(sample: Sample, features: MediaFeatures) -> tuple[int, int]:
            conversation = self._conversation(sample, sample.turns)
            rendering = self._render_sample(conversation)
            min_tokens = counter.min_tokens(len(rendering.text))
            if min_tokens > max_tokens:
                return min_tokens, 0
            answers = self._answers.find(conversation, rendering)
            if answers.follow_header and self._learns_thoughts and not self._escape.holds_text(rendering.text):
                spans = self._answers.learned(conversation, rendering, answers.spans)
                counts = counter.count(*self._write_first_times(self._escape.reveal(rendering.text), spans, features))
                if counts is not None:
                    written = [
                        self._kind_of_text[token] for token in counts.added_tokens if token in self._kind_of_text
                    ]
                    self._check_media(written, conversation.media)
                    num_more = self._count_media_tokens(features) - len(conversation.media)
                    num_more += sum(map(len, self._around(rendering.text)))
                    return counts.total + num_more, counts.targets
            ids, is_target = self._encode(conversation, rendering, features)
            return len(ids), int(is_target.sum())

        return count_sample

    def prompt_ids(self, sample: Sample, features: MediaFeatures) -> IntArray:
        """Encode everything before the last answer, with the generation prompt."""
        conversation = self._conversation(sample, sample.turns[: sample.last_answer])
        rendering = self._render_sample(conversation, add_generation_prompt=True)
        text, _ = self._write_first_times(rendering.text, (), features)
        tokens = self._tokenize(text)
        is_target = np.zeros(len(tokens.ids), dtype=bool)
        return self._expand_media(tokens.ids, is_target, conversation.media, features)[0]

    def left_as_text(self, sample: Sample) -> set[str]:
        """Return the special tokens that a sample's texts spell and that are encoded as plain text."""
        tokens = self._escape.left_as_text(sample.tools, is_answer=False) if sample.tools else set()
        marks = [f"<{kind}>" for kind, media in sample.media.items() if media]
        for turn in sample.turns:
            is_answer = turn.role == "assistant"
            written = turn.text
            for mark in marks if turn.role in MEDIA_ROLES else ():  # which may be a token's name
                written = written.replace(mark, "")
            for text in (written, turn.fields) if turn.fields else (written,):
                tokens |= self._escape.left_as_text(text, is_answer)
        return tokens

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of the ids without special tokens."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int] | IntArray) -> list[SpelledToken]:
        """Return each of the ids as text, special tokens by their names."""
        return spell_tokens(self._tokenizer, [int(i) for i in ids])

    def final_answer(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of a generated answer after its thoughts, stripped."""
        return self.final_text(self.decode(self._thought_end.cut(ids)))

    def final_text(self, text: str) -> str:
        """Return what an answer says behind its thoughts, as data spells it, without space around it."""
        return self._thought_end.cut_text(text)

    def describe_missing_item_token(self, modality: str) -> str:
        """Say what to do if neither the template nor the folder names a token for a modality's features."""
        kind = MODALITIES[modality].media[0]
        reason = self._facts.media[kind].reason if kind in self._facts.media else ""
        if reason:
            return f"{self._template.name}: the chat template {reason}"
        return (
            f"{self._path} does not say which token stands for {kind} features: name it as `{kind}_token` in "
            "tokenizer_config.json, or by its id as "
            f"`{kind}_token_id` in config.json, and have it among the special tokens of tokenizer.json"
        )

    def _teaches_end(self) -> bool:
        """Return whether the last token to predict in an answer is one that ends it."""
        turns = (Turn("user", "question"), Turn("assistant", "answer"))
        try:
            labels = self.encode(Sample("", "", 0, turns, ()), {}).labels
        except BadConversationError:  # the template may require a system turn; real samples will tell
            return True
        targets = labels[labels != IGNORE_INDEX]
        return bool(len(targets)) and int(targets[-1]) in self.end_ids

    def _describe_missing_end(self) -> str:
        return (
            f"{self._template.name}: the chat template writes no token that ends an answer, so the model does not "
            "learn to stop; write the end token of the tokenizer (`eos_token`) after the text of an assistant in "
            "it, unless the model stops in another way"
        )

    def _describe_inserted(self, inserted: tuple[MediaKind, str]) -> str:
        kind, placeholder = inserted
        return (
            f"{self._template.name}: the chat template is one for texts, so that {placeholder} is written into the "
            f"text where a sample has its {kind}; serve the model with this text in messages, too"
        )

    def _conversation(self, sample: Sample, turns: Sequence[Turn]) -> Conversation:
        # A mark such as `<audio>` counts only if the sample has such media; otherwise it is ordinary text.
        kinds: dict[str, MediaKind] = {f"<{kind}>": kind for kind, media in sample.media.items() if media}
        return self._builder.build(turns, kinds, sample.tools)

    def _render_in_full(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = ()) -> Rendering:
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, replacements=self._expansions, tools=tools
        )

    def _render_sample(self, conversation: Conversation, add_generation_prompt: bool = False) -> Rendering:
        """Render a conversation. Raises `BadConversationError` if the template rejects it, or leaves tools out."""
        try:
            rendering = self._render(conversation.messages, add_generation_prompt, conversation.tools)
        except RenderError as error:
            raise BadConversationError(f"the chat template rejects the conversation: {error}") from None
        for name in conversation.tool_names:
            if name not in rendering.text:  # what is left out would teach something else
                raise BadConversationError(f"the chat template does not write the tool {name!r}", kind="tools")
        return rendering

    def _write_first_times(
        self, text: str, spans: Sequence[Span], features: MediaFeatures
    ) -> tuple[str, tuple[Span, ...]]:
        """Write into a rendering when the first item of each video is shown, if that is written at all."""
        if self._items_apart is None:
            return text, tuple(spans)
        return self._items_apart.write_first_times(text, spans, features)

    def _encode(
        self, conversation: Conversation, rendering: Rendering, features: MediaFeatures
    ) -> tuple[IntArray, BoolArray]:
        """Return the ids of a rendered conversation, and which of them are targets."""
        answers = self._answers.find(conversation, rendering).spans
        learned = self._answers.learned(conversation, rendering, answers)
        if not self._learns_thoughts:
            learned = [self._thought_end.behind(rendering.text, span) for span in learned]
        text, spans = self._write_first_times(rendering.text, learned, features)
        tokens = self._tokenize(text)
        is_target = np.zeros(len(tokens.ids), dtype=bool)
        for span in spans:
            is_target[tokens.inside(span)] = True
        return self._expand_media(tokens.ids, is_target, conversation.media, features)

    def _tokenize(self, text: str) -> _TextTokens:
        """Encode a rendering. What texts spell and stays text is escaped in it."""
        text = self._escape.reveal(text)
        whole = _text_tokens(self._tokenizer, text)
        before, after = (np.array(ids, dtype=np.int64) for ids in self._around(text))
        pieces = [_TextTokens(before, np.zeros_like(before), np.zeros_like(before))]
        if self._escape.holds_text(text):
            pieces += self._pieces(text, whole)
        else:
            self._check_normalized(text, whole.ids)
            pieces.append(whole)
        ends = np.full_like(after, len(text))
        pieces.append(_TextTokens(after, ends, ends))
        return _TextTokens(*(np.concatenate(arrays) for arrays in zip(*map(_columns, pieces), strict=True)))

    def _around(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens that the tokenizer adds before and after a rendering."""
        is_started = self._start_token is not None and text.startswith(self._start_token)
        return ((), ()) if is_started else self._added_around

    def _pieces(self, text: str, whole: _TextTokens) -> list[_TextTokens]:
        """Split a rendering at the special tokens that `whole` has, and encode each part between them as plain text."""
        pieces: list[_TextTokens] = []
        position = 0
        for i in np.flatnonzero(self._is_protected[whole.ids]):
            start, end = int(whole.starts[i]), int(whole.ends[i])
            pieces.append(self._tokenize_text(text, position, start))
            pieces.append(_TextTokens(whole.ids[i : i + 1], whole.starts[i : i + 1], whole.ends[i : i + 1]))
            position = end
        pieces.append(self._tokenize_text(text, position, len(text)))
        return pieces

    def _tokenize_text(self, text: str, start: int, end: int) -> _TextTokens:
        """Encode what is between two special tokens, as text whatever it spells."""
        if start == end:
            return _TextTokens(*np.empty((3, 0), dtype=np.int64))
        # Some tokenizers treat the first word of a text specially; a token before it prevents that.
        anchor = _ANCHOR if start else ""
        tokens = _text_tokens(self._text_tokenizer, anchor + self._escape.restore(text[start:end]))
        first = len(anchor)  # the anchor is one character and one token, see `_text_tokenizer`
        tokens = _TextTokens(tokens.ids[first:], tokens.starts[first:] - first, tokens.ends[first:] - first)
        if self._is_protected[tokens.ids].any():
            raise BadConversationError("a text spells a special token that the tokenizer cannot encode as text")
        return _TextTokens(tokens.ids, tokens.starts + start, tokens.ends + start)

    @cached_property
    def _text_tokenizer(self) -> Tokenizer:
        """The tokenizer to which special tokens are text."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens(self._protected)  # marks them as special; their ids stay
        tokenizer.add_tokens([AddedToken(_ANCHOR, normalized=False)])
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _check_normalized(self, text: str, ids: IntArray) -> None:
        """Raise `BadConversationError` if normalization, such as of full-width letters, made a text a special token."""
        if self._tokenizer.normalizer is None or text.isascii():
            return
        num_special = int(self._is_protected[ids].sum())
        num_written = sum(token in self._protected for token in self._added_token.findall(text))
        if num_special != num_written:
            raise BadConversationError("a text spells a special token in other characters")

    def _expand_media(
        self, ids: IntArray, is_target: BoolArray, media: Sequence[MediaKind], features: MediaFeatures
    ) -> tuple[IntArray, BoolArray]:
        """Repeat each medium's token once per feature, and insert the text of items that are written apart.

        Raises `BadConversationError` if the media of the rendering are not those of the sample.
        """
        positions = np.flatnonzero(self._is_feature[ids])
        written = [self._kind_of_token[int(token)] for token in ids[positions]]
        self._check_media(written, media)
        repeats = np.ones(len(ids), dtype=np.int64)
        later_items: list[tuple[int, IntArray]] = []  # (behind how many tokens, ids)
        remaining = {modality: iter(counts) for modality, counts in features.items()}
        for position in positions:
            modality = next(name for name, item_ids in self.item_ids.items() if ids[position] in item_ids)
            medium = next(remaining[modality])
            repeats[position] = total_features(medium)
            if not isinstance(medium, int) and self._items_apart is not None:
                of_later = self._items_apart.later_ids(medium)
                repeats[position] = first_features(medium)
                end = int(position) + 1 + self._items_apart.num_suffix_tokens(medium)
                later_items += [(end, item_ids) for item_ids in of_later]
        if not later_items:
            return np.repeat(ids, repeats), np.repeat(is_target, repeats)
        places = np.cumsum(repeats)[[end - 1 for end, _ in later_items]]
        places = np.repeat(places, [len(item_ids) for _, item_ids in later_items])
        more_ids = np.concatenate([item_ids for _, item_ids in later_items])
        return (
            np.insert(np.repeat(ids, repeats), places, more_ids),
            np.insert(np.repeat(is_target, repeats), places, np.zeros(len(more_ids), dtype=bool)),
        )

    def _count_media_tokens(self, features: MediaFeatures) -> int:
        """Return the tokens of all media: their features, and the text between items that are written apart."""
        total = 0
        for media in features.values():
            for medium in media:
                total += total_features(medium)
                if self._items_apart is not None:
                    total += self._items_apart.num_text_tokens(medium)
        return total

    def _check_media(self, written: Sequence[MediaKind], media: Sequence[MediaKind]) -> None:
        """Compare the kinds of media in a rendering with those of the conversation; modalities may be mixed anew."""
        for kind in media:
            if kind not in self._shown_kind:
                reason = (
                    f"the tokenizer has no token for {kind} features, or its model's text for them is not supported"
                )
                raise BadConversationError(reason)
        for modality in MODALITIES.values() if media or written else ():
            expected = [self._shown_kind[kind] for kind in media if kind in modality.media]
            found = [kind for kind in written if kind in modality.media]
            if found != expected:
                names = ", ".join(PLURALS[kind] for kind in modality.media)
                raise BadConversationError(
                    f"the chat template writes {len(found)} {names} for {len(expected)}, or in another order"
                )

    def _tokens_in_texts(self, turn_tokens: Sequence[str], allowed: SpecialTokensAllowed) -> TokensInTexts:
        """Return what becomes of the tokens that texts spell, by a value of `data.special_tokens`."""
        features = list(self._kind_of_text)
        placeholders = [markup.placeholder for markup in self._facts.markups.values()]
        media = [*features, *(text for text in placeholders if not any(token in text for token in features))]
        if allowed == "none":
            return TokensInTexts((*self._protected, *media), ())
        if allowed == "inline":
            return TokensInTexts((*turn_tokens, *media), ())
        return TokensInTexts(tuple(media), tuple(token for token in turn_tokens if token not in media))

    def _mask_of(self, ids: Iterable[int]) -> BoolArray:
        """Return a mask of the vocabulary with these ids."""
        mask = np.zeros(self.vocab_size, dtype=bool)
        mask[list(ids)] = True
        return mask

    def _token_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise DataError(f"data.tokenizer: {self._path}: tokenizer.json lacks the token {token}")
        return int(token_id)


def _template_of(folder: TokenizerFolder, usual_tools: Tools, thoughts: ThoughtSettings) -> ChatTemplate:
    """Compile the template of a folder. Raises `DataError` for a choice that the template does not read."""
    source, name = folder.template.source, folder.template.name
    if thoughts.enable_thinking is None:
        return ChatTemplate(source, name, folder.special_tokens, usual_tools)
    variables: dict[str, str | bool] = {**folder.special_tokens, _ENABLE_THINKING: thoughts.enable_thinking}
    template = ChatTemplate(source, name, variables, usual_tools)
    if _ENABLE_THINKING not in template.variables_used:
        raise DataError(
            f"data.thoughts.{_ENABLE_THINKING}: found {str(thoughts.enable_thinking).lower()}, but the chat template "
            f"({name}) does not read {_ENABLE_THINKING}; allowed: none, so leave it out"
        )
    return template


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern with one group that matches the longest of the tokens that start at a character."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _added_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer adds before and after any text, unless asked not to."""
    encoding = tokenizer.encode("a")
    places = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    return tuple(encoding.ids[: places[0]]), tuple(encoding.ids[places[-1] + 1 :])


def _text_tokens(tokenizer: Tokenizer, text: str) -> _TextTokens:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return _TextTokens(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])


def _columns(tokens: _TextTokens) -> tuple[IntArray, IntArray, IntArray]:
    return tokens.ids, tokens.starts, tokens.ends
