"""Conversations about sums and short words, on which a tiny text model is fine-tuned."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_SYSTEM_TEXT = "You answer in one word."
_SYSTEM_SHARE = 0.3  # of conversations
_WORDS = ["apple", "bird", "cat", "door", "egg", "fish", "green", "hat", "jam", "lamp", "moon", "oak", "queen", "sun"]
_NUMBERS = range(20)
_HELDOUT_ONE_IN = 8  # one in so many questions is held out


def write_toy_chats(out: Path, seed: int, train: int, heldout: int) -> None:
    """Write `train.json` and `heldout.json` in the `messages` format. No question occurs in both."""
    rng = random.Random(seed)
    for name, count, is_heldout in (("train", train, False), ("heldout", heldout, True)):
        rows = [{"messages": list(_draw_turns(rng, is_heldout))} for _ in range(count)]
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _draw_turns(rng: random.Random, is_heldout: bool) -> Iterator[dict[str, str]]:
    """Yield the turns of one conversation: one or two questions, in some after a system turn."""
    if rng.random() < _SYSTEM_SHARE:
        yield {"role": "system", "content": _SYSTEM_TEXT}
    for _ in range(rng.randint(1, 2)):
        question, answer = _draw_question(rng, is_heldout)
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": answer}


def _draw_question(rng: random.Random, is_heldout: bool) -> tuple[str, str]:
    while True:
        question, answer = rng.choice(_QUESTIONS)(rng)
        if (zlib.crc32(question.encode()) % _HELDOUT_ONE_IN == 0) == is_heldout:
            return question, answer


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.choice(_NUMBERS), rng.choice(_NUMBERS)
    return f"What is {first} plus {second}?", str(first + second)


def _first_letter(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_WORDS)
    return f"What is the first letter of {word}?", word[0]


def _longer(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_WORDS, 2)
    answer = "neither" if len(first) == len(second) else max(first, second, key=len)
    return f"Which word is longer, {first} or {second}?", answer


_QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _first_letter, _longer)
