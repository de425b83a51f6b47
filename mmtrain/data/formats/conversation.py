r"""Build a `Sample` from one entry of a data file, in the layouts that public datasets use.

LLaVA, ShareGPT:   {"conversations": [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", ...}],
                    "image": "a.png" or ["a.png", "b.png"], "audio": likewise, "video": likewise}
messages (OpenAI): {"messages": [{"role": "user", "content": "<image>What colour?"}, {"role": "assistant", ...}],
                    "images": ["a.png"], "audios": [...], "videos": [...]}

FineVision:        {"texts": [{"user": "What colour?", "assistant": "red"}, ...], "images": [...]}
                   media without marks come in front of the first question

OBELICS:           {"texts": ["A red square:", null, "and a blue one:", null], "images": [null, "a.png", null, "b.png"]}
                   a document whose texts and images take turns: one answer, in which the images are drawn
MMC4:              {"text_list": ["A red square.", "And a blue one."],
                    "image_info": [{"image_name": "b.png", "matched_text_index": 1}, ...]}
                   such a document, in which each image stands in front of its sentence

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mmtrain.data.formats.marks import MediaPart, ReadTurn, place_media
from mmtrain.data.formats.sample import (
    AUDIO_MARK,
    IMAGE_MARK,
    LITERAL_START,
    VIDEO_MARK,
    Role,
    Sample,
    Turn,
    with_marks_in_front,
)
from mmtrain.data.formats.target_keys import BadTargetKeyError, learns_entry, learns_turn
from mmtrain.data.formats.tool_calls import BadToolsError, read_fields, read_tools
from mmtrain.data.media.media_bytes import Media
from mmtrain.recipe.settings.modalities import MediaKind

# Value of a source's `format` -> keys under which an entry may hold its turns.
CONVERSATION_KEYS_BY_FORMAT = {"llava": ("conversations",), "messages": ("messages",)}
CONVERSATION_KEYS = ("conversations", "messages")
MARK_BY_MEDIA_KIND = {"image": IMAGE_MARK, "audio": AUDIO_MARK, "video": VIDEO_MARK}
MediaResolver = Callable[[str, Any], Media]  # (kind, path, bytes or Media) -> the medium; raises BadSampleError

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
}
_PART_TYPES: dict[MediaKind, tuple[str, ...]] = {  # which are also keys of the part
    "image": ("image", "image_url"),
    "audio": ("audio", "audio_url", "input_audio"),
    "video": ("video", "video_url"),
}
_MEDIA_KEYS = {kind: (kind, f"{kind}s") for kind in _PART_TYPES}  # kind -> its key in the singular and plural
_MEDIA_KIND_BY_PART_TYPE = {name: kind for kind, names in _PART_TYPES.items() for name in names}
_CONTENT_KEYS = ("bytes", "path", "url")  # of a part, or of an object in place of a path, the preferred one first
_EMBEDDING_KEYS = ("bytes", "base64", "data", "source", "file", "file_id")  # by which layouts hold a medium itself
_PLAIN_TURN_KEYS = frozenset(("role", "content", "from", "value", "name", "tool_calls", "tool_call_id"))
_SENTENCES_KEY, _MATCHES_KEY = "text_list", "image_info"  # of a document of MMC4
_MATCH_KEYS = ("image_name", "matched_text_index")
_CAPTION_KEYS = ("caption", "text", "txt")
PAIRS_KEY = "texts"  # a list of questions and answers; or of the texts of a document, null where an image stands
TEXT_KEYS = (*CONVERSATION_KEYS, PAIRS_KEY, *_CAPTION_KEYS)  # each of which makes an entry a sample


class BadSampleError(Exception):
    """A sample that cannot be used; `kind` is one of `QUARANTINE_REASONS`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class _BadTurnError(BadSampleError):
    """A turn that cannot be used; the reason completes a sentence that starts with the number of the turn."""

    def __init__(self, reason: str, kind: str = "malformed") -> None:
        super().__init__(kind, reason)


