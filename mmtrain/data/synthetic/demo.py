"""Generate the demo's data: drawn shapes, digits and bar charts with questions about them, and some arithmetic.

A tiny model learns it from scratch in minutes on one processor core. Most answers need the picture: with the question
alone, all answers of its template are about equally likely.
"""

import hashlib
import json
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from mmtrain.data.formats.sample import IMAGE_MARK
from mmtrain.data.synthetic.demo_draw import COLOURS, SHAPES, draw_bar_chart, draw_digit, draw_scene
from mmtrain.data.synthetic.tiny_tokenizer import train_byte_level_bpe
from mmtrain.data.text.chat_tokenizer import SPECIAL_TOKENS
from mmtrain.errors import DataError

DEMO_VOCAB_SIZE = 512
DEMO_SUMMARY_FILE = "demo.json"
_HELDOUT_ONE_IN_PAIRS = 8  # one in so many pairs of operands is held out

IsAllowed = Callable[[int, int], bool]  # whether a split may use a pair of operands


@dataclass(frozen=True)
class DemoSummary:
    """What `generate_demo` wrote."""

    seed: int
    train: int
    heldout: int
    images: int
    templates: dict[str, int]  # question template -> training samples
    vocab: int


@dataclass(frozen=True)
class DemoQuestion:
    """A question about pictures (or none), and its answer."""

    template: str
    text: str
    answer: str
    pictures: tuple[Image.Image, ...] = ()


def generate_demo(out: Path, seed: int, train: int, heldout: int) -> DemoSummary:
    """Write `train.json`, `heldout.json`, `images/` and `tokenizer.json` under `out`; same arguments, same bytes.

    No held-out question occurs in training with the same pictures, and no pair of operands occurs in both splits. Demo
    data written before is replaced. Raises `DataError` for a folder with anything else in it, which stays untouched.
    """
    clear_demo_folder(out)
    rng = random.Random(seed)
    seen: set[str] = set()
    train_questions = _draw_questions(rng, train, lambda a, b: not _is_heldout(seed, a, b), seen)
    train_rows = [_write_question(out, "train", i, question) for i, question in enumerate(train_questions)]
    heldout_questions = _draw_questions(rng, heldout, lambda a, b: _is_heldout(seed, a, b), seen)
    heldout_rows = [_write_question(out, "heldout", i, question) for i, question in enumerate(heldout_questions)]
    write_json(out / "train.json", train_rows)
    write_json(out / "heldout.json", heldout_rows)
    tokenizer = train_tokenizer(turn["value"] for row in train_rows for turn in row["conversations"])
    tokenizer.save(str(out / "tokenizer.json"))
    summary = DemoSummary(
        seed=seed,
        train=train,
        heldout=heldout,
        images=sum(len(row.get("image", ())) for row in (*train_rows, *heldout_rows)),
        templates=dict(sorted(Counter(row["template"] for row in train_rows).items())),
        vocab=tokenizer.get_vocab_size(),
    )
    write_json(out / DEMO_SUMMARY_FILE, asdict(summary))
    return summary


def clear_demo_folder(out: Path) -> None:
    """Make a folder with nothing but an empty `images` in it.

    Raises `DataError`, and leaves it untouched, if it holds anything but demo data.
    """
    if out.exists() and any(out.iterdir()) and not (out / DEMO_SUMMARY_FILE).exists():
        raise DataError(f"{out}: not empty and not demo data; name another folder or empty it")
    shutil.rmtree(out, ignore_errors=True)
    (out / "images").mkdir(parents=True)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a tokenizer with the chat format's special tokens, and at most `DEMO_VOCAB_SIZE` tokens in all."""
    return train_byte_level_bpe((t.replace(IMAGE_MARK, "") for t in texts), SPECIAL_TOKENS, DEMO_VOCAB_SIZE)


def _draw_questions(rng: random.Random, count: int, is_allowed: IsAllowed, seen: set[str]) -> Iterator[DemoQuestion]:
    """Draw `count` questions, none of them twice about the same pictures; arithmetic may repeat.

    seen: keys of the questions drawn so far; new ones are added.
    """
    names = list(_TEMPLATES)
    weights = [weight for weight, _ in _TEMPLATES.values()]
    for _ in range(count):
        name = rng.choices(names, weights)[0]
        _, draw = _TEMPLATES[name]
        while True:
            question = draw(rng, is_allowed)
            key = _question_key(question)
            if not question.pictures or key not in seen:
                break
        seen.add(key)
        yield question


def _is_heldout(seed: int, a: int, b: int) -> bool:
    """Return whether a pair of operands is for held-out questions; 31 + 7 and 7 + 31 are in the same split."""
    return zlib.crc32(f"{seed}:{min(a, b)}:{max(a, b)}".encode()) % _HELDOUT_ONE_IN_PAIRS == 0


def _question_key(question: DemoQuestion) -> str:
    digest = hashlib.sha256(question.text.encode())
    for picture in question.pictures:
        digest.update(repr(picture.size).encode() + picture.tobytes())
    return digest.hexdigest()


