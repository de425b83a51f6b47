"""Read the elements of a JSON list one by one from a file that may be much larger than the memory.

The parser of the standard library is fed with pieces of the file. In one text, a single character outside of Latin-1
would quadruple the memory for the whole file. `ijson` streams too, and faster (`bench_json` at 3874c7cf). But it does
not know the positions that data URLs need, nor the lines of faults, and rejects what the standard library accepts (NaN,
half a surrogate pair).
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

MAX_ENTRY_BYTES = 64 << 20  # of one sample, and of one JSON or text member of a tar; keeps a hostile file out of memory
_PIECE_BYTES = 1 << 20
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_LONGEST_TOKEN = 16  # no token but texts and numbers is longer: an error further from the end is no effect of the cut
_VALUE_STARTS = {"{": "an object", '"': "a text", "n": "null", "t": "a bool", "f": "a bool", "-": "a number"}


class BadJsonError(ValueError):
    """A file that is no JSON list; `line` counts from 1."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


class NotAListError(BadJsonError):
    """A file that holds something else than a list; the reason names it."""


class NotTextError(BadJsonError):
    """A file that is not UTF-8 text."""


class JsonElement(NamedTuple):
    """One element of a list."""

    value: Any
    offset: int = 0  # of its first byte in the file, where `text` is kept
    text: bytes | None = None  # as it is written, where it may hold data URLs


def read_json_list(file: BinaryIO) -> Iterator[JsonElement]:
    """Yield the elements of a JSON list in UTF-8.

    Raises `BadJsonError` where `json.loads` would raise an error, and for an element of more than 64 MiB.
    """
    scanner = _Scanner(file)
    scanner.skip_white_space()
    if not scanner.skip("["):
        raise scanner.not_a_list()
    scanner.skip_white_space()
    has_more = not scanner.skip("]")
    while has_more:
        yield scanner.read_value()
        has_more = scanner.skip_comma()
        if not has_more and not scanner.skip("]"):
            raise scanner.fault("Expecting ',' delimiter")
    scanner.skip_white_space()
    if not scanner.is_at_end():
        raise scanner.fault("Extra data")


class _Scanner:
    """A position in a file, and the text around it: from some earlier position to where the file is read to."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._decode_value = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0  # in the text
        self._is_whole = False  # whether the file has been read to its end
        self._lines_before = 0  # in the file before the text
        self._bytes_read = 0
        self._known_position = 0  # in the text, whose byte in the file is known
        self._known_byte = 0

    def is_at_end(self) -> bool:
        return self._position == len(self._text) and not self._read_on()

    def skip_white_space(self) -> None:
        while True:
            match = _WHITE_SPACE.match(self._text, self._position)
            assert match is not None, "the pattern also matches nothing"
            self._position = match.end()
            if self._position < len(self._text) or not self._read_on():
                return

    def skip_comma(self) -> bool:
        """Skip a comma with white space around it, and return whether there is one."""
        match = _COMMA.match(self._text, self._position)
        if match is not None and match.end() < len(self._text):
            self._position = match.end()
            return True
        self.skip_white_space()
        has_comma = self.skip(",")
        self.skip_white_space()
        return has_comma

    def skip(self, character: str) -> bool:
        """Skip one character if it is this one, and return whether it is."""
        is_next = self._text.startswith(character, self._position)
        self._position += is_next
        return is_next

    def read_value(self) -> JsonElement:
        """Read the value that starts here, with as much more of the file as it needs."""
        while True:
            try:
                value, end = self._decode_value(self._text, self._position)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error):
                    raise self.fault(error.msg, error.pos) from None
                if len(self._text) - self._position > MAX_ENTRY_BYTES:
                    reason = f"{error.msg}, or a sample of more than {MAX_ENTRY_BYTES} bytes"
                    raise self.fault(reason, error.pos) from None
            except RecursionError:
                raise self.fault("nested too deeply") from None
            except ValueError as error:  # of a number with thousands of digits
                raise self.fault(str(error)) from None
            else:
                is_near_end = len(self._text) - end < _LONGEST_TOKEN
                if self._is_whole or not is_near_end or not isinstance(value, int | float):  # a number: 1 of 1.5e3
                    return self._element(value, end)
            self._read_on()

    def _element(self, value: Any, end: int) -> JsonElement:
        start = self._position
        self._position = end
        if self._text.find('"data:', start, end) < 0:
            return JsonElement(value)
        return JsonElement(value, self._byte_at(start), self._text[start:end].encode())

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Return whether the error may only be there because the text ends before the file does."""
        is_near_end = error.pos >= len(self._text) - _LONGEST_TOKEN
        return not self._is_whole and (is_near_end or error.msg.startswith("Unterminated string"))

    def _byte_at(self, position: int) -> int:
        """Return the byte in the file at which a position of the text is; it is not before the last one asked for."""
        self._known_byte += len(self._text[self._known_position : position].encode())
        self._known_position = position
        return self._known_byte

    def _read_on(self) -> bool:
        """Drop the text before the position, and read at least as much as is kept; return whether there was more."""
        if self._is_whole:
            return False
        self._byte_at(self._position)
        self._lines_before += self._text.count("\n", 0, self._position)
        kept = self._text[self._position :]
        self._text = ""  # before more is read: texts may be large
        self._position = 0
        self._known_position = 0
        piece = self._file.read(max(_PIECE_BYTES, len(kept)))
        if self._bytes_read == 0 and piece.startswith(codecs.BOM_UTF8):
            self._known_byte = len(codecs.BOM_UTF8)
        self._text = kept + self._decoded(piece)
        self._bytes_read += len(piece)
        self._is_whole = not piece
        return not self._is_whole

    def _decoded(self, piece: bytes) -> str:
        pending_bytes = len(self._decoder.getstate()[0])
        try:
            return self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            byte = self._bytes_read - pending_bytes + error.start
            raise NotTextError(f"{error.reason} at byte {byte}", self._lines_before + 1) from None

    def not_a_list(self) -> BadJsonError:
        """Return the error for a file that does not start with a list."""
        start = self._text[self._position : self._position + 1]
        what = "a number" if start.isdigit() else _VALUE_STARTS.get(start)
        return self.fault("Expecting value") if what is None else NotAListError(what)

    def fault(self, reason: str, position: int | None = None) -> BadJsonError:
        """Return an error with the line of a position of the text, by default the present one."""
        end = self._position if position is None else position
        return BadJsonError(reason, self._lines_before + self._text.count("\n", 0, end) + 1)
