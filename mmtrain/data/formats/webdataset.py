"""Reading WebDataset shards: tar files whose members, up to the first dot of their name, are called like their sample.

    0001.jpg 0001.json 0002.jpg 0002.txt ...

`.json` holds an entry in any layout of `conversation`; its paths name members of the sample (`0001.jpg` or `jpg`), and
without paths all its media are meant, in the order they lie. `.txt` is a caption. Other members are passed over, those
of names with a leading dot too.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mmtrain.data.formats.conversation import (
    BadSampleError,
    build_sample,
    caption_to_conversation,
    entry_id,
    references_media,
)
from mmtrain.data.formats.json_files import MAX_ENTRY_BYTES, parse_json
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.formats.tar_members import BadTarMember, read_tar_members
from mmtrain.data.media.media_bytes import TarMember
from mmtrain.errors import DataError
from mmtrain.recipe.schema import LimitSettings

_KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"), "image"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus"), "audio"),
    **dict.fromkeys(("mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg", "ts", "flv"), "video"),
}
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")


def read_shard(path: Path, limits: LimitSettings) -> Iterator[Sample | Quarantined]:
    """Read every sample of a shard in order. Raises `DataError` if it cannot be opened."""
    number = -1
    try:
        for number, (key, group) in enumerate(groupby(read_tar_members(path, limits), _key)):
            if key is None:  # names without a sample
                for member in group:
                    if isinstance(member, BadTarMember):
                        yield Quarantined(str(path), number, member.name, member.kind, member.reason)
                continue
            yield _read(path, number, key, list(group))
    except FileNotFoundError:
        raise DataError(f"{path}: no such shard") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _key(member: TarMember | BadTarMember) -> str | None:
    if isinstance(member, BadTarMember) and member.kind in ("tar_broken", "tar_too_many"):
        return None
    found = _NAME.fullmatch(member.name)
    return found[1] if found else None


def _read(path: Path, number: int, key: str, group: list[TarMember | BadTarMember]) -> Sample | Quarantined:
    entry: Any = None
    try:
        found: dict[str, TarMember] = {}  # by what follows the key
        for member in group:
            if isinstance(member, BadTarMember):
                raise BadSampleError(member.kind, member.reason)
            ending = member.name[len(key) + 1 :].lower()
            if ending in found:
                raise BadSampleError("malformed", f"two members called {member.name!r}")
            found[ending] = member
        entry = _entry(key, found)
        return build_sample(entry, str(path), number, lambda kind, name: _member(kind, name, key, found), name=key)
    except BadSampleError as bad:
        return Quarantined(str(path), number, entry_id(entry, key), bad.kind, bad.reason)


def _entry(key: str, found: dict[str, TarMember]) -> Any:
    """The entry of a sample, its media named by their endings where it does not name them."""
    if "json" in found:
        try:
            entry = parse_json(_text(found["json"]))
        except ValueError as error:
            raise BadSampleError("malformed", f"{found['json']} is not valid JSON: {error}") from None
    elif "txt" in found:
        try:
            entry = {"caption": _text(found["txt"]).decode("utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            raise BadSampleError("malformed", f"{found['txt']} is not UTF-8 text: {error.reason}") from None
    else:
        raise BadSampleError("malformed", f"sample {key!r} has neither a .json nor a .txt member")
    media = {ending: kind for ending in found if (kind := _KINDS.get(ending.rsplit(".", 1)[-1]))}
    if isinstance(entry, dict) and not references_media(entry):
        for ending, kind in media.items():
            entry = {**entry, f"{kind}s": [*entry.get(f"{kind}s", ()), ending]}
    return caption_to_conversation(entry, media.values())


def _member(kind: str, name: Any, key: str, found: dict[str, TarMember]) -> TarMember:
    short = str(name).removeprefix(f"{key}.").removeprefix(f"{key.rsplit('/', 1)[-1]}.").lower()
    if short not in found:
        raise BadSampleError(f"missing_{kind}", f"sample {key!r} has no member {name!r}; it has {', '.join(found)}")
    return found[short]


def _text(member: TarMember) -> bytes:
    if member.size > MAX_ENTRY_BYTES:
        raise BadSampleError("tar_member_size", f"{member}: {member.size} bytes of text, at most {MAX_ENTRY_BYTES}")
    with member.open() as file:
        return file.read()
