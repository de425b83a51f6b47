"""Values that a setting, a field or a message may hold instead of what is meant."""

import random
from collections.abc import Sequence
from typing import Any

# As YAML, for settings of recipes.
SETTINGS = (
    *("[]", "{}", "null", "true", '""', "-1", "0", "1", "0.5", "1e400", ".nan", ".inf", "auto", "all", "stage3"),
    *("[[]]", "[{}]", "[null]", "[1, 2]", "[a, a]", "[[1, 2], [3]]", '["a", 1]', "- 1", "x: y"),
    *("{a: 1}", "{1: 2}", "{a: {b: {c: []}}}", "{a: null}", "2020-01-01", "!!binary aGk=", r'"\0"', "9" * 5000),
    *("10000000000000000000000", "~", "*", "&a [*a]", "'\ud800'", "http://host/x?token=a", "/", "..", "a" * 5000),
)
JSON_VALUES: Sequence[Any] = (
    *(None, True, False, -1, 0, 1, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("nan")),
    *("", "a", "\0", "\ud800", "a" * 5000, "../../etc/passwd", "https://host/x", "9" * 5000, "{{", "<image>"),
    *([], {}, [[]], [{}], [None], {"": 1}, {"a": {"a": []}}, [1, "a"], ["a", "a"]),
)


def mutate(value: Any, rng: random.Random, values: Sequence[Any] = JSON_VALUES) -> Any:
    """Return a copy of a JSON value in which one place, drawn at random, holds something else, twice, or nothing."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(["", "a", "\0", f"{key} "])] = changed.pop(key)
            case _:
                changed[key] = mutate(value[key], rng, values)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], mutate(value[place], rng, values), *value[place + 1 :]]
    return rng.choice(list(values))


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which a few places hold others, or that are cut, doubled or joined anew."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(8):
            case 0:
                del changed[place:]
            case 1:
                del changed[place : place + rng.choice((1, 2, 4, 64))]
            case 2:
                changed[place:place] = rng.randbytes(rng.choice((1, 4, 64)))
            case 3:  # a number that stands for a size, perhaps
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice((0, 1, (1 << 8 * width) - 1, (1 << 8 * width - 1) - 1, 1 << 8 * width - 1))
                changed[place : place + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 4:
                start = rng.randrange(len(changed)) if changed else 0
                changed[place:place] = changed[start : start + rng.choice((16, 512, 4096))]
            case _:
                changed[place : place + 1] = bytes([rng.randrange(256)])
    return bytes(changed)
