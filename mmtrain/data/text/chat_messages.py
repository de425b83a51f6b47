"""Turn the turns of a sample into the messages that chat templates render."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mmtrain.data.formats.sample import MEDIA_ROLES, Turn, written_text
from mmtrain.data.formats.tool_calls import THOUGHT_PART
from mmtrain.data.text.chat_template import FIRST_WHOLE, PROBE, Message, Tools
from mmtrain.data.text.sample_tokenizer import BadConversationError
from mmtrain.recipe.settings.modalities import MediaKind

# Characters of the last private plane, which no text may hold: two for each character that starts a special token, and
# those that `chat_template` marks with.
_FIRST_ESCAPE = 0x10FE00
_RESERVED = re.compile("[\U0010fe00-\U0010ffff]")
_THOUGHTS = re.compile(r".*</think>", re.S)  # inside of an answer; a template may render it otherwise without them


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template."""

    messages: tuple[Message, ...]
    media: tuple[MediaKind, ...]  # the kinds of its media, in the order of their marks
    is_learned: tuple[bool, ...]  # of each message
    tools: Tools = ()

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Return the names of the tools that are described or called."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        functions = [entry.get("function", entry) for entry in (*self.tools, *calls)]
        names = [function.get("name") for function in functions if isinstance(function, dict)]
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))

    def plain_text(self, number: int) -> str | None:
        """Return the text of message `number` behind the thoughts inside of it; None if it holds more than that."""
        content = self.messages[number]["content"]
        if isinstance(content, list):
            _, others = _split_thoughts(content)
            if len(others) > 1:
                return None
            content = others[0].get("text") if others else ""
        elif content is None:
            content = ""
        if not isinstance(content, str):
            return None
        thoughts = _THOUGHTS.match(content)
        return content[thoughts.end() :] if thoughts else content

    def with_probes(self, numbers: Collection[int]) -> tuple[Message, ...]:
        """Return the messages with `PROBE` as the text of those of these numbers, behind the thoughts inside of it."""
        messages: list[Message] = list(self.messages)
        for number in numbers:
            content = messages[number]["content"]
            is_text = content is None or isinstance(content, str)
            text = content or "" if is_text else "".join([part.get("text", "") for part in content])
            thoughts = _THOUGHTS.match(text)
            probed = thoughts.group() + PROBE if thoughts else PROBE
            parts = [] if is_text else [*_split_thoughts(content)[0], {"type": "text", "text": probed}]
            messages[number] = {**messages[number], "content": probed if is_text else parts}
        return tuple(messages)


