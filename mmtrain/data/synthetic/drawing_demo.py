"""Generate data to draw with: captions whose answer is a picture of one shape, and questions about such pictures.

A tiny model with an image generator learns it from scratch in minutes on two processor cores. Some captions are held
out: their colours, shapes, sizes and places all occur in training, but never together.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmtrain.data.formats.sample import IMAGE_MARK
from mmtrain.data.synthetic.demo import DEMO_SUMMARY_FILE, DEMO_VOCAB_SIZE, DemoSummary, clear_demo_folder, write_json
from mmtrain.data.synthetic.demo_draw import COLOURS, SHAPES, draw_shape_at, vary_colour
from mmtrain.data.synthetic.tiny_tokenizer import train_byte_level_bpe
from mmtrain.data.text.chat_tokenizer import DRAW_TOKENS, SPECIAL_TOKENS
from mmtrain.errors import DataError

DRAWING_SIDE = 24  # pixels
DRAW_TEMPLATE = "draw"
_SIDES = {"small": 9.0, "large": 14.0}  # pixels
_PLACES = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1), "middle": (0.5, 0.5)}
_BORDER = 1.0  # pixels between a shape at a side and that side
_HELDOUT_ONE_IN = 8  # one in so many captions is held out
_SHADES = (235, 255)  # of the light background
_MAX_OFFSET = 0.75  # pixels by which a shape may miss its place
_DRAW_SHARE = 0.6  # of the samples; the others ask about a picture


@dataclass(frozen=True)
class DrawnShape:
    """What a caption says of the one shape in a picture."""

    size: str
    colour: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        """The shape in words."""
        where = "in the middle" if self.place == "middle" else f"at the {self.place}"
        return f"{self.size} {self.colour} {self.shape} {where}"

    def draw(self, shade: int, rgb: tuple[int, int, int], offset: tuple[float, float] = (0.0, 0.0)) -> Image.Image:
        """Draw the shape in a colour on a background of a gray shade, off its place by (x, y) pixels."""
        side = _SIDES[self.size]
        room = DRAWING_SIDE - 2 * _BORDER - side
        left, top = (_BORDER + share * room + moved for share, moved in zip(_PLACES[self.place], offset, strict=True))
        return draw_shape_at(DRAWING_SIDE, self.shape, (left, top, left + side, top + side), rgb, shade)


def all_drawings() -> tuple[DrawnShape, ...]:
    """Return everything that captions may say."""
    return tuple(DrawnShape(*words) for words in product(_SIDES, COLOURS, SHAPES, _PLACES))


def find_drawing(text: str) -> DrawnShape:
    """Return what a text asks for that has a caption in it. Raises `DataError`."""
    for drawing in all_drawings():
        if drawing.caption in text:
            return drawing
    raise DataError(f"{text!r} has no caption of `mmtrain data demo --drawing` in it")


def is_heldout(drawing: DrawnShape, seed: int) -> bool:
    """Return whether a caption is held out in data of this seed."""
    return zlib.crc32(f"{seed}:{drawing.caption}".encode()) % _HELDOUT_ONE_IN == 0


def generate_drawing_demo(out: Path, seed: int, train: int, heldout: int) -> DemoSummary:
    """Write `train.json`, `heldout.json`, `images/` and `tokenizer.json` under `out`; same arguments, same bytes.

    No picture of a held-out caption occurs in training, neither to draw nor to be asked about. Demo data written before
    is replaced. Raises `DataError` for a folder with anything else in it, which stays untouched.
    """
    clear_demo_folder(out)
    rng = random.Random(seed)
    known = [drawing for drawing in all_drawings() if not is_heldout(drawing, seed)]
    unknown = [drawing for drawing in all_drawings() if is_heldout(drawing, seed)]
    train_rows = [*_write_rows(out, "train", rng, known, train)]
    heldout_rows = [*_write_rows(out, "heldout", rng, unknown, heldout)]
    for name, rows in (("train", train_rows), ("heldout", heldout_rows)):
        write_json(out / f"{name}.json", rows)
    texts = (turn["value"].replace(IMAGE_MARK, "") for row in train_rows for turn in row["conversations"])
    tokenizer = train_byte_level_bpe(texts, (*SPECIAL_TOKENS, *DRAW_TOKENS), DEMO_VOCAB_SIZE)
    tokenizer.save(str(out / "tokenizer.json"))
    summary = DemoSummary(
        seed=seed,
        train=train,
        heldout=heldout,
        images=train + heldout,
        templates=dict(sorted(Counter(row["template"] for row in train_rows).items())),
        vocab=tokenizer.get_vocab_size(),
    )
    write_json(out / DEMO_SUMMARY_FILE, asdict(summary))
    return summary


def _write_rows(
    out: Path, split: str, rng: random.Random, drawings: Sequence[DrawnShape], count: int
) -> Iterator[dict[str, Any]]:
    """Write the pictures of `count` samples, and yield their rows; captions come round by round."""
    num_to_draw = round(count * _DRAW_SHARE)
    for number in range(count):
        if number % len(drawings) == 0:
            order = rng.sample(drawings, len(drawings))
        drawing = order[number % len(drawings)]
        offset = rng.uniform(-_MAX_OFFSET, _MAX_OFFSET), rng.uniform(-_MAX_OFFSET, _MAX_OFFSET)
        picture = drawing.draw(rng.randint(*_SHADES), vary_colour(rng, COLOURS[drawing.colour]), offset)
        name = f"images/{split}-{number:05d}.png"
        picture.save(out / name, compress_level=1)
        template, question, answer = _ask_to_draw(rng, drawing) if number < num_to_draw else _ask(rng, drawing)
        yield {
            "id": f"{split}-{number:05d}",
            "template": template,
            "image": [name],
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
        }


def _ask_to_draw(rng: random.Random, drawing: DrawnShape) -> tuple[str, str, str]:
    """Return template, question and answer of a sample that draws."""
    asked = rng.choice(("Draw a {}.", "Please draw a {}.", "A {}, please."))
    return DRAW_TEMPLATE, asked.format(drawing.caption), IMAGE_MARK


def _ask(rng: random.Random, drawing: DrawnShape) -> tuple[str, str, str]:
    """Return template, question and answer of a sample about a picture."""
    questions = {
        "colour": ("What colour is it?", drawing.colour),
        "shape": ("Which shape is it?", drawing.shape),
        "place": ("Where is it?", drawing.place),
        "describe": ("What is shown?", drawing.caption),
    }
    template = rng.choice([*questions])
    question, answer = questions[template]
    return template, f"{IMAGE_MARK}{question}", answer


def recognize(pictures: Iterable[Image.Image]) -> list[DrawnShape]:
    """Return for each picture what it shows: the nearest, by squared pixel errors, of all shapes drawn without jitter.

    Each is drawn on its place, and off it by a pixel in every direction.
    """
    drawings, prototypes = _prototypes()
    pixels = np.stack([np.asarray(picture.convert("RGB"), dtype=np.float32).reshape(-1) for picture in pictures])
    distances = np.square(prototypes).sum(axis=1) - 2 * pixels @ prototypes.T  # but for what all have in common
    return [drawings[number] for number in distances.argmin(axis=1).tolist()]


@cache
def _prototypes() -> tuple[list[DrawnShape], npt.NDArray[np.float32]]:
    """Return drawings, and their pixels (n, side * side * 3)."""
    shade = sum(_SHADES) / 2
    drawings, pixels = [], []
    for size, shape, place in product(_SIDES, SHAPES, _PLACES):
        for right, down in product((-1.0, 0.0, 1.0), repeat=2):
            white_on_black = DrawnShape(size, "any", shape, place).draw(0, (255, 255, 255), (right, down))
            cover = np.asarray(white_on_black, dtype=np.float32) / 255
            for colour, rgb in COLOURS.items():
                drawings.append(DrawnShape(size, colour, shape, place))
                pixels.append((shade + cover * (np.array(rgb, dtype=np.float32) - shade)).reshape(-1))
    return drawings, np.stack(pixels)
