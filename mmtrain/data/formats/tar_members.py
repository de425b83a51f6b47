"""List the members of a tar file with their locations, from headers alone.

Written for archives from untrusted places: only plain files are accepted, names may not lead out of the archive, sizes
and counts are limited, and nothing is unpacked or decompressed. Reads ustar, GNU and pax headers (POSIX.1-2001).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from mmtrain.data.media.media_bytes import TarMember
from mmtrain.data.remote.locations import open_location
from mmtrain.recipe.settings.data_settings import LimitSettings
from mmtrain.recipe.settings.source_path import SourcePath

TAR_BLOCK_BYTES = 512
_MAX_META_BYTES = 1 << 20  # of a long name or a pax header, in which macOS keeps attributes of files
_MAX_PADDING_BYTES = 1 << 20  # searched behind the end marker for a second archive
# Type flags in a header.
_PLAIN_FILE = b"\0" + b"07"
_FOLDER = b"5"
_LONG_NAME = b"L"
_LONG_LINK = b"K"
_PAX = (b"x", b"X")  # of POSIX and of Solaris
_PAX_GLOBAL = b"g"
_SPARSE = b"S"
_VOLUME_LABEL = b"V"
_REJECTED_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    _SPARSE: "a sparse file",
}
_COMPRESSED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class BadTarMember:
    """A member that is not read, or (`tar_broken`, `tar_too_many`) the rest of its archive."""

    name: str
    kind: str  # a key of `QUARANTINE_REASONS`
    reason: str


class _BrokenArchiveError(Exception):
    """The structure of the archive is broken, and its rest cannot be read."""


def read_tar_members(path: SourcePath, limits: LimitSettings) -> Iterator[TarMember | BadTarMember]:
    """Yield the files of an archive in order; folders are skipped. Raises OSError if it cannot be opened."""
    with open_location(str(path)) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            for number, member in enumerate(_read_members(file, str(path), end, limits)):
                if number == limits.max_members:
                    reason = f"more than data.limits.max_members = {limits.max_members}; the rest is not read"
                    yield BadTarMember(str(path), "tar_too_many", reason)
                    return
                yield member
        except _BrokenArchiveError as broken:
            yield BadTarMember(str(path), "tar_broken", f"{broken}; the rest is not read")


def _read_members(file: BinaryIO, shard: str, end: int, limits: LimitSettings) -> Iterator[TarMember | BadTarMember]:
    overrides: dict[str, str] = {}  # what the last meta members state about the next member
    while header := file.read(TAR_BLOCK_BYTES):
        if header.count(0) == TAR_BLOCK_BYTES:
            if file.read(_MAX_PADDING_BYTES).strip(b"\0"):
                raise _BrokenArchiveError(f"data follows its end at byte {file.tell()}, perhaps another archive")
            return
        size = _checked_size(header, file.tell() - TAR_BLOCK_BYTES)
        type_flag = header[156:157]
        if type_flag == _VOLUME_LABEL:
            continue
        if type_flag in (_LONG_NAME, _LONG_LINK, *_PAX, _PAX_GLOBAL):
            body = _read_meta_body(file, size, end)
            if type_flag == _LONG_NAME:
                overrides["path"] = body.rstrip(b"\0").decode("utf-8", "replace")
            elif type_flag in _PAX:
                overrides |= _parse_pax(body)
            continue
        name = overrides.get("path") or _parse_name(header)
        is_pax_sparse = any(key.startswith("GNU.sparse") for key in overrides)
        if "size" in overrides:
            size = _parse_number(overrides["size"].encode(), 10)
        overrides = {}
        offset = file.tell()
        if type_flag not in _PLAIN_FILE and type_flag not in _REJECTED_TYPES and type_flag != _FOLDER:
            raise _BrokenArchiveError(f"member {name!r} is of unknown type {type_flag!r}")
        if type_flag in _PLAIN_FILE or type_flag == _SPARSE:  # the types with a body
            if offset + size > end:
                raise _BrokenArchiveError(f"it ends inside of member {name!r}")
            file.seek(offset + _round_up_to_block(size))
        if type_flag == _FOLDER:
            continue
        rejected_type = "a sparse file" if is_pax_sparse else _REJECTED_TYPES.get(type_flag)
        yield _checked_member(TarMember(shard, name, offset, size), rejected_type, limits)
    raise _BrokenArchiveError("its end is missing")  # its writer was interrupted: members may be missing


def _checked_member(member: TarMember, rejected_type: str | None, limits: LimitSettings) -> TarMember | BadTarMember:
    """Return the member, or why it is not read."""
    name = member.name
    if rejected_type is not None:
        return BadTarMember(name, "tar_member", f"{member} is {rejected_type}; only plain files are read")
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        reason = f"{member}: the name is absolute, contains `..` or holds control characters"
        return BadTarMember(name, "tar_name", reason)
    if member.size > limits.max_member_bytes:
        reason = f"{member}: {member.size} bytes, data.limits.max_member_bytes = {limits.max_member_bytes}"
        return BadTarMember(name, "tar_member_size", reason)
    return member


def _checked_size(header: bytes, position: int) -> int:
    """Return the size in a header after checking that the header is intact; `position` is its first byte."""
    if position == 0 and header.startswith(_COMPRESSED_MAGIC):
        raise _BrokenArchiveError("it is compressed; unpack it")
    if len(header) < TAR_BLOCK_BYTES:
        raise _BrokenArchiveError("it ends inside of a header")
    stated_sum = header[148:156].strip(b" \0")
    summed = header[:148] + 8 * b" " + header[156:]  # the checksum counts its own field as spaces
    sums = sum(summed), sum(summed) - 256 * sum(byte > 127 for byte in summed)  # old archivers add signed bytes
    if not stated_sum.isdigit() or _parse_number(stated_sum) not in sums:
        raise _BrokenArchiveError(f"no tar header at byte {position}")
    return _parse_number(header[124:136])


def _read_meta_body(file: BinaryIO, size: int, end: int) -> bytes:
    if size > _MAX_META_BYTES or file.tell() + size > end:
        raise _BrokenArchiveError(f"a name or pax header of {size} bytes")
    body = file.read(_round_up_to_block(size))
    return body[:size]


def _round_up_to_block(size: int) -> int:
    return -(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES


def _parse_pax(body: bytes) -> dict[str, str]:
    """Parse the records `length key=value\\n` of a pax header."""
    records: dict[str, str] = {}
    while body:
        digits, _, _ = body[:20].partition(b" ")
        length = _parse_number(digits, 10)
        record = body[len(digits) + 1 : length]
        body = body[length:]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) or not equals or not value.endswith(b"\n"):
            raise _BrokenArchiveError("a damaged pax header")
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "replace")
    return records


def _parse_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "replace")


def _parse_number(field: bytes, base: int = 8) -> int:
    if field[:1] == b"\x80":  # GNU: large numbers in binary
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit() and digits:
        raise _BrokenArchiveError(f"a header with the number {field!r}")
    try:
        return int(digits or b"0", base)
    except ValueError:
        raise _BrokenArchiveError(f"a header with the number {field!r}") from None
