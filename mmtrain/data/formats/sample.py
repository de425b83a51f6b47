"""What every reader yields: a sample, or a quarantined sample with the reason."""

import json
import re
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from mmtrain.data.media.media_bytes import Media
from mmtrain.durable_files import read_log, write_whole
from mmtrain.recipe.settings.modalities import MediaKind

IMAGE_MARK = "<image>"  # the position of an image in a user turn, or of one to draw in an answer
VIDEO_MARK = "<video>"  # the position of a video; in a sample without videos it is ordinary text
AUDIO_MARK = "<audio>"  # the position of an audio clip; in a sample without clips it is ordinary text
# A private-use character that stands for the `<` of a mark that a text spells: what it spells is text, and no mark.
LITERAL_START = "\U0010fdff"
Role = Literal["system", "user", "assistant", "tool"]
MEDIA_ROLES: tuple[Role, ...] = ("user", "tool")  # in whose turns marks stand for media
PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "clips"}
# Every `kind` that may be written to `quarantine.jsonl`, and what it means to the user.
QUARANTINE_REASONS = {
    # the entry
    "malformed": "not JSON, or not in a layout that mmtrain reads: turns, roles, texts, parts, media",
    "tools": "tools or calls of tools that cannot be read, or that the chat format has no place for",
    "chat_template": "the chat template rejects the conversation, or does not show which part of it is an answer",
    "preference": "it holds a better and a worse answer, or says whether its answer is good; mmtrain learns answers",
    "no_answer": "no assistant turn with text to learn from",
    "target": "it says of a turn or of itself whether to learn it, by a key that cannot be followed",
    "no_caption": "it is no pair of images and a caption, which `captions: draw` of its source needs",
    "image_count": "the user turns hold more or fewer `<image>` marks than the sample has images",
    "audio_count": "the user turns hold more or fewer `<audio>` marks than the sample has clips",
    "video_count": "the user turns hold more or fewer `<video>` marks than the sample has videos",
    "too_many_images": "more images, frames of videos included, than `data.max_images`",
    "too_long": "more LLM tokens than `data.max_sample_tokens` or `data.seq_len`, unless `data.too_long` is `cut`",
    "no_vision": "it has images or videos, but the recipe's model has no vision encoder",
    "no_audio": "it has clips, but the recipe's model has no audio encoder",
    "no_generator": "its answers hold images, but the recipe's model has no generator",
    # the location of its media
    "image_path": "the path of an image leads outside of the source's `image_root`, perhaps by a symbolic link",
    "audio_path": "the path of a clip leads outside of the source's `image_root`, perhaps by a symbolic link",
    "video_path": "the path of a video leads outside of the source's `image_root`, perhaps by a symbolic link",
    "image_url": "a URL (`https:`, `file:`, ...) instead of a path, or a data URL of something else",
    "audio_url": "a URL instead of a path, a data URL of something else, or the clip itself in another way",
    "video_url": "a URL instead of a path, a data URL of something else, or the video itself in another way",
    "missing_image": "the image does not exist: no such file, no such member, or an empty cell",
    "missing_audio": "the clip does not exist: no such file, no such member, or an empty cell",
    "missing_video": "the video does not exist: no such file, no such member, or an empty cell",
    # its media
    "not_an_image": "not an image, or not in a format that mmtrain reads",
    "not_audio": "not a sound file, or not in a format that mmtrain reads",
    "not_a_video": "not a video, or not in a container that mmtrain reads (playlists are not followed)",
    "empty_audio": "a clip without audio samples",
    "empty_video": "a video without frames",
    "too_many_pixels": "an image or video of more pixels than `data.image.max_source_pixels`; it was not decoded",
    "too_narrow": "a picture or frame that is over 200 times longer than wide, with `data.image.scheme: native`",
    "too_many_bits": "an image of one channel of more than eight bits, which processors would clip to white or black",
    "video_too_long": "a video longer than `data.video.max_seconds`, unless `data.video.long_clips` is `cut`",
    "audio_length": "the header of a clip does not say how long it is; PyAV, which would measure it, is not installed",
    "clip_too_long": "a clip longer than `data.audio.max_seconds`, unless `data.audio.long_clips` is `cut`",
    "clip_too_short": "a clip too short to become one LLM token",
    "audio_too_wide": "a clip of more than 32 channels or a sample rate above 384 kHz",
    "truncated": "the end of an image, clip or video is missing",
    "undecodable": "the header is valid, but the rest cannot be decoded",
    "unreadable": "the file failed to be read twice, a minute apart, while other files of its source could be read",
    "deadly": "reading it ended a process, took too much memory or processor time, or blocked a worker for minutes",
    # tar shards
    "tar_member": "a member that is not a plain file: a link, a device, a pipe, a sparse file",
    "tar_name": "a member whose name is absolute, contains `..` or holds control characters",
    "tar_member_size": "a member larger than `data.limits.max_member_bytes`, or a text larger than 64 MiB",
    "tar_too_many": "the rest of a shard with more than `data.limits.max_members` members",
    "tar_broken": "the rest of a shard with a broken structure: truncated, damaged, compressed, or two archives in one",
    # Parquet files
    "parquet_cell_size": "a cell larger than `data.limits.max_member_bytes`",
    "parquet_too_many": "the rest of a file with more than `data.limits.max_members` rows",
    "parquet_broken": "the rest of a row group that cannot be decoded",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    text: marks (`<image>`) stand for media; marks that are text start with `LITERAL_START`, see `written_text`.
    fields: the JSON object of what else the message holds for chat templates, such as `tool_calls`; empty for nothing.
        A `content` of null there says that the message has no text.
    is_learned: of an answer, whether the model is trained to write it; it is context otherwise.
    """

    role: Role
    text: str
    fields: str = ""
    is_learned: bool = True


@dataclass(frozen=True, slots=True)
class SampleCut:
    """Where a sample that is too long ends (`data.too_long: cut`)."""

    tokens: int  # LLM tokens that are kept
    features: str  # the JSON of the LLM tokens of all its media, those behind the cut too: it is encoded as a whole


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
    tools: str = ""  # the JSON list of the tools that the assistant may call; empty for none
    target_images: tuple[Media, ...] = ()  # those that the assistant draws, in the order of the marks in its turns
    cut: SampleCut | None = None  # None: all of it trains

    @property
    def media(self) -> dict[MediaKind, tuple[Media, ...]]:
        """The media that it shows, by kind, each kind in the order of its marks; not those that the assistant draws."""
        return {"image": self.images, "video": self.videos, "audio": self.clips}

    def media_of(self, kinds: Iterable[MediaKind]) -> tuple[tuple[MediaKind, Media], ...]:
        """Return its media of these kinds, each with its kind, in the order of their marks in the user turns."""
        media = self.media
        present = [kind for kind in kinds if media[kind]]
        if len(present) <= 1:
            return tuple((kind, medium) for kind in present for medium in media[kind])
        remaining = {f"<{kind}>": (kind, iter(media[kind])) for kind in present}
        any_mark = re.compile("|".join(remaining))
        marks = [mark for turn in self.turns if turn.role in MEDIA_ROLES for mark in any_mark.findall(turn.text)]
        ordered = []
        for mark in marks:
            kind, media_of_kind = remaining[mark]
            ordered.append((kind, next(media_of_kind)))
        return tuple(ordered)

    @property
    def last_answer(self) -> int | None:
        """The number of the last turn of an assistant that is learned; None if there is none."""
        numbers = range(len(self.turns) - 1, -1, -1)
        return next((n for n in numbers if self.turns[n].role == "assistant" and self.turns[n].is_learned), None)

    @property
    def answer(self) -> str:
        """The text of the last assistant turn that is learned."""
        return "" if self.last_answer is None else self.turns[self.last_answer].text

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


def one_per_reason(quarantined: Iterable[Quarantined]) -> list[Quarantined]:
    """Return the first of the samples that share a reason, for messages that name it once."""
    first: dict[tuple[str, str], Quarantined] = {}
    for sample in quarantined:
        first.setdefault((sample.kind, sample.reason), sample)
    return list(first.values())


def written_text(text: str) -> str:
    """Return the text of a turn as its author wrote it, with the marks that it spells."""
    return text.replace(LITERAL_START, "<")


def with_marks_in_front(sample: Sample) -> Sample:
    """Return a sample with marks at the start of its first user turn for media of kinds that have no mark at all.

    A line break follows the marks, as in LLaVA's data; chat templates that write media themselves leave it out.
    """
    marks = ""
    for kind, media in sample.media.items():
        mark = f"<{kind}>"
        if media and not any(mark in turn.text for turn in sample.turns if turn.role in MEDIA_ROLES):
            marks += mark * len(media)
    first = next((number for number, turn in enumerate(sample.turns) if turn.role == "user"), None)
    if not marks or first is None:
        return sample
    turn = sample.turns[first]
    marked = replace(turn, text=f"{marks}\n{turn.text}" if turn.text else marks)
    return replace(sample, turns=(*sample.turns[:first], marked, *sample.turns[first + 1 :]))


def turned_to_draw(sample: Sample) -> "Sample | Quarantined":
    """Return the sample that draws the images of a pair from their caption; what is no pair is quarantined.

    A pair is one user turn that shows images, and an answer in words: the caption. Other words of the user, such as a
    question what is shown, are left out. Turns of a system prompt stay.
    """
    before = tuple(turn for turn in sample.turns if turn.role == "system")
    roles = [turn.role for turn in sample.turns if turn.role != "system"]
    caption = sample.answer.strip()
    in_words = caption and IMAGE_MARK not in caption
    if roles != ["user", "assistant"] or not in_words or not sample.images or sample.clips or sample.videos:
        reason = "captions: draw, but it is not one user turn that shows images and one answer in words"
        return Quarantined.of(sample, "no_caption", reason)
    unusable = find_unusable(sample, ())
    if unusable is not None:
        return unusable
    drawn = Turn("assistant", IMAGE_MARK * len(sample.images))
    return replace(sample, turns=(*before, Turn("user", caption), drawn), images=(), target_images=sample.images)


def turned_to_show(sample: Sample) -> Sample:
    """Return the conversation in which the user shows the images of a document, and the assistant writes its texts.

    Any other sample is returned unchanged. A text at the start answers an empty turn, since many chat templates let
    users begin. Images at the end, which no text follows, are left out: they teach nothing.
    """
    if not is_document_sample(sample) or not sample.turns[0].is_learned:
        return sample
    text_before, *texts_behind_images = [text.strip("\n") for text in sample.answer.split(IMAGE_MARK)]
    turns = [Turn("user", ""), Turn("assistant", text_before)] if text_before else []
    num_shown = 0
    for num_images, text in enumerate(texts_behind_images, 1):
        if text:
            turns += [Turn("user", IMAGE_MARK * (num_images - num_shown)), Turn("assistant", text)]
            num_shown = num_images
    return replace(sample, turns=tuple(turns), images=sample.target_images[:num_shown], target_images=())


def is_document_sample(sample: Sample) -> bool:
    """Return whether a sample is one answer alone, with images to draw in it."""
    return bool(sample.target_images) and [turn.role for turn in sample.turns] == ["assistant"]


def find_unusable(sample: Sample, read_kinds: Container[MediaKind]) -> Quarantined | None:
    """Quarantine a sample whose marks do not match its media, or which has no answer to learn from.

    read_kinds: the kinds of media that the model reads. Marks of other kinds, if the sample has no such media either,
    are ordinary text. Images are always compared.
    """
    user_text = "\n".join([t.text for t in sample.turns if t.role in MEDIA_ROLES])
    for kind, media in sample.media.items():
        num_marks = user_text.count(f"<{kind}>")
        is_compared = kind == "image" or kind in read_kinds or media
        if is_compared and num_marks != len(media):
            return _miscounted(sample, kind, len(media), num_marks)
    answers = [turn for turn in sample.turns if turn.role == "assistant"]
    if not "".join([turn.text + turn.fields for turn in answers if turn.is_learned]).strip():
        reason = "no assistant turn with text to learn from"
        if not all(turn.is_learned for turn in answers):
            reason = "its data says that none of its answers is to be learned (`train: false`, `weight: 0` or the like)"
        return Quarantined.of(sample, "no_answer", reason)
    return None


def _miscounted(sample: Sample, kind: MediaKind, num_media: int, num_marks: int) -> Quarantined:
    reason = f"{num_media} {PLURALS[kind]}, but {num_marks} <{kind}> marks in its user turns"
    num_in_answers = sum(turn.text.count(f"<{kind}>") for turn in sample.turns if turn.role == "assistant")
    if kind == "image" and num_in_answers:
        reason += f", and {num_in_answers} in its answers: images are drawn where every mark of all turns has one"
    if num_media and not num_marks:
        reason += "; unmarked_media: front of its source puts marks in front of the first user turn"
    return Quarantined.of(sample, f"{kind}_count", reason)


def write_quarantine(path: Path, entries: Iterable[Quarantined], append: bool = False) -> None:
    """Write one JSON object per line: source, index, id, kind, reason; without `append`, the whole file in one step."""
    lines = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    if not append:
        write_whole(path, lines)
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)


def read_quarantine(path: Path) -> tuple[Quarantined, ...]:
    """Read what `write_quarantine` wrote; nothing if there is no file. Lines that are no entries are skipped."""
    types = {"source": str, "index": int, "id": str, "kind": str, "reason": str}
    return tuple(
        Quarantined(**entry)
        for entry in read_log(path).entries
        if entry.keys() == types.keys() and all(type(entry[key]) is kind for key, kind in types.items())
    )
