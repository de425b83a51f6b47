"""A text that a template may write but not look into."""

from typing import Any, NoReturn

MAX_OPAQUE_TEXTS = 64
# Private-use characters that no text may hold (see `chat_messages`), one for each text as it is and without the white
# space around it.
FIRST_WHOLE = 0x10FF00
FIRST_TRIMMED = FIRST_WHOLE + MAX_OPAQUE_TEXTS


class InspectedTextError(Exception):
    """A template did more with a text than to write it."""


class OpaqueText(str):
    """Text that may be written, trimmed and put together with other text; all else raises `InspectedTextError`."""

    slot: int | None = None  # the number of the text, if this is one as it is in the conversation

    @classmethod
    def of(cls, slot: int) -> "OpaqueText":
        """Return the text with a number."""
        text = cls(chr(FIRST_WHOLE + slot))
        text.slot = slot
        return text

    def __str__(self) -> str:
        return str.__str__(self)

    def __bool__(self) -> bool:
        return True  # only texts that are more than white space are replaced by opaque ones

    def __add__(self, other: str) -> "OpaqueText":
        return OpaqueText("".join((str(self), str(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "OpaqueText":
        return OpaqueText("".join((str(other), str(self)))) if isinstance(other, str) else NotImplemented

    def strip(self, characters: str | None = None, /) -> "OpaqueText":
        """Return the text without white space around it. Raises `InspectedTextError` if that is not all."""
        if self.slot is None or characters is not None:
            raise InspectedTextError
        return OpaqueText(chr(FIRST_TRIMMED + self.slot))


def holds_opaque_text(value: object) -> bool:
    """Return whether an opaque text is somewhere in a value of JSON's types."""
    if isinstance(value, dict):
        return any(map(holds_opaque_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_opaque_text, value))
    return isinstance(value, OpaqueText)


def _inspected(self: OpaqueText, *_: Any, **__: Any) -> NoReturn:
    raise InspectedTextError


def _forbid_inspection() -> None:
    """Make every other method of a text raise, those of operators included."""
    allowed = {*vars(OpaqueText), "__new__", "__getattribute__"}
    for name, method in vars(str).items():
        if name not in allowed and callable(method):
            setattr(OpaqueText, name, _inspected)


_forbid_inspection()
