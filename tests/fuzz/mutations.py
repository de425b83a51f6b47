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
