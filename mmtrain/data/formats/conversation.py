"""From one entry of a data file to a `Sample`, in the layouts people use.

LLaVA, ShareGPT:   {"conversations": [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", ...}],
                    "image": "a.png" or ["a.png", "b.png"], "audio": likewise, "video": likewise}
messages (OpenAI): {"messages": [{"role": "user", "content": "<image>What colour?"}, {"role": "assistant", ...}],
                    "images": ["a.png"], "audios": [...], "videos": [...]}

Media may also stand where they are shown: `content` as a list of parts `{"type": "text", "text": ...}` and
`{"type": "image", "image": "a.png"}` (or `image_url`, `audio`, `video`).

A `system` beside the turns becomes the first of them. What tools gave back (`tool`, `function`, `observation`) is read
as a user's turn: context, from which nothing is learned.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Role, Sample, Turn
from mmtrain.data.media.media_bytes import Media

CONVERSATION_KEYS_BY_FORMAT = {
    "llava": ("conversations",),
    "messages": ("messages",),
}  # format -> where its turns stand
CONVERSATION_KEYS = ("conversations", "messages")
MARK_BY_MEDIA_KIND = {"image": IMAGE_MARK, "audio": AUDIO_MARK, "video": VIDEO_MARK}
_KEYS = {kind: (kind, f"{kind}s") for kind in MARK_BY_MEDIA_KIND}
MediaResolver = Callable[[str, Any], Media]  # kind, what stands for a medium -> the medium; raises BadSampleError
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "user"),
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
}
_TOOLS = ("tools", "functions")  # beside the turns: what tools there are
_CALLS = ("tool_calls", "function_call")  # in a turn: which ones to call
_PARTS = {"image": "image", "image_url": "image", "audio": "audio", "audio_url": "audio", "input_audio": "audio"}
_PARTS |= {"video": "video", "video_url": "video"}
_CAPTIONS = ("caption", "text")


class BadSampleError(Exception):
    """A sample that cannot be used; `kind` is the quarantine's."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def build_sample(
    entry: Any,
    source: str,
    index: int,
    media_of: MediaResolver,
    layout: tuple[str, ...] = CONVERSATION_KEYS,
    name: str = "",
) -> Sample:
    """Make a sample of an entry; `media_of` finds what its paths stand for. Raises `BadSampleError`.

    name: what it is called where the entry has no `id`; by default its place in the file.
    """
    if not isinstance(entry, dict):
        raise BadSampleError(
            "malformed", f"found {json_type_name(entry)}, expected an object with `{'` or `'.join(layout)}`"
        )
    found: dict[str, list[Media]] = {}
    for kind, (one, several) in _KEYS.items():
        named = _listed(entry, one, several) if one in entry or several in entry else ()
        found[kind] = [media_of(kind, value) for value in named]
    turns = _turns(entry, layout, found, media_of)
    template = entry.get("template")
    return Sample(
        id=entry_id(entry, name or str(index)),
        source=source,
        index=index,
        turns=turns,
        images=tuple(found["image"]),
        template=template if isinstance(template, str) else None,
        clips=tuple(found["audio"]),
        videos=tuple(found["video"]),
    )


def caption_to_conversation(entry: Any, media: Iterable[str]) -> Any:
    """An entry that has a `caption` (or `text`) and no conversation, as the conversation it stands for.

    media: the kinds of its media, in order.
    """
    if not isinstance(entry, dict) or any(key in entry for key in CONVERSATION_KEYS):
        return entry
    text = next((entry[key] for key in _CAPTIONS if isinstance(entry.get(key), str)), None)
    if text is None:
        return entry
    asked = "".join(MARK_BY_MEDIA_KIND[kind] for kind in media)
    return entry | {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]}


def references_media(entry: dict[str, Any]) -> bool:
    """Whether an entry says itself which media it has, beside its turns or in them."""
    if any(entry.get(kind) or entry.get(f"{kind}s") for kind in MARK_BY_MEDIA_KIND):
        return True
    turns = [turn for key in CONVERSATION_KEYS if isinstance(entry.get(key), list) for turn in entry[key]]
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in _PARTS and part.get(part["type"]) for part in parts)


def entry_id(entry: Any, otherwise: str) -> str:
    """The `id` of an entry."""
    found = entry.get("id") if isinstance(entry, dict) else None
    return str(found) if isinstance(found, str | int) else otherwise


