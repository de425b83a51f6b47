"""What users leave alone and most tests set: `docs/decisions/tests.md` lists it, with the test that leaves it alone."""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.settings.base import Section
from tests.flow import cases, drawing, runs, tiny_families
from tests.flow.user_flows import FROM_SCRATCH, MODEL_FROM_SCRATCH, Flow, write_flow

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "decisions" / "tests.md"
MANY_FILES = 5  # of tests that set a setting: then most tests of its room do
_OVERRIDE = re.compile(r"([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(.*)", re.DOTALL)
# Every test needs a model, data and a length of its own, and they have no usual value.
_OF_EVERY_TEST = ("name", "model.", "data.sources", "data.validation", "data.tokenizer", "train.steps")


def shared_recipes() -> Iterator[Recipe]:
    """Yield the recipes on which most tests of whole runs are built."""
    yield load_recipe(runs.RECIPE, runs.SMALL, env={}).recipe
    yield cases.recipe()
    yield drawing.recipe(Path("data"))
    tiny = yaml.safe_load(tiny_families.RECIPE.format(folder="model", parallel="{placement: unified}"))
    tiny["data"]["tokenizer"] = "tokenizer.json"
    yield Recipe.model_validate({**tiny, "model": MODEL_FROM_SCRATCH})


def values(section: Section, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield each setting with a default: its dotted key, its value and the default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from values(value, f"{prefix}{name}.")
        elif not field.is_required():
            yield f"{prefix}{name}", value, field.get_default(call_default_factory=True)


def set_by_many_tests(defaults: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings that `KEY=VALUE` texts in many files of tests set to another value than the default."""
    files = defaultdict(set)
    for path, key, value in overrides_in_tests():
        if key in defaults and not _is_default(value, defaults[key]):
            files[key].add(path)
    yield from (key for key, setting_files in files.items() if len(setting_files) >= MANY_FILES)


@cache
def overrides_in_tests() -> tuple[tuple[Path, str, str], ...]:
    """Return the file, key and value of each text `KEY=VALUE` in the tests."""
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                text = f"{node.values[0].value}..."  # its value is not known here, and no default
            if isinstance(text, str) and (match := _OVERRIDE.fullmatch(text)):
                found.append((path, match[1], match[2]))
    return tuple(found)


def _is_default(text: str, default: object) -> bool:
    try:
        return bool(yaml.safe_load(text) == default)
    except yaml.YAMLError:
        return False


def table() -> dict[str, tuple[str, str]]:
    """Return the rows of the page by setting: its default, and the test that uses it."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        match = re.fullmatch(r"`([a-z_.0-9]+)`", cells[0])
        if match is not None:
            rows[match[1]] = (cells[1].strip("`"), cells[-1].strip("`"))
    return rows


@pytest.fixture(scope="module")
def of_users(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, object]]:
    """Return the settings of a flow, with the defaults."""
    flow = Flow(FROM_SCRATCH, "llava", "auto")
    recipe = load_recipe(write_flow(flow, tmp_path_factory.mktemp("flow")), env={}).recipe
    return {key: (value, default) for key, value, default in values(recipe)}


def test_the_page_lists_what_most_tests_set(of_users: dict[str, tuple[object, object]]) -> None:
    defaults = {key: default for key, (_, default) in of_users.items()}
    changed = {key for recipe in shared_recipes() for key, value, default in values(recipe) if value != default}
    changed |= set(set_by_many_tests(defaults))
    expected = {key for key in changed if not key.startswith(_OF_EVERY_TEST)}
    assert expected - table().keys() == set(), "rows that the table lacks"


def test_the_named_tests_use_the_defaults(of_users: dict[str, tuple[object, object]]) -> None:
    """Of the user's flows, whose recipe has only what a recipe must have, this is seen by loading one."""
    for key, (written, test) in table().items():
        value, default = of_users[key]
        assert written == json.dumps(default), key
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS.parent / file).read_text(encoding="utf-8"), re.MULTILINE), key
        if file == "tests/flow/test_user_flows.py":
            assert value == default, key


def test_overrides_are_found_in_texts_of_tests() -> None:
    defaults: dict[str, Any] = reduce(lambda found, entry: found | {entry[0]: entry[2]}, values(cases.recipe()), {})
    assert "train.checkpoint.every" in set(set_by_many_tests(defaults))