def _split_thoughts(parts: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the parts that are thoughts, and the others."""
    of_thoughts: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for part in parts:
        (of_thoughts if part["type"] == THOUGHT_PART else others).append(part)
    return of_thoughts, others


def thought_as_part(message: Mapping[str, Any]) -> Message:
    """Return a message with its thought as the first part of its content, where Mistral's templates read it."""
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    content = message["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**others, "content": [{"type": THOUGHT_PART, THOUGHT_PART: message["reasoning_content"]}, *parts]}


@dataclass(frozen=True)
class TokensInTexts:
    """What becomes of the special tokens that a text spells; of others it may spell what it likes."""

    stay_text: tuple[str, ...]
    become_tokens: tuple[str, ...]  # of those that divide turns: hidden until the answers have been found


class TokenEscape:
    """Replaces the first character of special tokens that a text spells.

    So they stay text in a rendering, whatever the template does with it, and no text forges the tokens by which answers
    are found.
    """

    def __init__(self, answers: TokensInTexts, prompts: TokensInTexts) -> None:
        """Escape what answers and other texts may not spell, or not yet."""
        all_tokens = (answers.stay_text, answers.become_tokens, prompts.stay_text, prompts.become_tokens)
        first_characters = sorted({token[0] for tokens in all_tokens for token in tokens})
        assert 2 * len(first_characters) <= FIRST_WHOLE - _FIRST_ESCAPE, "escapes end where opaque texts start"
        stay = {character: chr(_FIRST_ESCAPE + 2 * i) for i, character in enumerate(first_characters)}
        become = {character: chr(_FIRST_ESCAPE + 2 * i + 1) for i, character in enumerate(first_characters)}
        self._first_characters = first_characters
        self._escapes: dict[bool, dict[str, str]] = {}  # whether of an answer -> token -> the escaped one
        self._patterns: dict[bool, re.Pattern[str]] = {}
        for is_answer, tokens in ((True, answers), (False, prompts)):
            self._escapes[is_answer] = {token: become[token[0]] + token[1:] for token in tokens.become_tokens}
            self._escapes[is_answer] |= {token: stay[token[0]] + token[1:] for token in tokens.stay_text}
            longest_first = sorted(self._escapes[is_answer], key=len, reverse=True)
            self._patterns[is_answer] = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stay_text = {True: frozenset(answers.stay_text), False: frozenset(prompts.stay_text)}
        self._any_stays = re.compile(f"[{''.join(stay.values())}]" if stay else "(?!)")
        self._originals = str.maketrans({escape: character for character, escape in stay.items()})
        self._hidden = str.maketrans({escape: character for character, escape in become.items()})

    def escape(self, texts: list[str], is_answer: bool) -> list[str] | None:
        """Return the parts of a message with what they spell escaped, also across parts; None if they spell nothing.

        Raises `BadConversationError` for a text with one of the characters that are needed for this.
        """
        joined = texts[0] if len(texts) == 1 else "".join(texts)
        if not joined.isascii() and (reserved := _RESERVED.search(joined)):
            raise BadConversationError(
                f"a text holds the private-use character U+{ord(reserved.group()):X}, by which mmtrain keeps text and "
                "special tokens apart"
            )
        if not any(character in joined for character in self._first_characters):
            return None
        escapes = self._escapes[is_answer]
        escaped = self._patterns[is_answer].sub(lambda token: escapes[token[0]], joined)
        if escaped == joined:
            return None
        ends = list(accumulate(map(len, texts)))
        return [escaped[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def escape_json(self, value: Any, is_answer: bool) -> Any:
        """Return a value of JSON's types with what its texts spell escaped. Raises `BadConversationError`."""
        if isinstance(value, str):
            escaped = self.escape([value], is_answer)
            return value if escaped is None else escaped[0]
        if isinstance(value, list):
            return [self.escape_json(item, is_answer) for item in value]
        if isinstance(value, dict):
            return {self.escape_json(key, is_answer): self.escape_json(item, is_answer) for key, item in value.items()}
        return value

    def left_as_text(self, text: str, is_answer: bool) -> set[str]:
        """Return the special tokens that a text spells and that stay text."""
        if not any(character in text for character in self._first_characters):
            return set()
        return set(self._patterns[is_answer].findall(text)) & self._stay_text[is_answer]

    def holds_text(self, rendering: str) -> bool:
        """Return whether a rendering holds a spelled token that stays text."""
        return not rendering.isascii() and self._any_stays.search(rendering) is not None

    def reveal(self, rendering: str) -> str:
        """Return a rendering with those spelled tokens that become tokens; its length is the same."""
        return rendering if rendering.isascii() else rendering.translate(self._hidden)

    def restore(self, text: str) -> str:
        """Return a text as it was before `escape`; its length is the same."""
        return text.translate(self._originals)


class ConversationBuilder:
    """Builds conversations in the form that a template reads."""

    def __init__(
        self,
        texts_as_parts: bool,
        has_tool_turns: bool,
        placeholders: Mapping[MediaKind, str],
        escape: TokenEscape,
        parts: Mapping[MediaKind, Mapping[str, Any]],
        thoughts_as_parts: bool = False,
    ) -> None:
        """Write all turns as lists of parts if `texts_as_parts`, else only those with media.

        has_tool_turns: whether the template knows the role of tools, whose turns are written as a user's otherwise.
        placeholders: what is written into the text for media of kinds that the template does not render as parts.
        parts: what stands for a medium of each kind that it does.
        thoughts_as_parts: whether it reads thoughts as parts of the content, and not beside it.
        """
        self._texts_as_parts = texts_as_parts
        self._has_tool_turns = has_tool_turns
        self._placeholders = placeholders
        self._escape = escape
        self._parts = parts
        self._thoughts_as_parts = thoughts_as_parts

    def build(self, turns: Sequence[Turn], kinds: Mapping[str, MediaKind], tools: str = "") -> Conversation:
        """Build the messages of some turns, with the JSON list of tools that they may call.

        kinds: the marks of the sample's media in the turns of users and tools, with their kinds.

        Where a medium becomes a part, a line break right after its mark belongs to the mark. So does a line break
        before marks that end the turn. Data in LLaVA's format has it there, and templates write their own.

        Raises `BadConversationError`.
        """
        messages: list[Message] = []
        media: list[MediaKind] = []
        for turn in turns:
            texts = [turn.text]
            turn_kinds: list[MediaKind] = []
            if turn.role in MEDIA_ROLES and any(mark in turn.text for mark in kinds):
                pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", turn.text)
                turn_kinds = [kinds[mark] for mark in pieces[1::2]]
                texts = self._without_line_breaks(pieces[::2], turn_kinds)
                media += turn_kinds
            is_answer = turn.role == "assistant"
            texts = [written_text(text) for text in texts]
            texts = self._escape.escape(texts, is_answer) or texts
            role = "user" if turn.role == "tool" and not self._has_tool_turns else turn.role
            message: dict[str, Any] = {"role": role, "content": self._content(texts, turn_kinds)}
            if turn.fields:
                message |= self._escape.escape_json(json.loads(turn.fields), is_answer)
            if self._thoughts_as_parts and is_answer and message.get("reasoning_content"):
                message = dict(thought_as_part(message))
            messages.append(message)
        described = self._escape.escape_json(json.loads(tools) if tools else [], is_answer=False)
        is_learned = tuple(turn.is_learned for turn in turns)
        return Conversation(tuple(messages), tuple(media), is_learned, tuple(described))

    def _without_line_breaks(self, texts: list[str], kinds: list[MediaKind]) -> list[str]:
        """Remove the line breaks that belong to the marks between the texts."""
        texts = list(texts)
        for i, kind in enumerate(kinds, 1):
            if kind not in self._placeholders:
                texts[i] = texts[i].removeprefix("\n")
        last = len(texts) - 1
        while last > 0 and not texts[last] and kinds[last - 1] not in self._placeholders:
            last -= 1
        if last < len(kinds):
            texts[last] = texts[last].removesuffix("\n")
        return texts

    def _content(self, texts: list[str], kinds: list[MediaKind]) -> str | list[Mapping[str, Any]]:
        """Return the content of a message from the texts between its media."""
        parts: list[Mapping[str, Any]] = []
        text = texts[0]
        for kind, next_text in zip(kinds, texts[1:], strict=True):
            if kind in self._placeholders:
                text += self._placeholders[kind] + next_text
                continue
            if text:
                parts.append({"type": "text", "text": text})
            parts.append(self._parts.get(kind, {"type": kind}))
            text = next_text
        if not parts and not self._texts_as_parts:
            return text
        if text or not parts:
            parts.append({"type": "text", "text": text})
        return parts
