"""What every reader yields: a sample, or a quarantined sample with the reason."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mmtrain.data.media.media_bytes import Media, VisualKind

IMAGE_MARK = "<image>"  # the position of an image in a user turn
VIDEO_MARK = "<video>"  # the position of a video; in a sample without videos it is ordinary text
AUDIO_MARK = "<audio>"  # the position of an audio clip; in a sample without clips it is ordinary text
Role = Literal["system", "user", "assistant"]
_VISUAL_MARKS = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One training example: a conversation with its images, clips and videos, each kind in the order of its marks."""

    id: str
    source: str  # the file it was read from
    index: int  # its position in that file, from 0
    turns: tuple[Turn, ...]
    images: tuple[Media, ...]
    template: str | None = None  # the kind of question, if the data names it; evaluation reports accuracy by it
    clips: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()

    @property
    def visual_media(self) -> tuple[tuple[VisualKind, Media], ...]:
        """Its images and videos with their kinds, in the order of their marks in the user turns."""
        if not self.videos:
            return tuple(("image", image) for image in self.images)
        images = iter(self.images)
        videos = iter(self.videos)
        marks = [mark for t in self.turns if t.role == "user" for mark in _VISUAL_MARKS.findall(t.text)]
        return tuple(("image", next(images)) if mark == IMAGE_MARK else ("video", next(videos)) for mark in marks)

    @property
    def answer(self) -> str:
        """The text of the last assistant turn."""
        return next((t.text for t in reversed(self.turns) if t.role == "assistant"), "")

    def __str__(self) -> str:
        return f"sample {self.id!r} ({self.source}, number {self.index})"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample that cannot be used: where it is, and why."""

    source: str
    index: int
    id: str
    kind: str  # a key of `QUARANTINE_REASONS`
    reason: str

    @classmethod
    def of(cls, sample: Sample, kind: str, reason: str) -> "Quarantined":
        """Quarantine `sample`."""
        return cls(sample.source, sample.index, sample.id, kind, reason)

    def __str__(self) -> str:
        return f"{self.source}, number {self.index}, id {self.id!r}: {self.kind}: {self.reason}"


def find_unusable(sample: Sample, has_vision: bool, has_audio: bool) -> Quarantined | None:
    """Quarantine a sample whose marks do not match its media, or which has no answer to learn from.

    has_vision, has_audio: whether the model has such an encoder. Without it, marks of media that the sample does not
    have either are ordinary text. Images are always compared.
    """
    user_text = "\n".join([t.text for t in sample.turns if t.role == "user"])
    num_image_marks = user_text.count(IMAGE_MARK)
    if num_image_marks != len(sample.images):
        return _miscounted(sample, "image", "images", len(sample.images), num_image_marks)
    num_video_marks = user_text.count(VIDEO_MARK)
    if (has_vision or sample.videos) and num_video_marks != len(sample.videos):
        return _miscounted(sample, "video", "videos", len(sample.videos), num_video_marks)
    num_audio_marks = user_text.count(AUDIO_MARK)
    if (has_audio or sample.clips) and num_audio_marks != len(sample.clips):
        return _miscounted(sample, "audio", "clips", len(sample.clips), num_audio_marks)
    if not "".join([t.text for t in sample.turns if t.role == "assistant"]).strip():
        return Quarantined.of(sample, "no_answer", "no assistant turn with text to learn from")
    return None


def _miscounted(sample: Sample, kind: str, name: str, num_media: int, num_marks: int) -> Quarantined:
    reason = f"{num_media} {name}, but {num_marks} <{kind}> marks in its user turns"
    return Quarantined.of(sample, f"{kind}_count", reason)


def write_quarantine(path: Path, entries: Iterable[Quarantined], append: bool = False) -> None:
    """Write one JSON object per line: source, index, id, kind, reason."""
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)


def read_quarantine(path: Path) -> tuple[Quarantined, ...]:
    """Read what `write_quarantine` wrote; nothing if there is no file. A line that a crash cut short is skipped."""
    if not path.exists():
        return ()
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            entries.append(Quarantined(**json.loads(line)))
    return tuple(entries)