def build_sample(
    entry: Any,
    source: str,
    index: int,
    resolve_media: MediaResolver,
    keys: tuple[str, ...] = CONVERSATION_KEYS,
    default_id: str = "",
) -> Sample:
    """Build the sample of one entry.

    Args:
        entry: the parsed entry, normally a dict.
        source: the file it was read from.
        index: its position in that file, from 0.
        resolve_media: turns the paths of the entry into media.
        keys: the keys under which its turns may be, in order of preference.
        default_id: the sample's id where the entry has no `id`; by default its position.

    Raises:
        BadSampleError: the entry cannot be used.
    """
    if not isinstance(entry, dict):
        expected = "` or `".join(keys)
        raise BadSampleError("malformed", f"found {json_type_name(entry)}, expected an object with `{expected}`")
    if keys == CONVERSATION_KEYS and _SENTENCES_KEY in entry and _MATCHES_KEY in entry:
        entry = _matches_to_document(entry)
    has_texts = keys == CONVERSATION_KEYS and PAIRS_KEY in entry and not any(key in entry for key in keys)
    is_pairs = has_texts and not is_document(entry)
    if has_texts and not is_pairs:
        entry = _document_to_conversation(entry)
    if is_pairs:
        entry = {**entry, "messages": _pairs_to_messages(entry[PAIRS_KEY])}
    listed: dict[MediaKind, list[Media]] = {}
    for kind, (singular, plural) in _MEDIA_KEYS.items():
        is_given = singular in entry or plural in entry
        values = _media_values(entry, kind, singular, plural) if is_given else ()
        listed[kind] = [resolve_media(kind, value) for value in values]
    turns, media = place_media(_read_turns(entry, keys, resolve_media), listed, has_marks=not is_pairs)
    turns = _follow_target_keys(entry, turns, keys)
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
    return with_marks_in_front(sample) if is_pairs else sample


def _divide_images(images: Sequence[Media], turns: Iterable[Turn]) -> tuple[tuple[Media, ...], tuple[Media, ...]]:
    """Divide images, in the order of their marks in all turns, into those that are shown and those to draw."""
    marks_by_turn = [(turn.role == "assistant", turn.text.count(IMAGE_MARK)) for turn in turns]
    is_drawn = [drawn for drawn, num_marks in marks_by_turn for _ in range(num_marks)]
    if not any(is_drawn) or len(images) != len(is_drawn):
        return tuple(images), ()
    shown = tuple(image for image, drawn in zip(images, is_drawn, strict=True) if not drawn)
    return shown, tuple(image for image, drawn in zip(images, is_drawn, strict=True) if drawn)


def caption_to_conversation(entry: Any, media_kinds: Iterable[str]) -> Any:
    """Return an entry with a `caption` (or `text`) instead of turns as the conversation that it stands for.

    Any other entry is returned unchanged. The user's turn holds one mark for each of `media_kinds`, in order.
    """
    if not isinstance(entry, dict) or any(key in entry for key in (*CONVERSATION_KEYS, PAIRS_KEY)):
        return entry
    caption = next((entry[key] for key in _CAPTION_KEYS if isinstance(entry.get(key), str)), None)
    if caption is None:
        return entry
    marks = "".join(MARK_BY_MEDIA_KIND[kind] for kind in media_kinds)
    return entry | {"messages": [{"role": "user", "content": marks}, {"role": "assistant", "content": caption}]}


def is_document(entry: dict[str, Any]) -> bool:
    """Return whether the texts of an entry are those of a document, not questions and answers."""
    texts = entry.get(PAIRS_KEY)
    return isinstance(texts, list) and bool(texts) and all(text is None or isinstance(text, str) for text in texts)


