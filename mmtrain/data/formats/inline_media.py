"""Media inside of a text: locate the data URLs (`data:image/png;base64,...`) of an entry in its file.

An index holds where they are, not what they hold: with their bytes it would be as large as the data.
"""

import json
import re

from mmtrain.data.formats.conversation import BadSampleError, MediaResolver
from mmtrain.data.media.data_urls import read_url_head
from mmtrain.data.media.media_bytes import InlineMedia, Media

# A JSON string that starts like a data URL; a quotation mark inside of a string has a backslash before it.
_DATA_URL = re.compile(rb'(?<!\\)"(data:[^"\\]*(?:\\.[^"\\]*)*)"')


def may_hold_data_urls(text: bytes) -> bool:
    """Return whether the JSON text of an entry may hold data URLs."""
    return b'"data:' in text


def resolve_data_urls(file: str, offset: int, text: bytes, resolve_media: MediaResolver) -> MediaResolver:
    """Return a resolver that locates data URLs in an entry, and leaves everything else to `resolve_media`.

    text: the JSON text of the entry, which is at byte `offset` of the file.
    """
    places: dict[str, InlineMedia] = {}
    for match in _DATA_URL.finditer(text):
        written = match[1]
        url = written.decode() if b"\\" not in written else json.loads(match[0])
        content_start = written.find(b",") + 1
        places[url] = InlineMedia(file, offset + match.start(1) + content_start, len(written) - content_start)

    def resolve(kind: str, value: object) -> Media:
        place = places.get(value) if isinstance(value, str) else None
        if place is None:
            return resolve_media(kind, value)
        assert isinstance(value, str), "only texts are keys"
        fault = read_url_head(kind, value)
        if fault is not None:
            raise BadSampleError(f"{kind}_url", fault)
        return place

    return resolve
