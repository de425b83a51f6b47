r"""Build a `Sample` from one entry of a data file, in the layouts that public datasets use.

LLaVA, ShareGPT:   {"conversations": [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", ...}],
                    "image": "a.png" or ["a.png", "b.png"], "audio": likewise, "video": likewise}
messages (OpenAI): {"messages": [{"role": "user", "content": "<image>What colour?"}, {"role": "assistant", ...}],
                    "images": ["a.png"], "audios": [...], "videos": [...]}

`layout_table` lists the others, which become lists of messages first. A turn may name its text `content`, `value` or
`text`, and its role `role` or `from`.

Media may also be given inside a turn: `content` as a list of parts `{"type": "text", "text": ...}` and
`{"type": "image", "image": "a.png"}` (or `image_url`, `audio`, `video`; or the path under `path` or `url`). A path
may be a data URL, which holds the medium itself, and wherever a path may be, so may the object of the `datasets`
library: `{"path": "a.png", "bytes": null}`, whose bytes only Parquet and Arrow files can hold. `marks`
decides whether `<image>` in a text is a mark or only spells one.

An image in an assistant's turn is one to draw (`Sample.target_images`): `{"role": "assistant", "content": "<image>"}`,
or a part of it. A mark there is ordinary text unless the sample has an image for every mark of all its turns.

What is not to be learned of a conversation is read in `target_keys`.

A `system` text beside the turns becomes the first turn. Output of tools (`tool`, `function`, `observation`) is context:
nothing is learned from it. Tools are described in `tools` (or `functions`) and called in `tool_calls` (or
`function_call`) of an assistant's turn: see `tool_calls`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mmtrain.data.formats.bad_sample import BadSampleError, json_type_name
from mmtrain.data.formats.layout_table import ANY_FORMAT, CONVERSATION_KEYS, MARK_BY_MEDIA_KIND, ROLES, EntryFormat
from mmtrain.data.formats.layouts import to_conversation
from mmtrain.data.formats.marks import MediaPart, ReadTurn, place_media
from mmtrain.data.formats.sample import (
    IMAGE_MARK,
    LITERAL_START,
    Role,
    Sample,
    Turn,
    with_marks_in_front,
)
from mmtrain.data.formats.target_keys import BadTargetKeyError, learns_entry, learns_turn
from mmtrain.data.formats.tool_calls import THOUGHT_PART, BadToolsError, read_fields, read_thought, read_tools
from mmtrain.data.media.media_bytes import Media
from mmtrain.recipe.settings.modalities import MediaKind

MediaResolver = Callable[[str, Any], Media]  # (kind, path, bytes or Media) -> the medium; raises BadSampleError

_PART_TYPES: dict[MediaKind, tuple[str, ...]] = {  # which are also keys of the part
    "image": ("image", "image_url"),
    "audio": ("audio", "audio_url", "input_audio"),
    "video": ("video", "video_url"),
}
_MEDIA_KEYS = {kind: (kind, f"{kind}s") for kind in _PART_TYPES}  # kind -> its key in the singular and plural
_MEDIA_KIND_BY_PART_TYPE = {name: kind for kind, names in _PART_TYPES.items() for name in names}
_CONTENT_KEYS = ("bytes", "path", "url")  # of a part, or of an object in place of a path, the preferred one first
_EMBEDDING_KEYS = ("bytes", "base64", "data", "source", "file", "file_id")  # by which layouts hold a medium itself
_TEXT_KEYS = ("content", "value", "text")  # of a turn
_PLAIN_TURN_KEYS = frozenset(("role", "from", *_TEXT_KEYS, "name", "tool_calls", "tool_call_id"))


class _BadTurnError(BadSampleError):
    """A turn that cannot be used; the reason completes a sentence that starts with the number of the turn."""

    def __init__(self, reason: str, kind: str = "malformed") -> None:
        super().__init__(kind, reason)


def build_sample(
    entry: Any,
    source: str,
    index: int,
    resolve_media: MediaResolver,
    entry_format: EntryFormat = ANY_FORMAT,
    default_id: str = "",
) -> Sample:
    """Build the sample of one entry.

    Args:
        entry: the parsed entry, normally a dict.
        source: the file it was read from.
        index: its position in that file, from 0.
        resolve_media: turns the paths of the entry into media.
        entry_format: which layouts it may have, by keys that are already ours.
        default_id: the sample's id where the entry has no `id`; by default its position.

    Raises:
        BadSampleError: the entry cannot be used.
    """
    if not isinstance(entry, dict):
        expected = "` or `".join(entry_format.keys)
        raise BadSampleError("malformed", f"found {json_type_name(entry)}, expected an object with `{expected}`")
    conversation = to_conversation(entry, entry_format)
    entry, key = conversation.entry, conversation.key
    listed: dict[MediaKind, list[Media]] = {}
    for kind, (singular, plural) in _MEDIA_KEYS.items():
        is_given = singular in entry or plural in entry
        values = _media_values(entry, kind, singular, plural) if is_given else ()
        listed[kind] = [resolve_media(kind, value) for value in values]
    turns, media = place_media(_read_turns(entry, key, resolve_media), listed, conversation.has_marks)
    turns = _follow_target_keys(entry, turns, key)
    try:
        tools = read_tools(entry)
    except BadToolsError as bad:
        raise BadSampleError("tools", f"it {bad}") from None
    template = entry.get("template")
    images, target_images = _divide_images(media["image"], turns)
    sample = Sample(
        id=entry_id(entry, default_id or str(index)),
        source=source,
        index=index,
        turns=turns,
        images=images,
        template=template if isinstance(template, str) else None,
        clips=tuple(media["audio"]),
        videos=tuple(media["video"]),
        tools=tools,
        target_images=target_images,
    )
    return sample if conversation.has_marks else with_marks_in_front(sample)


def _divide_images(images: Sequence[Media], turns: Iterable[Turn]) -> tuple[tuple[Media, ...], tuple[Media, ...]]:
    """Divide images, in the order of their marks in all turns, into those that are shown and those to draw."""
    marks_by_turn = [(turn.role == "assistant", turn.text.count(IMAGE_MARK)) for turn in turns]
    is_drawn = [drawn for drawn, num_marks in marks_by_turn for _ in range(num_marks)]
    if not any(is_drawn) or len(images) != len(is_drawn):
        return tuple(images), ()
    shown = tuple(image for image, drawn in zip(images, is_drawn, strict=True) if not drawn)
    return shown, tuple(image for image, drawn in zip(images, is_drawn, strict=True) if drawn)


def references_media(entry: dict[str, Any]) -> bool:
    """Return whether an entry names its media itself, beside its turns or inside them."""
    if any(entry.get(kind) or entry.get(f"{kind}s") for kind in MARK_BY_MEDIA_KIND):
        return True
    keys = (*CONVERSATION_KEYS, "prompt", "completion")
    turns = [turn for key in keys if isinstance(entry.get(key), list) for turn in entry[key]]
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    media_parts = [part for part in parts if part.get("type") in _MEDIA_KIND_BY_PART_TYPE]
    media_keys = (*_MEDIA_KIND_BY_PART_TYPE, *_CONTENT_KEYS)
    return any(part.get(key) for part in media_parts for key in media_keys)


def entry_id(entry: Any, default: str) -> str:
    """Return the `id` of an entry, or `default` where it has none that is a text or a number."""
    value = entry.get("id") if isinstance(entry, dict) else None
    return str(value) if isinstance(value, str | int) else default


def _read_turns(entry: dict[str, Any], key: str, resolve_media: MediaResolver) -> tuple[ReadTurn, ...]:
    """Read the turns of an entry."""
    entries = entry.get(key)
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else json_type_name(entries)
        raise BadSampleError("malformed", f"`{key}` is {what}, expected a list of messages")
    turns = []
    for number, turn in enumerate(entries, 1):
        try:
            turns.append(_read_turn(turn, resolve_media))
        except _BadTurnError as bad:
            reason = f"`{key}`: message {number} of {len(entries)} {bad.reason}"
            raise BadSampleError(bad.kind, reason) from None
    return _with_system_turn(entry["system"], turns) if "system" in entry else tuple(turns)


def _with_system_turn(system: Any, turns: list[ReadTurn]) -> tuple[ReadTurn, ...]:
    """Put the `system` text of an entry in front of its turns."""
    if system is None or system == "":
        return tuple(turns)
    if not isinstance(system, str):
        raise BadSampleError("malformed", f"`system` is {json_type_name(system)}, expected a text")
    fault = _text_fault(system)
    if fault is not None:
        raise BadSampleError("malformed", f"`system` is {fault}")
    system_turn = ReadTurn("system", (system,), "", True)
    if turns[0] == system_turn:
        return tuple(turns)
    if any(turn.role == "system" for turn in turns):
        raise BadSampleError("malformed", "it has both a `system` text and a system turn; give one of them")
    return (system_turn, *turns)


def _text_fault(text: str) -> str | None:
    """Say what is wrong with a text: half a surrogate pair, which JSON can spell and no tokenizer accepts, or our mark.

    Our mark is the character that tells marks of media from texts that spell them.
    """
    if text.isascii():
        return None
    if LITERAL_START in text:
        return f"a text with the private-use character U+{ord(LITERAL_START):X}, which mmtrain keeps for itself"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a text that is not valid Unicode: {error.reason}"
    return None


def _read_turn(turn: Any, resolve_media: MediaResolver) -> ReadTurn:
    if not isinstance(turn, dict):
        raise _BadTurnError(f"is {json_type_name(turn)}, expected an object")
    # A key that is null is one that other turns of a Parquet file have.
    role_key = "from" if turn.get("role") is None and ("from" in turn or "role" not in turn) else "role"
    text_key = "content" if role_key == "role" else "value"
    if turn.get(text_key) is None:
        text_key = next((key for key in _TEXT_KEYS if turn.get(key) is not None), text_key)
    content = turn.get(text_key)
    role = _read_role(turn, role_key)
    fields = ""
    is_learned = True
    if len(turn) > 2 or content is None:
        try:
            fields = read_fields(turn)
            is_learned = learns_turn(turn, turn.keys() - _PLAIN_TURN_KEYS, is_answer=role == "assistant")
        except BadToolsError as bad:
            raise _BadTurnError(str(bad), "tools") from None
        except BadTargetKeyError as bad:
            raise _BadTurnError(str(bad), "target") from None
    if content is None and fields:
        content = ""
    if isinstance(content, list):
        thought, content = _split_thought(content, role)
        if thought:
            if read_thought(fields):
                raise _BadTurnError("has a thought as a part of `content` and one beside it; give one of them")
            fields = json.dumps({**json.loads(fields or "{}"), "reasoning_content": thought}, ensure_ascii=False)
    pieces: tuple[str | MediaPart, ...]
    if isinstance(content, list) and text_key == "content":
        pieces = tuple(_read_part(part, resolve_media) for part in content)
    elif isinstance(content, str):
        pieces = (content,)
    else:
        raise _BadTurnError(f"has no text `{text_key}`")
    for piece in pieces:
        fault = _text_fault(piece) if isinstance(piece, str) else None
        if fault is not None:
            raise _BadTurnError(f"has {fault}")
    return ReadTurn(role, pieces, fields, is_learned)


def _split_thought(content: list[Any], role: Role) -> tuple[str, list[Any]]:
    """Split parts of a turn into the thought in front of them, in Mistral's layout, and the others."""
    is_thought = [isinstance(part, dict) and part.get("type") == THOUGHT_PART for part in content]
    if not any(is_thought):
        return "", content
    if role != "assistant" or any(is_thought[sum(is_thought) :]):
        where = "behind other parts" if role == "assistant" else f"in a turn of the role {role}"
        raise _BadTurnError(f"has a part of type {THOUGHT_PART!r} {where}, allowed: in front of an assistant's answer")
    thoughts = [part.get(THOUGHT_PART) for part in content[: sum(is_thought)]]
    texts = [
        piece.get("text") if isinstance(piece, dict) else None
        for thought in thoughts
        for piece in (thought if isinstance(thought, list) else [{"text": thought}])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise _BadTurnError(f"has a part of type {THOUGHT_PART!r} without a text `{THOUGHT_PART}`, or a list of texts")
    thought = "".join(map(str, texts))
    if (fault := _text_fault(thought)) is not None:
        raise _BadTurnError(f"has {fault}")
    return thought, content[len(thoughts) :]


def _read_role(turn: dict[str, Any], role_key: str) -> Role:
    role = turn.get(role_key)
    if isinstance(role, str) and role not in ROLES:
        role = role.strip().lower()  # `User`, `ASSISTANT`
    if not isinstance(role, str) or role not in ROLES:
        raise _BadTurnError(f"has `{role_key}` {turn.get(role_key)!r}, expected one of {', '.join(sorted(ROLES))}")
    return ROLES[role]


def _follow_target_keys(entry: dict[str, Any], turns: tuple[Turn, ...], key: str) -> tuple[Turn, ...]:
    """Return the turns, none of which is learned if the entry says so.

    Raises `BadSampleError`, also for an answer with an image that is not to be learned: a generator learns every image.
    """
    try:
        if not learns_entry(entry):
            turns = tuple(replace(turn, is_learned=False) for turn in turns)
    except BadTargetKeyError as bad:
        raise BadSampleError("target", f"it {bad}") from None
    for number, turn in enumerate(turns, 1):
        if not turn.is_learned and turn.role == "assistant" and IMAGE_MARK in turn.text:
            where = f"`{key}`: message {number} of {len(turns)}"
            raise BadSampleError("target", f"{where} holds an image to draw and is not to be learned; remove it")
    return turns


def _read_part(part: Any, resolve_media: MediaResolver) -> str | MediaPart:
    """Return a part of a message: its text, or its medium."""
    part_type = part.get("type") if isinstance(part, dict) else None
    if part_type == "text" and isinstance(part.get("text"), str):
        if len(part) > 2:
            _check_part(part)
        return str(part["text"])
    if not isinstance(part_type, str) or part_type not in _MEDIA_KIND_BY_PART_TYPE:
        allowed = ", ".join(("text", *_MEDIA_KIND_BY_PART_TYPE))
        raise _BadTurnError(f"has a part of type {part_type!r}, expected one of {allowed}")
    kind = _MEDIA_KIND_BY_PART_TYPE[part_type]
    own_keys = (part_type, *_PART_TYPES[kind])
    value = next((part[key] for key in own_keys if not _is_empty(part.get(key))), None)
    value = _content_of(part) if value is None else value
    if value is None:  # the part only marks the position of a medium of the sample's list
        embedding = next((key for key in _EMBEDDING_KEYS if not _is_empty(part.get(key))), None)
        if embedding is not None:
            raise _BadTurnError(f"holds its {kind} itself, as `{embedding}`; write it to a file", f"{kind}_url")
        return MediaPart(kind, None)
    return MediaPart(kind, resolve_media(kind, _medium_value(value, kind, part_type)))


def _is_empty(value: Any) -> bool:
    """Return whether a value says nothing, as the structs of Parquet files do that others of the list need."""
    return value is None or (isinstance(value, dict) and all(map(_is_empty, value.values())))


def _content_of(holder: dict[str, Any]) -> str | bytes | None:
    """Return the bytes or the path in an object that may hold both; JSON has no bytes."""
    values = {name: holder.get(name) for name in _CONTENT_KEYS}
    if isinstance(values["bytes"], bytes):
        return values["bytes"]
    return next((value for name, value in values.items() if name != "bytes" and isinstance(value, str)), None)


def _check_part(part: dict[str, Any]) -> None:
    """Reject a part of a message that says whether it is learned: turns are learned as a whole."""
    try:
        is_learned = learns_turn(part, part.keys() - {"type", "text"}, is_answer=True)
    except BadTargetKeyError as bad:
        raise _BadTurnError(f"has a part that {bad}", "target") from None
    if not is_learned:
        raise _BadTurnError("has a part that is not to be learned; say it of the whole message", "target")


def _media_values(entry: dict[str, Any], kind: MediaKind, singular: str, plural: str) -> list[Any]:
    """Return what an entry names as its media of one kind, under the singular or the plural key."""
    values, key = entry.get(singular), singular
    more = entry.get(plural)
    if more is not None:
        if values is not None:
            raise BadSampleError("malformed", f"it has both `{singular}` and `{plural}`; give one of them")
        values, key = more, plural
    if values is None:
        return []
    if not isinstance(values, list):
        values = [values]
    return [_medium_value(value, kind, key) for value in values]


def _medium_value(value: Any, kind: MediaKind, key: str) -> Any:
    """Return the path or the bytes of a medium, also of an object that holds them. Raises `BadSampleError`."""
    if isinstance(value, dict):
        value = _content_of(value)
        if value is None:
            raise BadSampleError(f"{kind}_url", f"`{key}` holds its {kind} itself; write it to a file")
    if (isinstance(value, str | bytes) and value) or isinstance(value, Media):
        return value
    what = "an empty path" if value == "" else json_type_name(value)
    raise BadSampleError("malformed", f"`{key}` is or holds {what}, expected a path or a list of paths")
