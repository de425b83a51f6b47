"""A few held-out questions of a training run with their answers and small pictures, for the log and for trackers."""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mmtrain.data.media.images import load_rgb_images, read_image_size
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.report import RunLog
from mmtrain.runtime.evaluation.qa_eval import GivenAnswer, HeldOutQuestion, asked_text, evenly_spaced

NUM_SHOWN_ANSWERS = 16  # as many rows as a screen has
MAX_PICTURES_PER_ANSWER = 4
PICTURE_SIDE_PIXELS = 256  # of the longer side: some 100 kB for each picture
PICTURES_FOLDER = "answers"  # in the run's folder


@dataclass
class AnswerLog:
    """Writes answers into the run's log, and the picture of an image once."""

    log: RunLog
    run_dir: Path
    settings: ImageSettings
    _pictures: dict[HeldOutQuestion, tuple[str, ...]] = field(
        default_factory=dict
    )  # by their names in the run's folder

    def write(self, step: int, answers: Sequence[GivenAnswer]) -> None:
        """Log some of the answers that were given after a step, evenly spaced. Raises OSError."""
        shown = evenly_spaced(answers, NUM_SHOWN_ANSWERS)
        self.log.answers(step, [self._entry(answer) for answer in shown])

    def _entry(self, answer: GivenAnswer) -> Mapping[str, object]:
        question = answer.question
        if question not in self._pictures:
            self._pictures[question] = self._write_pictures(question)
        return {
            "question": asked_text(question),
            "expected": answer.expected,
            "answered": answer.answered,
            "pictures": list(self._pictures[question]),
        }

    def _write_pictures(self, question: HeldOutQuestion) -> tuple[str, ...]:
        names = []
        for media in question.pictures[:MAX_PICTURES_PER_ANSWER]:
            with contextlib.suppress(BadMediaError, OSError):  # the answers say more than this picture
                names.append(self._write_picture(media))
        return tuple(names)

    def _write_picture(self, media: Media) -> str:
        width, height = read_image_size(media, self.settings.max_source_pixels)
        shrink = min(1.0, PICTURE_SIDE_PIXELS / max(width, height))
        size = max(1, round(width * shrink)), max(1, round(height * shrink))
        [picture] = load_rgb_images(media, [size], self.settings)
        name = f"{PICTURES_FOLDER}/{_content_name(picture)}.png"
        path = self.run_dir / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            draft = path.with_suffix(".draft")
            picture.save(draft, format="PNG")
            draft.replace(path)
        return name


def _content_name(picture: Image.Image) -> str:
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()[:16]
