"""The demo's data: drawn shapes, digits and bar charts with questions about them, and some arithmetic.

Small enough that a tiny model learns it from nothing in minutes on a processor core, and built so that most answers
need the picture: a question alone leaves every answer of its template about equally likely.
"""

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmtrain.data.demo_draw import COLOURS, SHAPES, bar_chart, digit, scene
from mmtrain.data.llava import IMAGE_MARK
from mmtrain.data.tokenize import SPECIAL_TOKENS
from mmtrain.errors import DataError

VOCAB = 512
MAX_OPERAND = 19
SUMMARY_FILE = "demo.json"
_HELDOUT_SHARE = 0.1  # of the operand pairs of arithmetic

Pair = tuple[int, int]


@dataclass(frozen=True)
class DemoSummary:
    """What `generate` wrote."""

    seed: int
    train: int
    heldout: int
    images: int
    templates: dict[str, int]  # question template -> training samples
    vocab: int


@dataclass(frozen=True)
class Question:
    """A question about pictures (or none), and its answer."""

    template: str
    text: str
    answer: str
    pictures: tuple[Image.Image, ...] = ()


def generate(out: Path, seed: int, train: int, heldout: int) -> DemoSummary:
    """Write `train.json`, `heldout.json`, `images/` and `tokenizer.json` under `out`; same arguments, same bytes.

    No held-out question occurs in training with the same pictures, and no pair of operands in both splits. Replaces
    demo data written before; raises `DataError` rather than touch a folder with anything else in it.
    """
    if out.exists() and any(out.iterdir()) and not (out / SUMMARY_FILE).exists():
        raise DataError(f"{out}: not empty and not demo data; name another folder or empty it")
    shutil.rmtree(out, ignore_errors=True)
    (out / "images").mkdir(parents=True)
    rng = random.Random(seed)
    train_pairs, heldout_pairs = _split_pairs(rng)
    seen: set[str] = set()
    train_rows = [_write(out, "train", i, q) for i, q in enumerate(_questions(rng, train, train_pairs, seen))]
    heldout_rows = [_write(out, "heldout", i, q) for i, q in enumerate(_questions(rng, heldout, heldout_pairs, seen))]
    _write_json(out / "train.json", train_rows)
    _write_json(out / "heldout.json", heldout_rows)
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
    _write_json(out / SUMMARY_FILE, asdict(summary))
    return summary


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `VOCAB` tokens, digits apart, with the chat format's specials."""
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t.replace(IMAGE_MARK, "") for t in texts), trainer)
    return tokenizer


def _questions(rng: random.Random, count: int, pairs: list[Pair], seen: set[str]) -> Iterator[Question]:
    """Draw `count` questions that were not asked before about the same pictures; arithmetic may repeat."""
    names, weights = list(_TEMPLATES), [weight for weight, _ in _TEMPLATES.values()]
    for _ in range(count):
        name = rng.choices(names, weights)[0]
        while True:
            question = _TEMPLATES[name][1](rng, pairs)
            key = _key(question)
            if not question.pictures or key not in seen:
                break
        seen.add(key)
        yield question


