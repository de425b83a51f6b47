"""The members of a tar file: where each lies, read from headers alone.

Written for archives from anywhere: only plain files are taken, names may not lead out of the archive, sizes and counts
are capped, and nothing is unpacked or decompressed. Reads ustar, GNU and pax headers (POSIX.1-2001).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mmtrain.data.media.media_bytes import TarMember
from mmtrain.recipe.schema import LimitSettings

TAR_BLOCK_BYTES = 512
_MAX_META_BYTES = 64 << 10  # of a long name or a pax header
_MAX_PADDING = 1 << 20  # how far behind the end is looked for more
_PLAIN, _FOLDERS, _LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK = b"\0" + b"07", b"5", b"L", b"x", b"g", b"K"
_OTHER = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class BadTarMember:
    """A member that is not read, or (`tar_broken`, `tar_too_many`) the rest of its archive."""

    name: str
    kind: str  # the quarantine's
    reason: str


class _BrokenError(Exception):
    """The archive cannot be followed any further."""


def read_tar_members(path: Path, limits: LimitSettings) -> Iterator[TarMember | BadTarMember]:
    """The files of an archive in order; folders are passed over. Raises OSError if it cannot be opened."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            for number, member in enumerate(_members(file, str(path), end, limits)):
                if number == limits.max_members:
                    reason = f"more than data.limits.max_members = {limits.max_members}; the rest is not read"
                    yield BadTarMember(str(path), "tar_too_many", reason)
                    return
                yield member
        except _BrokenError as broken:
            yield BadTarMember(str(path), "tar_broken", f"{broken}; the rest is not read")


def _members(file: BinaryIO, shard: str, end: int, limits: LimitSettings) -> Iterator[TarMember | BadTarMember]:
    told: dict[str, str] = {}  # what meta members say of the next one
    while header := file.read(TAR_BLOCK_BYTES):
        if header.count(0) == TAR_BLOCK_BYTES:
            if file.read(_MAX_PADDING).strip(b"\0"):
                raise _BrokenError(f"something follows its end at byte {file.tell()}, perhaps another archive")
            return
        size, kind = _check(header, file.tell() - TAR_BLOCK_BYTES), header[156:157]
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            body = _meta(file, size, end)
            if kind == _LONG_NAME:
                told["path"] = body.rstrip(b"\0").decode("utf-8", "replace")
            elif kind == _PAX:
                told |= _pax(body)
            continue
        name = told.get("path") or _name(header)
        sparse = any(key.startswith("GNU.sparse") for key in told)
        size = _number(told["size"].encode(), 10) if "size" in told else size
        told = {}
        offset = file.tell()
        if kind in _PLAIN or kind in _OTHER or kind in _FOLDERS:
            has_body = kind in _PLAIN or kind == b"S"
        else:
            raise _BrokenError(f"member {name!r} is of unknown type {kind!r}")
        if has_body:
            if offset + size > end:
                raise _BrokenError(f"it ends inside of member {name!r}")
            file.seek(offset + -(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES)
        if kind in _FOLDERS:
            continue
        what = "a sparse file" if sparse else _OTHER.get(kind)
        yield _judged(TarMember(shard, name, offset, size), what, limits)
    raise _BrokenError("its end is missing")  # whoever wrote it was interrupted: nobody knows what else there was


def _judged(member: TarMember, what: str | None, limits: LimitSettings) -> TarMember | BadTarMember:
    """The member, or why it is not read."""
    name = member.name
    if what is not None:
        return BadTarMember(name, "tar_member", f"{member} is {what}; only plain files are read")
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        return BadTarMember(
            name, "tar_name", f"{member}: the name is absolute, leads upwards or holds control characters"
        )
    if member.size > limits.max_member_bytes:
        reason = f"{member}: {member.size} bytes, data.limits.max_member_bytes = {limits.max_member_bytes}"
        return BadTarMember(name, "tar_member_size", reason)
    return member


def _check(header: bytes, at: int) -> int:
    """The size in a header that is whole."""
    if at == 0 and header.startswith(_COMPRESSED):
        raise _BrokenError("it is compressed; unpack it")
    if len(header) < TAR_BLOCK_BYTES:
        raise _BrokenError("it ends inside of a header")
    stated = header[148:156].strip(b" \0")
    found = sum(header) - sum(header[148:156]) + 8 * ord(" ")  # the sum counts its own place as spaces
    if not stated.isdigit() or found != _number(stated):
        raise _BrokenError(f"no tar header at byte {at}")
    return _number(header[124:136])


def _meta(file: BinaryIO, size: int, end: int) -> bytes:
    if size > _MAX_META_BYTES or file.tell() + size > end:
        raise _BrokenError(f"a name or pax header of {size} bytes")
    body = file.read(-(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES)
    return body[:size]


def _pax(body: bytes) -> dict[str, str]:
    """Records `length key=value\\n` of a pax header."""
    found: dict[str, str] = {}
    while body:
        digits, _, _ = body[:20].partition(b" ")
        length = _number(digits, 10)
        record, body = body[len(digits) + 1 : length], body[length:]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) or not equals or not value.endswith(b"\n"):
            raise _BrokenError("a damaged pax header")
        found[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "replace")
    return found


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "replace")


def _number(field: bytes, base: int = 8) -> int:
    if field[:1] == b"\x80":  # GNU: large numbers in binary
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit() and digits:
        raise _BrokenError(f"a header with the number {field!r}")
    try:
        return int(digits or b"0", base)
    except ValueError:
        raise _BrokenError(f"a header with the number {field!r}") from None
