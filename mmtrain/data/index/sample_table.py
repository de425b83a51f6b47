"""Keep samples as records in one file: a million of them take as much memory as their text, and processes share it.

As Python objects a million samples take gigabytes, in every process that trains or loads.
"""

import json
import mmap
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as _json_text
from pathlib import Path
from typing import Any, overload

from mmtrain.balance.columns import Lengths
from mmtrain.data.formats.sample import Sample, SampleCut, Turn
from mmtrain.data.media.media_bytes import FileMedia, InlineMedia, Media, ParquetCell, TarMember

_ARCHIVE_MEDIA: dict[str, type[TarMember] | type[ParquetCell] | type[InlineMedia]] = {
    "tar": TarMember,
    "cell": ParquetCell,
    "inline": InlineMedia,
}


class SampleTable(Sequence[Sample]):
    """Samples that are built on access, from records that follow each other."""

    def __init__(self, records: bytes | Path, ends: Lengths) -> None:
        """Read from memory, or from a file that does not change any more; record i ends at byte `ends[i]`."""
        self._records = records
        self._ends = ends
        self._bytes: bytes | mmap.mmap = records if isinstance(records, bytes) else _map_read_only(records)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> list[Sample]: ...
    def __getitem__(self, i: int | slice) -> Sample | list[Sample]:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        start = int(self._ends[i - 1]) if i else 0
        return sample_from_record(self._bytes[start : int(self._ends[i])])

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file again
        return SampleTable, (self._records, self._ends)


def sample_record(sample: Sample, content: str) -> bytes:
    """Return the record of a sample, given its `content_json`.

    The JSON is put together by hand, in half the time that `json.dumps` takes.
    """
    images, clips, videos = (
        ",".join(map(_media_json, media)) for media in (sample.images, sample.clips, sample.videos)
    )
    drawn = ""
    if sample.target_images or sample.cut is not None:
        drawn = f",[{','.join(map(_media_json, sample.target_images))}]"
    if sample.cut is not None:
        drawn += f",[{sample.cut.tokens},{_json_text(sample.cut.features)}]"
    return f"[{_json_text(sample.source)},[{images}],[{clips}],[{videos}],{content}{drawn}]".encode("ascii")


def content_json(sample: Sample) -> str:
    """Return the part of a sample's record that names no files: it is the same on every machine."""
    turns = ",".join(
        [
            f"[{_json_text(turn.role)},{_json_text(turn.text)}{_more(turn.fields)}]"
            if turn.is_learned
            else f"[{_json_text(turn.role)},{_json_text(turn.text)},{_json_text(turn.fields)},false]"
            for turn in sample.turns
        ]
    )
    template = "null" if sample.template is None else _json_text(sample.template)
    is_followed = sample.target_images or sample.cut is not None
    tools = ',""' if is_followed and not sample.tools else _more(sample.tools)
    return f"{_json_text(sample.id)},{sample.index},[{turns}],{template}{tools}"


def _more(text: str) -> str:
    """Return one more element of a list, for the few samples that have it."""
    return f",{_json_text(text)}" if text else ""


def sample_from_record(record: bytes) -> Sample:
    """Build the sample of a record."""
    source, images, clips, videos, sample_id, index, turns, template, *more = json.loads(record)
    tools = more[0] if more else ""
    target_images = more[1] if len(more) > 1 else ()
    return Sample(
        sample_id,
        source,
        index,
        tuple(Turn(*turn) for turn in turns),
        tuple(map(_media_from_json, images)),
        template,
        tuple(map(_media_from_json, clips)),
        tuple(map(_media_from_json, videos)),
        tools,
        tuple(map(_media_from_json, target_images)),
        SampleCut(*more[2]) if len(more) > 2 else None,
    )


def _media_json(media: Media) -> str:
    if isinstance(media, FileMedia):
        return _json_text(media.path)
    if isinstance(media, TarMember):
        return json.dumps(("tar", media.shard, media.name, media.offset, media.size))
    if isinstance(media, InlineMedia):
        return json.dumps(("inline", media.file, media.offset, media.size))
    fields = media.file, media.row_group, media.row, media.column, media.place
    return json.dumps(("cell", *fields) if media.embedded is None else ("cell", *fields, media.embedded))


def _media_from_json(value: Any) -> Media:
    if isinstance(value, str):
        return FileMedia(value)
    kind, *fields = value
    return _ARCHIVE_MEDIA[kind](*fields)


def _map_read_only(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        num_bytes = file.seek(0, 2)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else b""  # no map can be empty
