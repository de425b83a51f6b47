"""A recipe with any values in any places is loaded, or refused with a message."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmtrain.errors import MmtrainError
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.settings.base import Section, section_types
from mmtrain.system_errors import system_errors_named
from tests.fuzz.mutations import SETTINGS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no server for models that recipes name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings below a section."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in section_types(field.annotation):
            yield from keys(kind, f"{prefix}{name}.")


KEYS = sorted(set(keys(Recipe)))


def check(seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(RECIPES)
    settings = [
        f"{rng.choice(KEYS)}{rng.choice(('', '', '', '.0', '.a'))}={rng.choice(SETTINGS)}"
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    try:
        with contextlib.suppress(MmtrainError), system_errors_named():  # as the command line does
            load_recipe(path, settings, env={})
    except Exception as error:
        shown = f"{path.name} {settings}: {type(error).__name__}: {error}"
        raise AssertionError(f"seed {seed}: {shown:.500}") from error


@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.zero=stage3"],
        ["data.sources={}"],
        ["data.validation.path=.inf"],
        ["model.llm.preset.0=0.5"],
        ["model.vision.preset={a: []}"],
    ],
    ids=str,
)
def test_values_that_once_gave_a_traceback_are_named(settings: list[str]) -> None:
    with pytest.raises(MmtrainError, match=settings[0].partition("=")[0].partition(".0")[0].replace(".path", "")):
        load_recipe(RECIPES[0], settings, env={})


def test_recipes() -> None:
    for seed in range(100):
        check(seed)


@pytest.mark.slow  # a minute
def test_many_recipes() -> None:
    for seed in range(100, 5100):
        check(seed)


def test_keys_reach_every_section() -> None:
    assert {"parallel.zero", "data.image.mean", "train.lora.targets", "model.llm.moe.top_k"} <= set(KEYS)
