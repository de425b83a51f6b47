"""What reading yields, whatever the format: a sample, or one that was set aside, and why."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mmtrain.data.media.media_bytes import Media

IMAGE_MARK = "<image>"  # stands in a user turn where an image goes
VIDEO_MARK = "<video>"  # likewise for a video; in a sample without videos it is a text like any other
AUDIO_MARK = "<audio>"  # likewise for a clip
Role = Literal["system", "user", "assistant"]
Sight = Literal["image", "video"]  # what the vision unit looks at
_SIGHT_MARKS = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One training example: a conversation, its images, clips and videos, each in the order of their marks."""

    id: str
    source: str  # file it was read from
    index: int  # place in that file, from 0
    turns: tuple[Turn, ...]
    images: tuple[Media, ...]
    template: str | None = None  # names the kind of question, where the data says so; evaluation groups by it
    clips: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()

    @property
    def visual_media(self) -> tuple[tuple[Sight, Media], ...]:
        """Its images and videos together, in the order of their marks, which are as many as they."""
        if not self.videos:
            return tuple(("image", image) for image in self.images)
        images, videos = iter(self.images), iter(self.videos)
        marks = [mark for t in self.turns if t.role == "user" for mark in _SIGHT_MARKS.findall(t.text)]
        return tuple(("image", next(images)) if mark == IMAGE_MARK else ("video", next(videos)) for mark in marks)

    @property
    def answer(self) -> str:
        """The last assistant turn."""
        return next((t.text for t in reversed(self.turns) if t.role == "assistant"), "")

    def __str__(self) -> str:
        return f"sample {self.id!r} ({self.source}, number {self.index})"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample that was set aside: which one, and why."""

    source: str
    index: int
    id: str
    kind: str
    reason: str

    @classmethod
    def of(cls, sample: Sample, kind: str, reason: str) -> "Quarantined":
        """Set `sample` aside."""
        return cls(sample.source, sample.index, sample.id, kind, reason)

    def __str__(self) -> str:
        return f"{self.source}, number {self.index}, id {self.id!r}: {self.kind}: {self.reason}"


def find_unusable(sample: Sample, sees: bool, hears: bool) -> Quarantined | None:
    """Set a sample aside whose marks are not as many as its media, or that has nothing to learn.

    sees, hears: whether the model has such an encoder; marks of media that it cannot take are text like any other.
    """
    asked = "\n".join([t.text for t in sample.turns if t.role == "user"])
    if asked.count(IMAGE_MARK) != len(sample.images):
        return _miscounted(sample, "image", "images", len(sample.images), asked.count(IMAGE_MARK))
    if (sees or sample.videos) and asked.count(VIDEO_MARK) != len(sample.videos):
        return _miscounted(sample, "video", "videos", len(sample.videos), asked.count(VIDEO_MARK))
    if (hears or sample.clips) and asked.count(AUDIO_MARK) != len(sample.clips):
        return _miscounted(sample, "audio", "clips", len(sample.clips), asked.count(AUDIO_MARK))
    if not "".join([t.text for t in sample.turns if t.role == "assistant"]).strip():
        return Quarantined.of(sample, "no_answer", "no assistant's turn with text to learn from")
    return None


def _miscounted(sample: Sample, kind: str, name: str, there: int, marks: int) -> Quarantined:
    reason = f"{there} {name}, but <{kind}> stands {marks} times in its human turns"
    return Quarantined.of(sample, f"{kind}_count", reason)


def write_quarantine(path: Path, entries: Iterable[Quarantined], append: bool = False) -> None:
    """Write one JSON object a line: source, index, id, kind, reason."""
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(e)) + "\n" for e in entries)


def read_quarantine(path: Path) -> tuple[Quarantined, ...]:
    """What `write_quarantine` wrote; none where there is no file. A line that a crash cut short is left out."""
    if not path.exists():
        return ()
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            entries.append(Quarantined(**json.loads(line)))
    return tuple(entries)
