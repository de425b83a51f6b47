"""Conversations to compare tokenizers with transformers on: drawn, and as hostile as those of public datasets."""

from dataclasses import dataclass
from random import Random
from typing import Any, get_args

from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.formats.sample import Sample
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.sample_tokenizer import MediumFeatures, TimedItems
from mmtrain.families import FAMILIES
from mmtrain.recipe.settings.modalities import MODALITIES, MediaKind
from tests.data.chat_families import TILE_FEATURES, ChatFamily
from tests.data.model_folders import draw_text

_WORDS = (
    *(
        "The",
        "cat",
        "sat",
        "on",
        "it's",
        "we'll",
        "I",
        "don't",
        "x = 3;",
        "def f(a, b):",
        "    return a",
        "1999",
        "3.14159",
    ),
    *(
        "https://a.b/c?d=e&f",
        "naïve",
        "Straße",
        "Ελλάδα",
        "مرحبا",
        "שלום",
        "नमस्ते",
        "北京的天气",
        "こんにちは",
        "안녕",
        "ไทย",
    ),
    *("🙂", "👩‍👩‍👧", "🇩🇪", "e\u0301", "\u200b", "\xa0", "\u3000", "＜ﬁ＞", "\u00ad", "Ａ", "𝒳", "…", "—", "„quote“"),
    *(
        "[INST]",
        "<b>",
        "</b>",
        "<tag/>",
        "USER:",
        "ASSISTANT:",
        "###",
        "```",
        "{{ x }}",
        "{% if %}",
        "\\n",
        "&amp;",
        "| a | b |",
    ),
)
_SPACES = ("", " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\r\n", "\n    ")


def draw_words(random: Random, max_words: int = 12) -> str:
    """Draw a text of several scripts, with several kinds of space between words and around them."""
    if random.random() < 0.3:
        return draw_text(random, max_words)
    words = [random.choice(_SPACES) + random.choice(_WORDS) for _ in range(random.randint(1, max_words))]
    return "".join(words) + random.choice(("", "", "", " ", "\n", "\n\n", ".", "  "))


