"""The models that shipped recipes start from are named as the hub names them."""

import re
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
OWNERS = {"Qwen", "llava-hf"}  # of the models; a folder like `models/NAME` would be the name of a stranger's model
NAMED = {
    path.name: match[1]
    for path in sorted(RECIPES.glob("*.yaml"))
    if (match := re.search(r"^  hf: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
}


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_names_a_model_of_its_publisher(name: str) -> None:
    owner, _, model = NAMED[name].partition("/")
    assert owner in OWNERS
    assert model
