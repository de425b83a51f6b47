"""Turn the turns of a sample into the messages that chat templates render."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mmtrain.data.formats.sample import MEDIA_ROLES, Turn
from mmtrain.data.text.chat_template import PROBE, Message, Tools
from mmtrain.data.text.sample_tokenizer import BadConversationError
from mmtrain.recipe.modalities import MediaKind

# Characters of the last private plane, which no text may hold: one for each character that starts a special token, and
# those that `chat_template` marks with.
_FIRST_ESCAPE = 0x10FE00
_RESERVED = re.compile("[\U0010fe00-\U0010ffff]")


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template."""

    messages: tuple[Message, ...]
    media: tuple[MediaKind, ...]  # the kinds of its media, in the order of their marks
    is_escaped: bool  # whether a text spelled a special token
    tools: Tools = ()

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Return the names of the tools that are described or called."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        functions = [entry.get("function", entry) for entry in (*self.tools, *calls)]
        names = [function.get("name") for function in functions if isinstance(function, dict)]
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))

    def plain_text(self, number: int) -> str | None:
        """Return the text of message `number`; None if it holds more than a text."""
        message = self.messages[number]
        content = message["content"]
        if isinstance(content, list) and len(content) == 1:
            content = content[0].get("text")
        return content if isinstance(content, str) and len(message) == 2 else None

    def with_probes(self, numbers: Collection[int]) -> tuple[Message, ...]:
        """Return the messages with `PROBE` as the text of those of these numbers."""
        messages: list[Message] = list(self.messages)
        for number in numbers:
            content = messages[number]["content"]
            is_text = content is None or isinstance(content, str)
            messages[number] = {
                **messages[number],
                "content": PROBE if is_text else [{"type": "text", "text": PROBE}],
            }
        return tuple(messages)


class TokenEscape:
    """Replaces the first character of special tokens that a text spells, so that they stay text in a rendering."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """Escape these tokens."""
        first_characters = sorted({token[0] for token in tokens})
        self._first_characters = first_characters
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._escapes = {character: chr(_FIRST_ESCAPE + i) for i, character in enumerate(first_characters)}
        self._originals = str.maketrans({escape: character for character, escape in self._escapes.items()})

    def escape(self, texts: list[str]) -> list[str] | None:
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
        escaped = self._pattern.sub(lambda token: self._escapes[token[0][0]] + token[0][1:], joined)
        if escaped == joined:
            return None
        ends = list(accumulate(map(len, texts)))
        return [escaped[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def escape_json(self, value: Any) -> Any:
        """Return a value of JSON's types with what its texts spell escaped. Raises `BadConversationError`."""
        if isinstance(value, str):
            escaped = self.escape([value])
            return value if escaped is None else escaped[0]
        if isinstance(value, list):
            return [self.escape_json(item) for item in value]
        if isinstance(value, dict):
            return {self.escape_json(key): self.escape_json(item) for key, item in value.items()}
        return value

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
    ) -> None:
        """Write all turns as lists of parts if `texts_as_parts`, else only those with media.

        has_tool_turns: whether the template knows the role of tools, whose turns are written as a user's otherwise.
        placeholders: what is written into the text for media of kinds that the template does not render as parts.
        parts: what stands for a medium of each kind that it does.
        """
        self._texts_as_parts = texts_as_parts
        self._has_tool_turns = has_tool_turns
        self._placeholders = placeholders
        self._escape = escape
        self._parts = parts

    def build(self, turns: Sequence[Turn], kinds: Mapping[str, MediaKind], tools: str = "") -> Conversation:
        """Build the messages of some turns, with the JSON list of tools that they may call.

        kinds: the marks of the sample's media in the turns of users and tools, with their kinds.

        Where a medium becomes a part, a line break right after its mark belongs to the mark, and so does one before
        marks that end the turn: data in LLaVA's format has it there, and templates write their own.

        Raises `BadConversationError`.
        """
        messages: list[Message] = []
        media: list[MediaKind] = []
        is_escaped = False
        for turn in turns:
            texts = [turn.text]
            turn_kinds: list[MediaKind] = []
            if turn.role in MEDIA_ROLES and any(mark in turn.text for mark in kinds):
                pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", turn.text)
                turn_kinds = [kinds[mark] for mark in pieces[1::2]]
                texts = self._without_line_breaks(pieces[::2], turn_kinds)
                media += turn_kinds
            escaped = self._escape.escape(texts)
            is_escaped = is_escaped or escaped is not None
            role = "user" if turn.role == "tool" and not self._has_tool_turns else turn.role
            message: dict[str, Any] = {"role": role, "content": self._content(escaped or texts, turn_kinds)}
            if turn.fields:
                fields = json.loads(turn.fields)
                message |= self._escape.escape_json(fields)
                is_escaped = is_escaped or message != {**message, **fields}
            messages.append(message)
        described = json.loads(tools) if tools else []
        escaped_tools = self._escape.escape_json(described)
        is_escaped = is_escaped or escaped_tools != described
        return Conversation(tuple(messages), tuple(media), is_escaped, tuple(escaped_tools))

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
