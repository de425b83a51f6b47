"""Turn an entry of a data file into a conversation, by the keys that it has: see `layout_table`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmtrain.data.formats.bad_sample import BadSampleError, json_type_name
from mmtrain.data.formats.describe_entry import describe_preference, describe_unknown
from mmtrain.data.formats.entry_messages import (
    asked_messages,
    document_to_conversation,
    is_document,
    matches_to_document,
    pair_keys,
    pairs_to_messages,
    prompted_messages,
)
from mmtrain.data.formats.layout_table import (
    ANY_FORMAT,
    CAPTION_KEYS,
    CONVERSATION_KEYS,
    LAYOUT_KEYS,
    MARK_BY_MEDIA_KIND,
    MEDIA_KIND_BY_KEY,
    PAIRS_KEY,
    SENTENCES_KEY,
    EntryFormat,
    EntryLayout,
)


@dataclass(frozen=True)
class EntryTurns:
    """An entry that holds a list of turns under `key`. has_marks: whether `<image>` in its texts is a mark."""

    entry: dict[str, Any]
    key: str
    has_marks: bool = True


def to_conversation(entry: dict[str, Any], entry_format: EntryFormat = ANY_FORMAT) -> EntryTurns:
    """Return the conversation that an entry of any layout stands for, by the keys that `columns` made ours.

    Raises `BadSampleError`.
    """
    preference = describe_preference(entry)
    if preference is not None and not entry_format.chooses_answer():
        raise BadSampleError("preference", preference)
    layout = entry_format.find_layout(entry)
    if layout is None:
        raise BadSampleError("malformed", describe_unknown(entry, entry_format))
    key = layout.keys[0]
    if key in CONVERSATION_KEYS:
        turns = entry[key]
        has_pairs = isinstance(turns, list) and bool(turns) and all(pair_keys(turn) for turn in turns)
        return EntryTurns({**entry, key: pairs_to_messages(turns, key)} if has_pairs else entry, key)
    if key in CAPTION_KEYS:
        return EntryTurns(_caption_with_question(entry, layout, _media_kinds(entry)), "messages")
    if key in (PAIRS_KEY, SENTENCES_KEY):
        entry = matches_to_document(entry) if key == SENTENCES_KEY else entry
        if is_document(entry):
            return EntryTurns(document_to_conversation(entry), "messages")
        return EntryTurns({**entry, "messages": pairs_to_messages(entry[PAIRS_KEY], PAIRS_KEY)}, "messages", False)
    rest = {name: value for name, value in entry.items() if name not in LAYOUT_KEYS}
    messages = prompted_messages(entry) if key == "prompt" else asked_messages(entry, layout)
    return EntryTurns({**rest, "messages": messages}, "messages")


def caption_to_conversation(entry: Any, media_kinds: Iterable[str], entry_format: EntryFormat = ANY_FORMAT) -> Any:
    """Return an entry with a `caption` (or `text`) instead of turns as the conversation that it stands for.

    Any other entry is returned unchanged. The user's turn holds one mark for each of `media_kinds`, in order; plain
    text is the answer to an empty turn. Raises `BadSampleError` for a caption that is no text.
    """
    layout = entry_format.find_layout(entry) if isinstance(entry, dict) else None
    if layout is None or layout.keys[0] not in CAPTION_KEYS:
        return entry
    return _caption_with_question(entry, layout, media_kinds)


def _caption_with_question(entry: dict[str, Any], layout: EntryLayout, media_kinds: Iterable[str]) -> dict[str, Any]:
    """Return an entry with a caption as `caption_to_conversation` does."""
    caption = next((entry[key] for key in (*layout.keys, *CAPTION_KEYS) if isinstance(entry.get(key), str)), None)
    if caption is None:
        key = layout.keys[0]
        raise BadSampleError("malformed", f"`{key}` is {json_type_name(entry[key])}, expected a text")
    marks = "".join(MARK_BY_MEDIA_KIND[kind] for kind in media_kinds)
    rest = {name: value for name, value in entry.items() if name not in LAYOUT_KEYS}
    return rest | {"messages": [{"role": "user", "content": marks}, {"role": "assistant", "content": caption}]}


def _media_kinds(entry: Mapping[str, Any]) -> list[str]:
    """Return the kind of each medium that an entry lists, images before clips and videos."""
    kinds: list[str] = []
    for key, kind in MEDIA_KIND_BY_KEY.items():
        value = entry.get(key)
        num_media = len(value) if isinstance(value, list) else int(value is not None)
        kinds += [kind] * num_media
    return kinds
