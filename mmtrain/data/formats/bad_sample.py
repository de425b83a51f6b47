"""Say why an entry of a data file is no sample."""

from typing import Any


class BadSampleError(Exception):
    """A sample that cannot be used; `kind` is one of `QUARANTINE_REASONS`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def json_type_name(value: Any) -> str:
    """Name the JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", type(None): "missing"}
    return names.get(type(value), f"a {type(value).__name__}")
