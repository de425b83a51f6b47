"""The keys that entries of data may have, and the mapping by which a source says what its own keys mean."""

from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, Field

# Keys of the layouts, whose table is `mmtrain/data/formats/layout_table.py`; those beside them; and those of media.
LAYOUT_ENTRY_KEYS = (
    *("conversations", "messages", "conversation", "texts", "text_list", "image_info"),
    *("instruction", "output", "query", "response", "prompt", "completion", "caption", "text", "txt"),
    *("input", "history"),
)
OTHER_ENTRY_KEYS = ("system", "tools", "functions", "id", "template")
MEDIA_ENTRY_KEYS = ("image", "images", "audio", "audios", "video", "videos")
ENTRY_KEYS = (*LAYOUT_ENTRY_KEYS, *OTHER_ENTRY_KEYS, *MEDIA_ENTRY_KEYS)


def _known_columns(columns: dict[str, str]) -> dict[str, str]:
    """Return a mapping from our keys to paths in an entry. Raises ValueError for others."""
    for key, path in columns.items():
        if key not in ENTRY_KEYS:
            nearest = get_close_matches(key, ENTRY_KEYS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            swapped = " (the key is mmtrain's, the value that of the data)" if path in ENTRY_KEYS else ""
            raise ValueError(f"found the key {key!r}{swapped}; allowed: {', '.join(ENTRY_KEYS)}{hint}")
        if not all(path.split(".")):
            raise ValueError(f"{key}: found {path!r}, allowed: the key in the data, or a path to it as `data.turns`")
    return columns


Columns = Annotated[dict[str, Annotated[str, Field(min_length=1)]], AfterValidator(_known_columns)]
