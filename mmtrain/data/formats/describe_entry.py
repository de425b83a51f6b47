"""Say of an entry that is no conversation which keys it has, and which layout is the nearest."""

from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from mmtrain.data.formats.column_paths import paths_of
from mmtrain.data.formats.layout_table import (
    ANY_FORMAT,
    CONVERSATION_KEYS,
    LIST_KEYS,
    MATCHES_KEY,
    SENTENCES_KEY,
    EntryFormat,
    EntryLayout,
)

_REJECTED_KEYS = ("rejected_response", "rejected_messages")  # ms-swift's, beside the better answer
_CHOSEN_KEY, _REJECTED_KEY = "chosen", "rejected"
_LABEL_KEY = "label"  # true or false beside `completion`: TRL's mark of a good or a bad answer
PREFERENCE_KEYS = (_CHOSEN_KEY, _REJECTED_KEY, *_REJECTED_KEYS, _LABEL_KEY)  # by which preference data is recognized
_MAX_SHOWN_KEYS = 20
_MIN_NEARNESS = 0.45  # of a layout that messages suggest, from 0 to 1
_MIN_SIMILARITY = 0.75  # of two keys that may be the same, misspelled
# Names that others give to these keys.
_SYNONYMS: Mapping[str, Collection[str]] = {
    **dict.fromkeys(
        CONVERSATION_KEYS, ("dialog", "dialogue", "dialogs", "dialogues", "turns", "chat", "chats", "msgs", "items")
    ),
    "query": ("question", "problem", "user", "human", "input", "prompt"),
    "response": ("answer", "answers", "assistant", "gpt", "bot", "reply", "output", "completion", "target", "solution"),
    "prompt": ("question", "problem", "query"),
    "completion": ("answer", "response", "output"),
    "instruction": ("task",),
    "output": ("response", "completion"),
    "text": ("content", "body", "document", "passage", "raw"),
}


def describe_preference(entry: Mapping[str, Any]) -> str | None:
    """Say that an entry holds a better and a worse answer; None for others."""
    found = next((key for key in _REJECTED_KEYS if entry.get(key) is not None), None)
    better = next((key for key in ("response", *CONVERSATION_KEYS) if key in entry), _CHOSEN_KEY)
    learned = f"{better}: {better}"
    if entry.get(_CHOSEN_KEY) is not None and entry.get(_REJECTED_KEY) is not None:
        found, better = _REJECTED_KEY, _CHOSEN_KEY
        learned = f"messages: {better}"
        if "prompt" in entry:
            learned = f"completion: {better}"
        elif "question" in entry:
            learned = f"query: question, response: {better}"
    if found is not None:
        return (
            f"it is preference data (`{better}` and `{found}`), and mmtrain learns answers, not preferences; to learn "
            f"the better ones alone, set columns: {{{learned}}} in its source"
        )
    if isinstance(entry.get(_LABEL_KEY), bool) and "completion" in entry:
        return (
            f"it is preference data (`completion` with `{_LABEL_KEY}` true or false), and mmtrain learns answers, not "
            f"preferences; keep the samples with `{_LABEL_KEY}` true, without this key"
        )
    return None


def describe_unknown(entry: Mapping[str, Any], entry_format: EntryFormat = ANY_FORMAT) -> str:
    """Say which keys an entry has that is of no layout, which are allowed, and which layout is the nearest."""
    keys = [f"`{key}`" for key in entry]
    found = ", ".join(keys[:_MAX_SHOWN_KEYS]) + (" and others" if len(keys) > _MAX_SHOWN_KEYS else "")
    layouts = entry_format.layouts
    kinds: dict[str, list[str]] = {}
    for layout in layouts:
        kinds.setdefault(layout.what, []).append(layout.shown)
    allowed = "; ".join(f"{' or '.join(shown)} ({what})" for what, shown in kinds.items())
    text = f"found the keys {found or '(none)'}, allowed: {allowed}"
    nearest = _nearest_layout(entry, layouts)
    if nearest is None:
        return text
    layout, columns = nearest
    missing = [f"`{key}`" for key in layout.keys if key not in columns]
    if missing:
        return f"{text}. The nearest is {layout.shown}, without {' and '.join(missing)}"
    named = ", ".join(f"{key}: {path}" for key, path in columns.items() if key != path)
    return f"{text}. The nearest is {layout.shown}: set columns: {{{named}}} in its source"


def _nearest_layout(
    entry: Mapping[str, Any], layouts: Iterable[EntryLayout]
) -> tuple[EntryLayout, dict[str, str]] | None:
    """Return the layout whose keys an entry almost has, with the paths in the entry that may stand for them."""
    paths = {path: value for path, value in paths_of(entry).items() if value is not None}
    best: tuple[float, EntryLayout, dict[str, str]] | None = None
    for layout in layouts:
        columns: dict[str, str] = {}
        total = 0.0
        for key in layout.keys:
            nearness = {
                path: _nearness(key, path, value) for path, value in paths.items() if path not in columns.values()
            }
            path = max(nearness, key=lambda name: nearness[name], default=None)
            if path is not None and nearness[path] > 0:
                columns[key] = path
                total += nearness[path]
        total /= len(layout.keys)
        if total >= _MIN_NEARNESS and (best is None or total > best[0]):
            best = total, layout, columns
    return None if best is None else best[1:]


def _nearness(key: str, path: str, value: Any) -> float:
    """Return how likely a path of an entry holds what `key` should, from 0 to 1."""
    is_list_key = key in (*LIST_KEYS, SENTENCES_KEY, MATCHES_KEY)
    if isinstance(value, list) != is_list_key and key not in ("prompt", "completion"):
        return 0
    if not isinstance(value, list | str):
        return 0
    name = path.rpartition(".")[2].lower()
    if path == key:
        return 1
    if name == key:
        return 0.95
    if name in _SYNONYMS.get(key, ()):
        return 0.9
    similarity = SequenceMatcher(None, name, key).ratio()
    return similarity if similarity >= _MIN_SIMILARITY else 0
