"""Data URLs (RFC 2397): media written into a text as `data:image/png;base64,iVBORw0...`."""

import base64
import binascii
import json
from typing import Any
from urllib.parse import unquote_to_bytes

_ANY_TYPES = ("", "application/octet-stream", "binary/octet-stream")  # that say nothing about the content
_MAX_SHOWN_TYPE_CHARACTERS = 60


def is_data_url(text: str) -> bool:
    """Return whether a text is a data URL."""
    return text[:5].lower() == "data:"


def find_embedded_media(value: Any) -> list[str | bytes]:
    """Return the data URLs and the bytes in a value of JSON's or Arrow's types, in their order there."""
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, str):
        return [value] if is_data_url(value) else []
    if isinstance(value, dict):
        value = list(value.values())
    children = value if isinstance(value, list) else []
    return [medium for child in children for medium in find_embedded_media(child)]


def read_url_head(kind: str, url: str) -> str | None:
    """Return what is wrong with a data URL in place of a medium of this kind; None where its content can be read."""
    head, comma, _ = url.partition(",")
    media_type, *parameters = head[len("data:") :].split(";")
    shown = head[:_MAX_SHOWN_TYPE_CHARACTERS]
    if not comma or "base64" not in [parameter.strip().lower() for parameter in parameters]:
        return f"{shown!r} is a data URL without base64; write it as data:{kind}/...;base64,..."
    media_type = media_type.strip().lower()
    if media_type not in _ANY_TYPES and not media_type.startswith(f"{kind}/"):
        return f"{shown!r} is a data URL of {media_type}, expected data:{kind}/...;base64,..."
    return None


def decode_base64(written: bytes) -> bytes:
    """Return what the part of a data URL behind its comma stands for, as it is written inside of a JSON string.

    Raises OSError.
    """
    try:
        if b"\\" in written:
            written = json.loads(b'"%s"' % written).encode()
        if b"%" in written:
            written = unquote_to_bytes(written)
        written = b"".join(written.split())
        return base64.b64decode(written + b"=" * (-len(written) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise OSError(f"a data URL whose base64 cannot be read: {error}") from None
