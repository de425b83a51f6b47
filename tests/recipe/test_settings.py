"""Every setting declares what it affects, and fingerprints and facts follow from the declarations."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from mmtrain.recipe import Recipe, editor_schema, recipe_fingerprint
from mmtrain.recipe.loading import json_schema
from mmtrain.recipe.settings.base import (
    AFFECTS_KEY,
    EFFECTS,
    NOTHING,
    Effect,
    Section,
    declared_effects,
    section_types,
    select,
    select_for_saving,
    setting,
)
from mmtrain.recipe.settings.data_settings import DataSettings

ENCODER: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64}
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "vision": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "lr_scale": 0.5},
        "audio": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "projector": {"freeze": True}},
        "llm": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512},
    },
    "data": {
        "sources": [{"path": "/data/train.json", "weight": 2.0}],
        "tokenizer": "/data/tokenizer.json",
        "seq_len": 2048,
        "budgets": {"vision": 512},
    },
    "parallel": {"llm": {"tp": 2}},
    "train": {
        "steps": 10,
        "global_batch": 4,
        "optimizer": {"lr": 1e-3},
        "freeze": ["llm.layers.0.*", "llm.layers.1.*"],
    },
}


def _leaf_settings(kind: type[Section], path: str = "") -> Iterator[tuple[str, frozenset[Effect] | None]]:
    for name, field in kind.model_fields.items():
        kinds = section_types(field.annotation)
        if not kinds:
            yield f"{path}{name}", declared_effects(field)
        for nested in kinds:
            yield from _leaf_settings(
                nested, f"{path}{name}.{nested.__name__}." if len(kinds) > 1 else f"{path}{name}."
            )


def test_every_setting_declares_what_it_affects() -> None:
    settings = dict(_leaf_settings(Recipe))
    assert len(settings) > 150
    assert [path for path, effects in settings.items() if effects is None] == []
    assert {effect for effects in settings.values() if effects for effect in effects} == set(EFFECTS)


def test_settings_that_affect_lengths_or_steps_also_affect_plans() -> None:
    for path, effects in _leaf_settings(DataSettings):
        assert effects is not None
        assert "plan" in effects or not effects & {"lengths", "steps", "resume"}, path


def test_the_declarations_stay_out_of_the_schema_for_users() -> None:
    assert AFFECTS_KEY not in str(editor_schema())


def test_a_section_field_restricts_the_effects_of_the_settings_inside() -> None:
    class Inner(Section):
        both: int = setting(1, affects={"plan", "steps"}, description="-")
        none: int = setting(2, affects=NOTHING, description="-")

    class Outer(Section):
        free: Inner = Inner()
        restricted: Inner = setting(Inner(), affects={"plan"}, description="-")
        several: tuple[Inner, ...] = (Inner(), Inner())
        missing: Inner | None = None

    inner = {"both": 1}
    assert select(Outer(), "plan") == {"free": inner, "restricted": inner, "several": [inner, inner], "missing": None}
    assert select(Outer(), "steps") == {"free": inner, "several": [inner, inner], "missing": None}
    assert select(Outer(), "lengths") == {}


def test_the_fingerprint_of_a_recipe_is_that_of_saved_plans() -> None:
    """Compare with the fingerprint of saved plans, since a change of it invalidates all of them."""
    expected = "b2ca13240a105b3acc516a6ad0f86ca13f53d5d280793383af6700bc0b20c0b6"
    assert recipe_fingerprint(Recipe.model_validate(RECIPE)) == expected


def test_a_setting_that_was_added_changes_nothing_saved_until_it_is_used() -> None:
    class Inner(Section):
        old: int = setting(1, affects={"plan"}, description="-")
        new: str = setting("as before", affects={"plan"}, added_later=True, description="-")

    class Outer(Section):
        one: Inner = Inner()
        new: Inner | None = setting(None, affects={"plan"}, added_later=True, description="-")

    assert select_for_saving(Outer(), "plan") == {"one": {"old": 1}}
    used = Outer(one=Inner(new="other"), new=Inner(old=2))
    assert select_for_saving(used, "plan") == {"one": {"old": 1, "new": "other"}, "new": {"old": 2}}


def test_saved_facts_use_the_former_names_of_settings() -> None:
    class Inner(Section):
        new: int = setting(1, affects={"plan"}, description="-", formerly="old")

    class Outer(Section):
        one: Inner = Inner()
        several: tuple[Inner, ...] = (Inner(), Inner())
        missing: Inner | None = None
        named: dict[str, Inner] = setting({"a": Inner()}, affects={"plan"}, description="-")

    assert select(Outer(), "plan") == {
        "one": {"new": 1},
        "several": [{"new": 1}] * 2,
        "missing": None,
        "named": {"a": {"position": 0, "new": 1}},
    }
    assert select_for_saving(Outer(), "plan") == {
        "one": {"old": 1},
        "several": [{"old": 1}] * 2,
        "missing": None,
        "named": {"a": {"position": 0, "old": 1}},
    }


def test_no_former_name_is_reused_for_another_setting() -> None:
    """Reject a former name for a new setting, because old recipes would silently change their meaning."""
    for former, present in json_schema.renamed_settings().items():
        assert json_schema.schema_at(former) is None
        assert json_schema.schema_at(present) is not None


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("model.vision.layers", 3, {"plan", "steps", "resume"}),
        ("model.vision.patch", 7, {"plan", "lengths", "steps", "resume"}),
        ("model.vision.lr_scale", 0.1, {"resume"}),
        ("model.vision.freeze", True, {"plan", "resume"}),
        ("model.audio", None, {"plan", "lengths", "steps", "resume"}),
        ("model.audio.projector.norm", True, {"plan", "resume"}),
        ("model.llm.layers", 3, {"plan", "resume"}),
        ("model.llm.vocab", 600, {"plan", "lengths", "resume"}),
        ("model.encoders", {"second": {**ENCODER, "modality": "vision"}}, {"plan", "lengths", "steps", "resume"}),
        ("data.seq_len", 4096, {"plan", "lengths", "steps", "resume"}),
        ("data.sources", [{"path": "/data/train.json", "weight": 3.0}], {"plan"}),
        ("data.validation", [{"path": "/data/validation.json"}], set()),
        ("data.image.mean", [0.1, 0.2, 0.3], {"plan", "steps", "resume"}),
        ("data.limits.max_members", 7, {"plan", "lengths", "steps"}),
        ("train.seed", 1, {"steps", "resume"}),
        ("train.precision", "fp32", {"plan"}),
        ("train.optimizer.lr", 1.0, set()),
        ("train.optimizer.layer_lr_decay", 0.75, set()),
        ("train.optimizer.kind", "muon", {"plan", "resume"}),
        ("parallel.llm.tp", 4, {"plan"}),
    ],
)
def test_a_setting_changes_the_selections_of_its_effects_only(path: str, value: Any, changed: set[str]) -> None:
    raw = copy.deepcopy(RECIPE)
    *sections, name = path.split(".")
    section = raw
    for key in sections:
        section = section.setdefault(key, {})
    section[name] = value
    before, after = Recipe.model_validate(RECIPE), Recipe.model_validate(raw)
    assert {effect for effect in EFFECTS if select(before, effect) != select(after, effect)} == changed


@pytest.mark.parametrize(
    ("name", "value", "changed"),
    [
        ("layers", 3, {"plan", "steps", "resume"}),
        ("patch", 7, {"plan", "lengths", "steps", "resume"}),
        ("lr_scale", 0.1, {"resume"}),
        ("downsample", "pixel_shuffle", {"plan", "steps", "resume"}),  # of audio encoders it also affects lengths
        ("modality", "audio", {"plan", "lengths", "steps", "resume"}),
    ],
)
def test_settings_of_a_named_encoder_have_the_effects_of_its_modality(name: str, value: Any, changed: set[str]) -> None:
    before, after = (
        Recipe.model_validate(_with_encoders({"second": {**ENCODER, "modality": "vision", **change}}))
        for change in ({}, {name: value})
    )
    assert {effect for effect in EFFECTS if select(before, effect) != select(after, effect)} == changed


def test_the_order_of_named_encoders_counts_because_it_is_the_order_of_their_features() -> None:
    first, second = {**ENCODER, "modality": "vision"}, {**ENCODER, "modality": "vision", "patch": 7}
    before = Recipe.model_validate(_with_encoders({"first": first, "second": second}))
    after = Recipe.model_validate(_with_encoders({"second": second, "first": first}))
    assert list(before.model.all_encoders) == ["vision", "audio", "first", "second"]
    assert list(after.model.all_encoders) == ["vision", "audio", "second", "first"]
    assert {effect for effect in EFFECTS if select(before, effect) != select(after, effect)} == set(EFFECTS)
    assert recipe_fingerprint(before) != recipe_fingerprint(after)


def _with_encoders(encoders: dict[str, Any]) -> dict[str, Any]:
    return {**RECIPE, "model": {**RECIPE["model"], "encoders": encoders}}
