"""Samples kept as the bytes of one file: a million of them take what their text takes, and processes share them.

As objects, a million samples take gigabytes in every process that trains or loads.
"""

import json
import mmap
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, overload

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import Sample, Turn
from mmtrain.data.media.media_bytes import FileMedia, Media, ParquetCell, TarMember

_PIECES: dict[str, type[TarMember] | type[ParquetCell]] = {"tar": TarMember, "cell": ParquetCell}


class SampleTable(Sequence[Sample]):
    """Samples that are made when they are asked for, from records one after another."""

    def __init__(self, records: bytes | Path, ends: IntArray) -> None:
        """Read from memory, or from a file that does not change any more; record i ends at byte `ends[i]`."""
        self._records, self._ends = records, ends
        self._bytes: bytes | mmap.mmap = records if isinstance(records, bytes) else _mapped(records)

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
        return sample_from_record(self._bytes[int(self._ends[i - 1]) if i else 0 : int(self._ends[i])])

    def __reduce__(self) -> tuple[Any, ...]:  # what is mapped is mapped again
        return SampleTable, (self._records, self._ends)


def sample_record(sample: Sample, said: str) -> bytes:
    """The bytes of a sample, given what is `content_json` it: JSON, put together by hand in half the time."""
    media = [",".join(map(_medium, media)) for media in (sample.images, sample.clips, sample.videos)]
    return f"[{_quoted(sample.source)},[{media[0]}],[{media[1]}],[{media[2]}],{said}]".encode("ascii")


def content_json(sample: Sample) -> str:
    """A sample without the places of its files, as it stands in its record: the same on every machine."""
    turns = ",".join([f"[{_quoted(turn.role)},{_quoted(turn.text)}]" for turn in sample.turns])
    template = "null" if sample.template is None else _quoted(sample.template)
    return f"{_quoted(sample.id)},{sample.index},[{turns}],{template}"


def sample_from_record(record: bytes) -> Sample:
    """The sample of some bytes."""
    source, images, clips, videos, name, index, turns, template = json.loads(record)
    return Sample(
        name,
        source,
        index,
        tuple(Turn(role, text) for role, text in turns),
        tuple(map(_media_in, images)),
        template,
        tuple(map(_media_in, clips)),
        tuple(map(_media_in, videos)),
    )


def _medium(media: Media) -> str:
    if isinstance(media, FileMedia):
        return _quoted(media.path)
    if isinstance(media, TarMember):
        return json.dumps(("tar", media.shard, media.name, media.offset, media.size))
    return json.dumps(("cell", media.file, media.row_group, media.row, media.column, media.place))


def _media_in(value: Any) -> Media:
    return FileMedia(value) if isinstance(value, str) else _PIECES[value[0]](*value[1:])


def _mapped(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
