"""The JSON Schema: committed, current, and agreeing with what `load` accepts."""

import json
from pathlib import Path

import pytest

from mmtrain.recipe import Recipe, editor_schema
from mmtrain.recipe.loading import json_schema

ROOT = Path(__file__).parents[2]


def test_the_committed_schema_is_current() -> None:
    committed = (ROOT / "docs/recipe.schema.json").read_text(encoding="utf-8")
    current = json.dumps(editor_schema(), indent=2) + "\n"
    assert committed == current, "stale: run `mmtrain schema > docs/recipe.schema.json`"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("**/*.yaml")), ids=lambda path: path.name)
def test_each_recipe_names_the_schema_for_editors(recipe: Path) -> None:
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    marker, _, where = first.partition("$schema=")
    assert marker == "# yaml-language-server: "
    assert (recipe.parent / where).resolve() == ROOT / "docs/recipe.schema.json"


def test_every_setting_is_described() -> None:
    sections = {"model", "data", "parallel", "cluster", "train"}
    bare = [path for path in json_schema.setting_paths() if not (json_schema.schema_at(path) or {}).get("description")]
    assert [path for path in bare if path[0] not in sections or len(path) > 1] == []


def test_editors_may_write_extends_and_interpolations() -> None:
    schema = editor_schema()
    assert "extends" in schema["properties"]
    steps = schema["$defs"]["TrainSettings"]["properties"]["validate_batches"]
    assert steps["anyOf"] == [{"minimum": 1, "type": "integer"}, {"type": "string", "pattern": r"\$\{env:"}]
    assert steps["description"] == Recipe.model_fields["train"].annotation.model_fields["validate_batches"].description
    assert "required" not in schema["$defs"]["TrainSettings"]