def _split_pairs(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Unordered operand pairs for training and for held-out questions; 3 + 4 and 4 + 3 fall on the same side."""
    pairs = [(a, b) for a in range(MAX_OPERAND + 1) for b in range(a, MAX_OPERAND + 1)]
    rng.shuffle(pairs)
    cut = int(len(pairs) * _HELDOUT_SHARE)
    return pairs[cut:], pairs[:cut]


def _key(question: Question) -> str:
    digest = hashlib.sha256(question.text.encode())
    for picture in question.pictures:
        digest.update(repr(picture.size).encode() + picture.tobytes())
    return digest.hexdigest()


def _write(out: Path, split: str, number: int, question: Question) -> dict[str, Any]:
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _colour(rng: random.Random, _: list[Pair]) -> Question:
    kinds = rng.sample(SHAPES, rng.randint(1, 3))
    objects = [(kind, rng.choice(list(COLOURS))) for kind in kinds]
    kind, colour = rng.choice(objects)
    return Question("colour", f"{IMAGE_MARK}What colour is the {kind}?", colour, (scene(rng, objects),))


def _shape(rng: random.Random, _: list[Pair]) -> Question:
    colours = rng.sample(list(COLOURS), rng.randint(1, 3))
    objects = [(rng.choice(SHAPES), colour) for colour in colours]
    kind, colour = rng.choice(objects)
    return Question("shape", f"{IMAGE_MARK}What shape is {colour}?", kind, (scene(rng, objects),))


def _describe(rng: random.Random, _: list[Pair]) -> Question:
    objects = [_object(rng) for _ in range(rng.randint(1, 3))]
    answer = ", ".join(f"{colour} {kind}" for kind, colour in objects)
    return Question("describe", f"{IMAGE_MARK}What is shown?", answer, (scene(rng, objects),))


def _count(rng: random.Random, _: list[Pair]) -> Question:
    objects = [_object(rng) for _ in range(rng.randint(1, 5))]
    return Question("count", f"{IMAGE_MARK}How many shapes?", str(len(objects)), (scene(rng, objects),))


def _read_digits(rng: random.Random, _: list[Pair]) -> Question:
    values = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
    pictures = tuple(digit(rng, value) for value in values)
    return Question("digits", f"{IMAGE_MARK * len(values)}Which digits?", " ".join(map(str, values)), pictures)


def _tallest(rng: random.Random, _: list[Pair]) -> Question:
    bars = list(zip(rng.sample(list(COLOURS), 3), rng.sample(range(1, 6), 3), strict=True))
    tallest = max(bars, key=lambda bar: bar[1])[0]
    return Question("tallest_bar", f"{IMAGE_MARK}Which bar is tallest?", tallest, (bar_chart(rng, bars),))


def _heights(rng: random.Random, _: list[Pair]) -> Question:
    bars = [(colour, rng.randint(1, 5)) for colour in rng.sample(list(COLOURS), rng.randint(2, 4))]
    answer = " ".join(str(height) for _, height in bars)
    return Question("bar_heights", f"{IMAGE_MARK}How tall are the bars?", answer, (bar_chart(rng, bars),))


def _find(rng: random.Random, _: list[Pair]) -> Question:
    colours = rng.sample(list(COLOURS), rng.randint(2, 4))
    pictures = tuple(scene(rng, [(rng.choice(SHAPES), colour)]) for colour in colours)
    place = rng.randrange(len(colours))
    return Question("find", f"{_numbered(pictures)}Which image is {colours[place]}?", str(place + 1), pictures)


def _larger_digit(rng: random.Random, _: list[Pair]) -> Question:
    values = rng.sample(range(10), 2)
    pictures = tuple(digit(rng, value) for value in values)
    answer = 1 if values[0] > values[1] else 2
    return Question("larger_digit", f"{_numbered(pictures)}Which digit is larger?", str(answer), pictures)


def _more(rng: random.Random, _: list[Pair]) -> Question:
    numbers = rng.sample(range(1, 6), 2)
    pictures = tuple(scene(rng, [_object(rng) for _ in range(number)]) for number in numbers)
    answer = 1 if numbers[0] > numbers[1] else 2
    return Question("more_shapes", f"{_numbered(pictures)}Which has more shapes?", str(answer), pictures)


def _object(rng: random.Random) -> tuple[str, str]:
    return rng.choice(SHAPES), rng.choice(list(COLOURS))


def _sum(rng: random.Random, pairs: list[Pair]) -> Question:
    a, b = rng.sample(rng.choice(pairs), 2)
    return Question("sum", f"What is {a} + {b}?", str(a + b))


def _larger(rng: random.Random, pairs: list[Pair]) -> Question:
    a, b = rng.sample(rng.choice([p for p in pairs if p[0] != p[1]]), 2)
    return Question("larger_number", f"Which is larger, {a} or {b}?", str(max(a, b)))


def _numbered(pictures: tuple[Image.Image, ...]) -> str:
    return "".join(f"{i}: {IMAGE_MARK} " for i in range(1, len(pictures) + 1))


_TEMPLATES: dict[str, tuple[float, Callable[[random.Random, list[Pair]], Question]]] = {
    "describe": (2, _describe),
    "colour": (1, _colour),
    "shape": (1, _shape),
    "count": (1, _count),
    "digits": (2, _read_digits),
    "larger_digit": (1, _larger_digit),
    "bar_heights": (1, _heights),
    "tallest_bar": (1, _tallest),
    "find": (1, _find),
    "more_shapes": (1, _more),
    "sum": (1, _sum),
    "larger_number": (1, _larger),
}
