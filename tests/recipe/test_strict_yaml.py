"""Strict YAML: scalars mean what they look like, and ambiguous YAML is rejected with its line."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import RecipeError
from mmtrain.recipe.loading import strict_yaml as yaml
from mmtrain.recipe.raw_tree import Origin, dotted_path, nearest_node, to_plain

FILE = Origin("a.yaml", 1, Path("/r"))


def read(text: str, **env: str) -> object:
    node, problems = yaml.parse_yaml(text, FILE, env)
    assert problems == []
    return to_plain(node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1e5", 1e5),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("12", 12),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("-.inf", -math.inf),
        # text, though YAML 1.1 reads something else into it
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("True", "True"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("2026-01-01", "2026-01-01"),
        ("1e", "1e"),
        ("12\n", 12),
        ("'12'", "12"),
        ('"true"', "true"),
        ("12345678901234567890", "12345678901234567890"),
    ],
)
def test_a_scalar_has_the_type_that_it_appears_to_have(text: str, value: object) -> None:
    parsed = read(f"k: {text}")
    assert parsed == {"k": value}
    assert type(parsed["k"]) is type(value)


def test_nan_is_a_float() -> None:
    assert math.isnan(read("k: .nan")["k"])


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: 1\nb: [1, 2\n", "a.yaml:3", "not valid YAML"),
        ("a:\n\t- 1\n", "a.yaml:2", "not valid YAML"),
        ("a: &x [1]\nb: *x\n", "a.yaml:2", "aliases"),
        ("a: 1\nb: !!python/object:os.system x\n", "a.yaml:2", "tag"),
        ("a: !!str 5\n", "a.yaml:1", "tag"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2", "single document"),
        ("a: 1\nb: \x07\n", "a.yaml:2", "U+0007"),
        ("[" * 200, "a.yaml:1", "deeper than 50"),
    ],
)
def test_invalid_yaml_is_rejected_with_its_line(text: str, where: str, what: str) -> None:
    with pytest.raises(RecipeError, match=where) as refused:
        yaml.parse_yaml(text, FILE, {})
    assert what in str(refused.value)


def test_every_repeated_key_is_reported_with_both_lines() -> None:
    _, problems = yaml.parse_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", FILE, {})
    assert [str(p) for p in problems] == [
        "b.c: written twice, first at a.yaml:3; keep one (a.yaml:4)",
        "a: written twice, first at a.yaml:1; keep one (a.yaml:5)",
    ]


@pytest.mark.parametrize("text", ["1.5: x", "-1: x", "[a]: x", "null: x", "true: x"])
def test_keys_are_names(text: str) -> None:
    _, problems = yaml.parse_yaml(text, FILE, {})
    assert "allowed: names" in str(problems[0])


def test_nodes_keep_their_lines() -> None:
    node, _ = yaml.parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - y\n", FILE, {})
    lines = {dotted_path(k): nearest_node(node, k).origin.line for k in [("a",), ("a", "b"), ("a", "c"), ("a", "c", 1)]}
    assert lines == {"a": 1, "a.b": 2, "a.c": 3, "a.c.1": 5}


def test_interpolation() -> None:
    text = """
    whole: ${env:N}
    quoted: "${env:N}"
    inside: x/${env:N}/y
    unset: ${env:NOPE:-1e-3}
    empty: ${env:E:-none}
    nothing: ${env:NOPE:-}
    literal: $${env:N}
    """
    assert read(text, N="12", E="") == {
        "whole": 12,
        "quoted": "12",
        "inside": "x/12/y",
        "unset": 1e-3,
        "empty": "none",
        "nothing": None,
        "literal": "${env:N}",
    }


def test_interpolated_text_is_not_interpolated_again() -> None:
    assert read("k: ${env:N}", N="${env:M}") == {"k": "${env:M}"}


@pytest.mark.parametrize("text", ["${N}", "${env:}", "x ${env:A", "${env:1x}"])
def test_other_interpolations_are_rejected(text: str) -> None:
    _, problems = yaml.parse_yaml(f"k: '{text}'", FILE, {"A": "1", "N": "1"})
    assert [p.where for p in problems] == [("k",)]
    assert "${env:NAME}" in problems[0].text


def test_unset_variable_is_a_problem_that_says_what_to_do() -> None:
    _, problems = yaml.parse_yaml("a: 1\nk: ${env:MISSING}", FILE, {})
    assert str(problems[0]) == (
        "k: the environment variable MISSING is not set; set it, or write ${env:MISSING:-default} (a.yaml:2)"
    )


scalars = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text(max_size=12)
tricky = st.sampled_from(
    ["on", "1e5", "1e-5", "010", "", " x", "~", "null", "${env:A}", "$${", "a: b", "#", "\x85", "é"]
)
values = st.recursive(
    scalars | tricky,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), v, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["a", "on", "x.y", "1"]), values, max_size=3))
def test_a_dumped_value_reads_back_equal(value: dict[str, object]) -> None:
    text = yaml.dump_yaml(value)
    assert read(text) == value, text