def _document_to_conversation(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a document, whose lists of texts and images have one piece at each place, as one answer with images."""
    texts, images = entry[PAIRS_KEY], entry.get("images")
    if not isinstance(images, list) or len(images) != len(texts):
        what = f"a list of {len(images)}" if isinstance(images, list) else json_type_name(images)
        raise BadSampleError("malformed", f"`{PAIRS_KEY}` is a list of {len(texts)}, and `images` is {what}")
    parts: list[dict[str, str]] = []
    for place, (text, image) in enumerate(zip(texts, images, strict=True), 1):
        if (text is None) == (image is None):
            found = "neither a text nor an image" if text is None else "both a text and an image"
            raise BadSampleError("malformed", f"place {place} of {len(texts)} of the document holds {found}")
        parts += [{"type": "text", "text": "\n"}] if parts else []
        parts.append({"type": "image"} if text is None else {"type": "text", "text": text})
    answer = {"role": "assistant", "content": parts}
    return {**entry, "messages": [answer], "images": [image for image in images if image is not None]}


def _matches_to_document(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a document of MMC4, whose images name the sentences that they belong to, as one of two lists."""
    sentences, matches = entry[_SENTENCES_KEY], entry[_MATCHES_KEY]
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise BadSampleError(
            "malformed", f"`{_SENTENCES_KEY}` is {json_type_name(sentences)}, expected a list of texts"
        )
    if not isinstance(matches, list):
        raise BadSampleError("malformed", f"`{_MATCHES_KEY}` is {json_type_name(matches)}, expected a list of objects")
    images_before: list[list[str]] = [[] for _ in sentences]
    for number, match in enumerate(matches, 1):
        name, place = (match.get(key) if isinstance(match, dict) else None for key in _MATCH_KEYS)
        if not isinstance(name, str) or type(place) is not int or not 0 <= place < len(sentences):
            reason = (
                f"`{_MATCHES_KEY}`: image {number} of {len(matches)} has {_MATCH_KEYS[0]} {name!r} and "
                f"{_MATCH_KEYS[1]} {place!r}, expected a text and the place of one of {len(sentences)} texts, from 0"
            )
            raise BadSampleError("malformed", reason)
        images_before[place].append(name)
    texts: list[str | None] = []
    images: list[str | None] = []
    for sentence, names in zip(sentences, images_before, strict=True):
        texts += [None] * len(names)
        images += names
        if texts and texts[-1] is not None:
            texts[-1] += f" {sentence}"
            continue
        texts.append(sentence)
        images.append(None)
    rest = {key: value for key, value in entry.items() if key not in (_SENTENCES_KEY, _MATCHES_KEY)}
    return rest | {PAIRS_KEY: texts, "images": images}


def _pairs_to_messages(pairs: Any) -> list[dict[str, Any]]:
    """Return the messages of a list of questions and answers."""
    if not isinstance(pairs, list) or not pairs:
        what = "an empty list" if pairs == [] else json_type_name(pairs)
        raise BadSampleError("malformed", f"`{PAIRS_KEY}` is {what}, expected a list of objects")
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs, 1):
        for role in ("user", "assistant"):
            if not isinstance(pair, dict) or not isinstance(pair.get(role), str):
                reason = f"`{PAIRS_KEY}`: pair {number} of {len(pairs)} has no text `{role}`"
                raise BadSampleError("malformed", reason)
        rest = {key: value for key, value in pair.items() if key not in ("user", "assistant", "role", "content")}
        messages += [{"role": "user", "content": pair["user"]}]
        messages += [{**rest, "role": "assistant", "content": pair["assistant"]}]
    return messages


def references_media(entry: dict[str, Any]) -> bool:
    """Return whether an entry names its media itself, beside its turns or inside them."""
    if any(entry.get(kind) or entry.get(f"{kind}s") for kind in MARK_BY_MEDIA_KIND):
        return True
    turns = [turn for key in CONVERSATION_KEYS if isinstance(entry.get(key), list) for turn in entry[key]]
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    media_parts = [part for part in parts if part.get("type") in _MEDIA_KIND_BY_PART_TYPE]
    keys = (*_MEDIA_KIND_BY_PART_TYPE, *_CONTENT_KEYS)
    return any(part.get(key) for part in media_parts for key in keys)


def entry_id(entry: Any, default: str) -> str:
    """Return the `id` of an entry, or `default` where it has none that is a text or a number."""
    value = entry.get("id") if isinstance(entry, dict) else None
    return str(value) if isinstance(value, str | int) else default


def json_type_name(value: Any) -> str:
    """Name the JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", type(None): "missing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _read_turns(entry: dict[str, Any], keys: tuple[str, ...], resolve_media: MediaResolver) -> tuple[ReadTurn, ...]:
    """Read the turns of an entry."""
    key = next((key for key in keys if key in entry), keys[0])
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
    text_key, role_key = ("content", "role") if "role" in turn else ("value", "from")
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


def _read_role(turn: dict[str, Any], role_key: str) -> Role:
    role = turn.get(role_key)
    if isinstance(role, str) and role not in _ROLES:
        role = role.strip().lower()  # `User`, `ASSISTANT`
    if not isinstance(role, str) or role not in _ROLES:
        raise _BadTurnError(f"has `{role_key}` {turn.get(role_key)!r}, expected one of {', '.join(sorted(_ROLES))}")
    return _ROLES[role]


def _follow_target_keys(entry: dict[str, Any], turns: tuple[Turn, ...], keys: tuple[str, ...]) -> tuple[Turn, ...]:
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
            where = f"`{keys[0]}`: message {number} of {len(turns)}"
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
