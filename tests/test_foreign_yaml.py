"""YAML of others is parsed, or refused by one kind of error."""

import contextlib
import random

import pytest

from mmtrain.foreign_yaml import parse_yaml

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def test_aliases_mean_what_they_name() -> None:
    assert parse_yaml(b"a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n  e: [*x, *x]\n") == {
        "a": {"b": 1},
        "c": {"b": 1},
        "d": {"b": 1, "e": [{"b": 1}, {"b": 1}]},
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (BOMB, "line 6: aliases stand for more than 100000 values"),
        (MERGES, "aliases stand for more than 100000 values"),
        ("a: &x [1, *x]", r"line 1: `\*x` stands inside of what it names"),
        ("[" * 10_000, "line 1: nested deeper than 100 levels"),
        ("a: *nothing", "undefined alias"),
        ("{[a]: 1}", "unhashable"),
        ("{{a: 1}: 1}", "unhashable"),
        ("? !!set {a}\n: 1", "."),
        ("!!timestamp 9999-99-99", "."),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (b"\xff\xfe\x00", "."),
        ("1" * 5000, "."),
    ],
    ids=lambda value: str(value)[:20],
)
def test_faults_are_named(content: bytes | str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_yaml(content)


PIECES = (
    *("a", ":", " ", "\n", "-", "[", "]", "{", "}", ",", "&a", "*a", "?", "|", ">", "'", '"', "<<", "\t"),
    *("!!", "!!int", "!!binary", "!!timestamp", "!!float", "0x", "1:2", "2020-01-01"),
)


def test_any_text_is_a_value_or_an_error() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(30)))
        with contextlib.suppress(ValueError):
            parse_yaml(text)