def json_type_name(value: Any) -> str:
    """What kind of JSON value this is, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", type(None): "missing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _turns(
    entry: dict[str, Any], layout: tuple[str, ...], found: dict[str, list[Media]], media_of: MediaResolver
) -> tuple[Turn, ...]:
    key = next((key for key in layout if key in entry), layout[0])
    turns = entry.get(key)
    if not isinstance(turns, list) or not turns:
        found_instead = "an empty list" if turns == [] else json_type_name(turns)
        raise BadSampleError("malformed", f"`{key}` is {found_instead}, expected a list of messages")
    for tools in _TOOLS:
        if tools in entry and entry[tools] not in (None, "", "[]", []):
            raise BadSampleError("tools", f"its tools stand in `{tools}`; write them into a `system` text")
    try:
        made = tuple([_turn(turn, found, media_of) for turn in turns])
    except _BadTurnError as bad:
        raise BadSampleError(bad.kind, f"`{key}`: message {bad.number(turns)} of {len(turns)} {bad.reason}") from None
    return _led(entry["system"], made) if "system" in entry else made


def _led(system: Any, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns, behind the text that stands beside them for all."""
    if system is None or system == "":
        return turns
    if not isinstance(system, str):
        raise BadSampleError("malformed", f"`system` is {json_type_name(system)}, expected a text")
    if (wrong := _not_unicode(system)) is not None:
        raise BadSampleError("malformed", f"`system` is {wrong}")
    first = Turn("system", system)
    if turns[0] == first:
        return turns
    if any(turn.role == "system" for turn in turns):
        raise BadSampleError("malformed", "it has both a `system` and a system's turn; give one of them")
    return (first, *turns)


def _not_unicode(text: str) -> str | None:
    """What is wrong with a text: JSON can spell half a surrogate pair, and no tokenizer takes it."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a text that is not valid Unicode: {error.reason}"
    return None


class _BadTurnError(BadSampleError):
    """A turn that cannot be used; the reason goes on where the place of the turn was told."""

    def __init__(self, turn: Any, reason: str, kind: str = "malformed") -> None:
        super().__init__(kind, reason)
        self._turn = turn

    def number(self, turns: list[Any]) -> int:
        """Which of the turns it is, from 1."""
        return next(i for i, turn in enumerate(turns, 1) if turn is self._turn)


def _turn(turn: Any, found: dict[str, list[Media]], media_of: MediaResolver) -> Turn:
    if not isinstance(turn, dict):
        raise _BadTurnError(turn, f"is {json_type_name(turn)}, expected an object")
    says, who = ("content", "role") if "role" in turn else ("value", "from")
    text = turn.get(says)
    if len(turn) > 2:
        _check_rest(turn)
    if isinstance(text, list) and says == "content":
        text = "".join(_part(turn, part, found, media_of) for part in text)
    if not isinstance(text, str):
        raise _BadTurnError(turn, f"has no text `{says}`")
    role = turn.get(who)
    if not isinstance(role, str) or role not in _ROLES:
        raise _BadTurnError(turn, f"has `{who}` {role!r}, expected one of {', '.join(sorted(_ROLES))}")
    if (wrong := _not_unicode(text)) is not None:
        raise _BadTurnError(turn, f"has {wrong}")
    return Turn(_ROLES[role], text)


def _check_rest(turn: dict[str, Any]) -> None:
    """Refuse what stands beside a turn's text and changes what is learned from it."""
    called = next((key for key in _CALLS if turn.get(key)), None)
    if called is not None:
        raise _BadTurnError(turn, f"calls tools in `{called}`; write the calls into its text", "tools")
    if turn.get("weight") not in (None, 1):
        raise _BadTurnError(turn, f"has `weight` {turn['weight']!r}; every answer is learned from alike")


def _part(turn: Any, part: Any, found: dict[str, list[Media]], media_of: MediaResolver) -> str:
    """The text of a part of a message: a mark where it is a medium, which is added to those found."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if not isinstance(kind, str) or kind not in _PARTS:
        allowed = ", ".join(("text", *_PARTS))
        raise _BadTurnError(turn, f"has a part of type {kind!r}, expected one of {allowed}")
    value = part.get(kind)
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        value = value["url"]
    if isinstance(value, dict):
        raise _BadTurnError(turn, f"holds its {_PARTS[kind]} itself; write it to a file", f"{_PARTS[kind]}_url")
    if value is not None:  # else it only shows where a medium of the sample's list goes
        found[_PARTS[kind]].append(media_of(_PARTS[kind], _path(value, kind)))
    return MARK_BY_MEDIA_KIND[_PARTS[kind]]


def _listed(entry: dict[str, Any], one: str, several: str) -> list[Any]:
    """What stands for the media of one kind, under its singular or its plural."""
    values, key = entry.get(one), one
    if (more := entry.get(several)) is not None:
        if values is not None:
            raise BadSampleError("malformed", f"it has both `{one}` and `{several}`; give one of them")
        values, key = more, several
    if values is None:
        return []
    if not isinstance(values, list):
        values = [values]
    return [_path(value, key) for value in values]


def _path(value: Any, key: str) -> Any:
    if (isinstance(value, str) and value) or isinstance(value, Media):
        return value
    found = "an empty path" if value == "" else json_type_name(value)
    raise BadSampleError("malformed", f"`{key}` is or holds {found}, expected a path or a list of paths")
