"""Read WebDataset shards: tar files in which the members of a sample share their name up to its first dot.

    0001.jpg 0001.json 0002.jpg 0002.txt ...

`.json` holds an entry in any layout of `conversation`. Its paths name members of the sample (`0001.jpg` or `jpg`).
Without paths, the sample has all its media members, in the order of the archive. `.txt` is a caption. Other members are
ignored, and so are names with a leading dot.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.conversation import MediaResolver, build_sample, entry_id, references_media
from mmtrain.data.formats.energon import EnergonDataset
from mmtrain.data.formats.json_files import may_hold_data_urls, resolve_data_urls
from mmtrain.data.formats.json_list import MAX_ENTRY_BYTES
from mmtrain.data.formats.layout_table import ANY_FORMAT, EntryFormat
from mmtrain.data.formats.layouts import caption_to_conversation
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.formats.tar_members import BadTarMember, read_tar_members
from mmtrain.data.media.media_bytes import Media, TarMember
from mmtrain.errors import DataError
from mmtrain.foreign_json import parse_json
from mmtrain.limited_reads import now_reading_parts
from mmtrain.recipe.settings.data_settings import LimitSettings
from mmtrain.recipe.settings.source_path import SourcePath

_MEDIA_KIND_BY_EXTENSION = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"), "image"),
    **dict.fromkeys(("avif", "heic", "heif"), "image"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aac", "wma", "mka", "amr", "ac3"), "audio"),
    **dict.fromkeys(("aif", "aiff", "au", "caf", "w64", "weba"), "audio"),
    **dict.fromkeys(("mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg", "ts", "flv"), "video"),
}
# What archivers write beside files: macOS, and programs that do not know the headers of pax.
_FOLDER_OF_METADATA = re.compile(r"(?:^|/)(?:__MACOSX|PaxHeaders?(?:\.\d+)?)/")
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")


def read_shard(
    path: SourcePath,
    limits: LimitSettings,
    energon: EnergonDataset | None = None,
    entry_format: EntryFormat = ANY_FORMAT,
) -> Iterator[Sample | Quarantined]:
    """Read every sample of a shard in order, or those that `energon` does not exclude, from the members that it names.

    Raises `DataError` if the shard cannot be opened.
    """
    now_reading_parts(str(path))
    excluded: frozenset[str] = frozenset()
    if energon is not None:
        excluded = energon.excluded.get(str(path), excluded)
    # Members of no sample, such as those that macOS puts in between (`._0001.png`), do not separate others.
    of_samples = (
        member
        for member in read_tar_members(path, limits)
        if isinstance(member, BadTarMember) or _sample_key(member) is not None
    )
    try:
        for number, (key, members) in enumerate(groupby(of_samples, _sample_key)):
            if key is None:  # members that belong to no sample
                for member in members:
                    if isinstance(member, BadTarMember):
                        yield Quarantined(str(path), number, member.name, member.kind, member.reason)
                continue
            if key not in excluded:
                yield _read_sample(path, number, key, list(members), energon, entry_format)
    except FileNotFoundError:
        raise DataError(f"{path}: no such shard") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _sample_key(member: TarMember | BadTarMember) -> str | None:
    """Return the name that the members of a sample share; None for a member that belongs to no sample."""
    if isinstance(member, BadTarMember) and member.kind in ("tar_broken", "tar_too_many"):
        return None
    match = _KEY_AND_EXTENSION.fullmatch(member.name)
    if match is None or _FOLDER_OF_METADATA.search(member.name):
        return None
    return match[1]


def _read_sample(
    path: SourcePath,
    number: int,
    key: str,
    members: list[TarMember | BadTarMember],
    energon: EnergonDataset | None,
    entry_format: EntryFormat,
) -> Sample | Quarantined:
    entry: Any = None
    try:
        by_extension: dict[str, TarMember] = {}
        for member in members:
            if isinstance(member, BadTarMember):
                raise BadSampleError(member.kind, member.reason)
            extension = member.name[len(key) + 1 :].lower()
            if extension in by_extension:
                raise BadSampleError("malformed", f"two members called {member.name!r}")
            by_extension[extension] = member
        text = b""
        if energon is not None and energon.fields:
            entry = energon.make_entry(by_extension, _read_text)
        else:
            text = _read_text(by_extension["json"]) if "json" in by_extension else b""
            entry = _read_entry(key, by_extension, text, entry_format)

        def find_member(kind: str, name: Any) -> Media:
            return _find_member(kind, name, key, by_extension)

        resolve: MediaResolver = find_member
        if may_hold_data_urls(text):
            resolve = resolve_data_urls(str(path), by_extension["json"].offset, text, find_member)
        return build_sample(entry, str(path), number, resolve, entry_format, default_id=key)
    except BadSampleError as bad:
        return Quarantined(str(path), number, entry_id(entry, key), bad.kind, bad.reason)


def _read_entry(key: str, by_extension: dict[str, TarMember], text: bytes, entry_format: EntryFormat) -> Any:
    """Return the entry of a sample; where it names no media, they are named by their extensions.

    text: what its `.json` member holds, if it has one.
    """
    if "json" in by_extension:
        try:
            entry = entry_format.columns.rename(parse_json(text))
        except ValueError as error:
            raise BadSampleError("malformed", f"{by_extension['json']} is not valid JSON: {error}") from None
    elif "txt" in by_extension:
        try:
            entry = {"caption": _read_text(by_extension["txt"]).decode("utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            raise BadSampleError("malformed", f"{by_extension['txt']} is not UTF-8 text: {error.reason}") from None
    else:
        raise BadSampleError("malformed", f"sample {key!r} has neither a .json nor a .txt member")
    media_kinds = {}
    for extension in by_extension:
        kind = _MEDIA_KIND_BY_EXTENSION.get(extension.rsplit(".", 1)[-1])
        if kind is not None:
            media_kinds[extension] = kind
    if isinstance(entry, dict) and not references_media(entry):
        for extension, kind in media_kinds.items():
            entry = {**entry, f"{kind}s": [*entry.get(f"{kind}s", ()), extension]}
    return caption_to_conversation(entry, media_kinds.values(), entry_format)


def _find_member(kind: str, name: Any, key: str, by_extension: dict[str, TarMember]) -> TarMember:
    """Return the member that an entry names, with or without the sample's key in front."""
    extension = str(name).removeprefix(f"{key}.").removeprefix(f"{key.rsplit('/', 1)[-1]}.").lower()
    if extension not in by_extension:
        members = ", ".join(map(repr, by_extension))
        raise BadSampleError(f"missing_{kind}", f"sample {key!r} has no member {name!r}; it has {members}")
    return by_extension[extension]


def _read_text(member: TarMember) -> bytes:
    if member.size > MAX_ENTRY_BYTES:
        raise BadSampleError("tar_member_size", f"{member}: {member.size} bytes of text, at most {MAX_ENTRY_BYTES}")
    with member.open() as file:
        return file.read()