@dataclass(frozen=True)
class DrawnConversation:
    """A conversation as transformers reads it, and the features of its media in order."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    media: list[tuple[MediaKind, MediumFeatures]]

    @property
    def sample(self) -> Sample:
        """The conversation as mmtrain reads it from a data file."""
        messages = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                parts = [part if "text" in part else {**part, "path": "x"} for part in content]
                message = {**message, "content": parts}
            messages.append(message)
        entry = {"messages": messages, "tools": self.tools}
        return build_sample(entry, "f.json", 0, lambda kind, path: FileMedia(path))

    @property
    def features(self) -> dict[str, list[MediumFeatures]]:
        """The features of the media by modality, as mmtrain takes them."""
        return {
            name: of_modality
            for name, modality in MODALITIES.items()
            if (of_modality := [features for kind, features in self.media if kind in modality.media])
        }


def draw_conversation(chat: ChatFamily, random: Random) -> DrawnConversation:
    """Draw a conversation that the template of a family takes."""
    messages: list[dict[str, Any]] = []
    media: list[tuple[MediaKind, MediumFeatures]] = []
    tools = _draw_tools(random) if chat.has_tools and random.random() < 0.7 else None

    def add(role: str, parts: list[str], **fields: Any) -> None:
        parts = [_without(part, chat.unsaid) for part in parts]
        kinds = [part for part in parts if part in chat.tokens]
        contents = [{"type": part} if part in chat.tokens else {"type": "text", "text": part} for part in parts]
        content = contents if kinds or chat.all_parts else "".join(parts)
        messages.append({"role": role, "content": content, **fields})
        media.extend((kind, _draw_features(chat, kind, random)) for kind in get_kinds(kinds))

    if chat.has_system and random.random() < 0.5:
        add("system", [draw_words(random)])
    num_turns = random.choice((1, 1, 1, 2, 2, 3, 4, random.randint(5, 20)))
    for _ in range(num_turns):
        add("user", _draw_question(chat, random))
        while tools and random.random() < 0.4:
            calls = [_draw_call(tools, random) for _ in range(random.randint(1, chat.max_calls))]
            text = random.choice((None, "", draw_words(random)))
            messages.append({"role": "assistant", "content": text, "tool_calls": calls})
            messages += [{"role": "tool", "content": draw_words(random)} for _ in calls]
        answer = draw_words(random)
        if chat.thinks and not chat.has_tools and random.random() < 0.5:
            answer = f"<think>\n{draw_words(random)}\n</think>\n\n{answer}"
        if not chat.tokens and random.random() < 0.03:  # the processors' call makes a list of an empty text
            answer = ""
        thought = (
            {"reasoning_content": draw_words(random)}
            if chat.has_tools and chat.thinks and random.random() < 0.5
            else {}
        )
        add("assistant", [answer], **thought)
    return DrawnConversation(messages, tools, media)


def _without(text: str, tokens: tuple[str, ...]) -> str:
    for token in tokens:
        text = text.replace(token, token[1:-1])
    return text


def get_kinds(names: list[str]) -> list[MediaKind]:
    """Return names as kinds of media."""
    return [kind for name in names for kind in get_args(MediaKind) if kind == name]


def _draw_question(chat: ChatFamily, random: Random) -> list[str]:
    """Draw the parts of a question: texts and kinds of media, in any order."""
    kinds = sorted(chat.tokens)
    if not kinds:
        return [draw_words(random) if random.random() < 0.97 else ""]
    if random.random() < 0.3:
        return [draw_words(random)]
    parts: list[str] = []
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.5:
            parts.append(_beside_a_medium(draw_words(random)))
        of_part = [random.choice(kinds) for _ in range(random.randint(1, 2))]
        parts += [kinds[0]] * len(of_part) if chat.sorts_media else of_part
    if random.random() < 0.8:
        parts.append(_beside_a_medium(draw_words(random)))
    return parts


def _beside_a_medium(text: str) -> str:
    """Return a text without the line breaks that mmtrain takes as part of the mark beside it, which is deliberate."""
    return text.strip("\n") or "and"


def _draw_features(chat: ChatFamily, kind: MediaKind, random: Random) -> MediumFeatures:
    """Draw the LLM tokens of a medium."""
    markup = FAMILIES[chat.family].markups.get(kind)
    if markup is not None and markup.writes_times:
        num_items = random.randint(1, 5)
        return TimedItems((random.randint(1, 9),) * num_items, tuple(sorted(random.sample(range(2000), num_items))))
    if markup is not None and markup.row_break is not None:
        return (random.randint(1, 9),) * random.randint(1, 6)
    if chat.family == "internvl":
        return (TILE_FEATURES,) * random.randint(1, 12) if kind == "video" else TILE_FEATURES * random.randint(1, 5)
    return random.randint(1, 9)


def _draw_tools(random: Random) -> list[dict[str, Any]]:
    tools = []
    for name in random.sample(["get_weather", "add", "search_web", "zoom"], random.randint(1, 3)):
        parameters = {"type": "object", "properties": {draw_words(random, 1): {"type": "string"}}, "required": []}
        function = {"name": name, "description": draw_words(random), "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _draw_call(tools: list[dict[str, Any]], random: Random) -> dict[str, Any]:
    name = random.choice(tools)["function"]["name"]
    return {"type": "function", "function": {"name": name, "arguments": {"x": _draw_value(random)}}}


def _draw_value(random: Random, depth: int = 0) -> Any:
    """Draw a value of JSON's types."""
    plain = (draw_words(random, 4), 0, -3, 2.5, 10**12, True, None)
    if depth > 1 or random.random() < 0.6:
        return random.choice(plain)
    if random.random() < 0.5:
        return [_draw_value(random, depth + 1) for _ in range(random.randint(0, 3))]
    return {draw_words(random, 1): _draw_value(random, depth + 1) for _ in range(random.randint(0, 3))}
