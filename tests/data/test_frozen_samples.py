"""What trains and gets nothing from the data is said before the first step, whose gradient would be zero."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import build_index
from mmtrain.errors import DataError, RecipeError
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import png
from tests.data.rows import Row, row

MakeRecipe = Callable[..., Recipe]
TEXT, PICTURE = row("say red", "red"), row("<image>what?", "red", "red.png")
FROZEN = {"freeze": True}
PROJECTOR_ALONE = {"llm": FROZEN, "vision": FROZEN}
ENCODER_ALONE = {"llm": FROZEN, "vision": {"projector": {"freeze": True}}}
LORA_OF_VISION = {"rank": 2, "alpha": 4.0, "targets": ["vision.layers.*"]}


@pytest.fixture
def freezing(tmp_path: Path, recipe: MakeRecipe) -> MakeRecipe:
    """Return a function that makes a recipe from rows, changes of units and settings of `train`."""
    (tmp_path / "red.png").write_bytes(png("red", 8, 8))

    def make(rows: list[Row], units: dict[str, Any], **train: Any) -> Recipe:
        plain = recipe(rows).model_dump()
        for unit, changes in units.items():
            projector = plain["model"][unit].get("projector", {}) | changes.get("projector", {})
            plain["model"][unit] |= changes | ({"projector": projector} if projector else {})
        plain["train"] |= train
        return Recipe.model_validate(plain)

    return make


@pytest.mark.parametrize(
    ("units", "train"),
    [(PROJECTOR_ALONE, {}), (ENCODER_ALONE, {}), ({}, {"freeze": ["llm.*"]}), ({}, {"lora": LORA_OF_VISION})],
    ids=["projector", "encoder", "by pattern", "adapters"],
)
def test_texts_teach_nothing_where_only_an_encoder_trains(
    freezing: MakeRecipe, units: dict[str, Any], train: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"2 of 2 samples teach nothing: they have no images or videos for what trains"):
        build_index(freezing([TEXT, TEXT], units, **train))
    [warning] = build_index(freezing([TEXT, PICTURE], units, **train)).warnings
    assert warning.startswith("1 of 2 samples teach nothing: they have no images or videos for what trains (vision)")
    assert build_index(freezing([PICTURE], units, **train)).warnings == ()


def test_samples_that_teach_nothing_are_counted_in_all_blocks(
    freezing: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmtrain.balance.columns.BLOCK_ROWS", 2)
    [warning] = build_index(freezing([PICTURE, PICTURE, PICTURE, TEXT, TEXT], PROJECTOR_ALONE)).warnings
    assert warning.startswith("2 of 5 samples teach nothing")
    assert "number 3," in warning


def test_an_encoder_that_trains_and_sees_nothing_is_a_warning(freezing: MakeRecipe) -> None:
    """The LLM learns from texts, so that the run makes sense; the encoder is a mistake, or a mixture to come."""
    [warning] = build_index(freezing([TEXT, TEXT], {})).warnings
    assert warning.startswith("vision trains, but no sample has images or videos")
    frozen = {"vision": {"freeze": True, "projector": {"freeze": True}}}
    assert build_index(freezing([TEXT, TEXT], frozen)).warnings == ()
    assert build_index(freezing([TEXT, PICTURE], {})).warnings == ()


def test_a_model_with_nothing_to_train_is_an_error(freezing: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match="every parameter is frozen"):
        build_index(freezing([PICTURE], {}, freeze=["*"]))