def _write_question(out: Path, split: str, number: int, question: DemoQuestion) -> dict[str, Any]:
    """Write the pictures of a question, and return its row of the data file."""
    names = [f"images/{split}-{number:05d}-{i}.png" for i in range(len(question.pictures))]
    for name, picture in zip(names, question.pictures, strict=True):
        picture.save(out / name, compress_level=1)
    row: dict[str, Any] = {"id": f"{split}-{number:05d}", "template": question.template}
    if names:
        row["image"] = names
    row["conversations"] = [
        {"from": "human", "value": question.text},
        {"from": "gpt", "value": question.answer},
    ]
    return row


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _colour(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    kinds = rng.sample(SHAPES, rng.randint(1, 2))
    objects = [(kind, rng.choice(list(COLOURS))) for kind in kinds]
    kind, colour = rng.choice(objects)
    return DemoQuestion("colour", f"{IMAGE_MARK}What colour is the {kind}?", colour, (draw_scene(rng, objects),))


def _shape(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    colours = rng.sample(list(COLOURS), rng.randint(1, 2))
    objects = [(rng.choice(SHAPES), colour) for colour in colours]
    kind, colour = rng.choice(objects)
    return DemoQuestion("shape", f"{IMAGE_MARK}What shape is {colour}?", kind, (draw_scene(rng, objects),))


def _describe(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    objects = [_object(rng) for _ in range(rng.randint(1, 2))]
    answer = ", ".join(f"{colour} {kind}" for kind, colour in objects)
    return DemoQuestion("describe", f"{IMAGE_MARK}What is shown?", answer, (draw_scene(rng, objects),))


def _count(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    objects = [_object(rng) for _ in range(rng.randint(1, 5))]
    return DemoQuestion("count", f"{IMAGE_MARK}How many shapes?", str(len(objects)), (draw_scene(rng, objects),))


def _read_digit(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    value = rng.randint(0, 9)
    return DemoQuestion("digit", f"{IMAGE_MARK}Which digit?", str(value), (draw_digit(rng, value),))


def _larger_digit(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    values = rng.sample(range(10), 2)
    pictures = tuple(draw_digit(rng, value) for value in values)
    return DemoQuestion("larger_digit", f"{_numbered(pictures)}Which digit is larger?", str(max(values)), pictures)


def _tallest(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    bars = list(zip(rng.sample(list(COLOURS), 3), rng.sample(range(1, 6), 3), strict=True))
    tallest = max(bars, key=lambda bar: bar[1])[0]
    return DemoQuestion("tallest_bar", f"{IMAGE_MARK}Which bar is tallest?", tallest, (draw_bar_chart(rng, bars),))


def _height(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    bars = [(colour, rng.randint(1, 5)) for colour in rng.sample(list(COLOURS), rng.randint(1, 3))]
    colour, height = rng.choice(bars)
    return DemoQuestion("bar_height", f"{IMAGE_MARK}How tall is {colour}?", str(height), (draw_bar_chart(rng, bars),))


def _which_image(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    objects = [_object(rng) for _ in range(rng.randint(2, 4))]
    pictures = tuple(draw_scene(rng, [single]) for single in objects)
    place = rng.randrange(len(objects))
    return DemoQuestion("which_image", f"{_numbered(pictures)}What colour is {place + 1}?", objects[place][1], pictures)


def _more(rng: random.Random, _: IsAllowed) -> DemoQuestion:
    numbers = rng.sample(range(1, 6), 2)
    pictures = tuple(draw_scene(rng, [_object(rng) for _ in range(number)]) for number in numbers)
    answer = 1 if numbers[0] > numbers[1] else 2
    return DemoQuestion("more_shapes", f"{_numbered(pictures)}Which has more shapes?", str(answer), pictures)


def _sum(rng: random.Random, is_allowed: IsAllowed) -> DemoQuestion:
    while True:
        ones, b = rng.randint(0, 8), rng.randint(1, 9)
        a = rng.randint(1, 9) * 10 + ones
        if ones + b <= 9 and is_allowed(a, b):
            return DemoQuestion("sum", f"What is {a} + {b}?", str(a + b))


def _larger_number(rng: random.Random, is_allowed: IsAllowed) -> DemoQuestion:
    while True:
        a, b = rng.sample(range(10, 100), 2)
        if is_allowed(a, b):
            return DemoQuestion("larger_number", f"Which is larger, {a} or {b}?", str(max(a, b)))


def _object(rng: random.Random) -> tuple[str, str]:
    return rng.choice(SHAPES), rng.choice(list(COLOURS))


def _numbered(pictures: tuple[Image.Image, ...]) -> str:
    return "".join(f"{i}: {IMAGE_MARK} " for i in range(1, len(pictures) + 1))


# Template -> its weight, and the function that draws a question.
_TEMPLATES: dict[str, tuple[float, Callable[[random.Random, IsAllowed], DemoQuestion]]] = {
    "describe": (1, _describe),
    "colour": (1, _colour),
    "shape": (1, _shape),
    "count": (1, _count),
    "digit": (1, _read_digit),
    "larger_digit": (1, _larger_digit),
    "bar_height": (1, _height),
    "tallest_bar": (1, _tallest),
    "which_image": (1, _which_image),
    "more_shapes": (1, _more),
    "sum": (1, _sum),
    "larger_number": (1, _larger_number),
}
