"""What a resumed run must share with the saved one is compared by name."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mmtrain.data.index.data_index import DataIndex
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.base import flatten
from mmtrain.runtime.training.start_run import describe_changed_facts, resume_facts
from tests.recipe.test_settings import ENCODER, RECIPE

INDEX = cast(DataIndex, SimpleNamespace(samples=[1, 2, 3], fingerprint="f"))


def facts(
    tmp_path: Path, encoders: dict[str, Any] | None = None, lora: dict[str, Any] | None = None, **data: Any
) -> dict[str, object]:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(b"")
    raw = RECIPE | {"data": RECIPE["data"] | {"tokenizer": tokenizer} | data}
    raw["model"] = RECIPE["model"] | {"encoders": encoders or {}}
    if lora is not None:
        raw["train"] = RECIPE["train"] | {"lora": lora}
    return flatten(resume_facts(Recipe.model_validate(raw), INDEX))


def test_the_facts_of_a_recipe_are_those_of_saved_checkpoints(tmp_path: Path) -> None:
    facts_of_recipe = facts(tmp_path)
    assert facts_of_recipe.pop("data.grouping_version") == 6, "which names a change of the steps themselves"
    assert facts_of_recipe["data.budgets"] == "vision=512"
    assert facts_of_recipe["train.freeze"] == "llm.layers.0.* llm.layers.1.*"
    assert facts_of_recipe["data.tokenizer_sha256"] == hashlib.sha256(b"").hexdigest()
    assert facts_of_recipe.pop("model.hf") is None  # missing then, and none now: the same
    digest = hashlib.sha256(json.dumps(facts_of_recipe, sort_keys=True).encode()).hexdigest()
    assert digest == "b814b1bc37a175f879723304830dd41ba028692571689ee6c44ad7b3745b9aee"


def test_adapters_are_one_fact_that_later_settings_do_not_change(tmp_path: Path) -> None:
    lora = {"rank": 4, "targets": ["llm.*.linear_qkv"]}
    of_saved_checkpoints = "rank=4 alpha=32.0 targets=('llm.*.linear_qkv',) also_train=()"
    assert facts(tmp_path, lora=lora)["train.lora"] == of_saved_checkpoints
    (change,) = describe_changed_facts(
        before=facts(tmp_path, lora=lora), now=facts(tmp_path, lora=lora | {"scaling": "rslora"})
    )
    assert change.startswith(f"train.lora: {of_saved_checkpoints} then, rank=4 alpha=32.0 scaling='rslora' ")


def test_another_version_of_the_grouping_is_named(tmp_path: Path) -> None:
    now = facts(tmp_path)
    before = {key: value for key, value in now.items() if key != "data.grouping_version"}
    (change,) = describe_changed_facts(before=before, now=now)
    assert change.startswith("data.grouping_version: None then, 6 now (")
    (change,) = describe_changed_facts(before=now, now=before)
    assert change.startswith("data.grouping_version: 6 then, None now (")
    assert "data.grouping_version" not in facts(tmp_path, grouping="random"), "its first version needs no mark"


def test_other_rules_of_isf_are_named(tmp_path: Path) -> None:
    default, other = facts(tmp_path, grouping="isf"), facts(tmp_path, grouping="isf", isf={"rounds": 3})
    (change,) = describe_changed_facts(before=default, now=other)
    before, now = change.split(" then, ")
    assert "rounds=10" in before
    assert "rounds=3" in now


def test_a_removed_budget_changes_the_facts(tmp_path: Path) -> None:
    before, after = facts(tmp_path), facts(tmp_path, budgets={})
    assert {key for key in after if before.get(key) != after[key]} == {"data.budgets"}


def test_added_removed_and_reordered_encoders_are_named(tmp_path: Path) -> None:
    fine, coarse = {**ENCODER, "modality": "vision"}, {**ENCODER, "modality": "vision", "patch": 28}
    short_form, two_encoders = facts(tmp_path), facts(tmp_path, {"fine": fine, "coarse": coarse})
    removed = describe_changed_facts(before=two_encoders, now=short_form)
    assert removed == [
        f"model.encoders.{name}.position: {i} then, None now" for i, name in enumerate(("fine", "coarse"))
    ]
    assert "model.encoders.fine.layers: None then, 2 now" in describe_changed_facts(before=short_form, now=two_encoders)
    reordered = facts(tmp_path, {"coarse": coarse, "fine": fine})
    assert describe_changed_facts(before=two_encoders, now=reordered) == [
        "model.encoders.coarse.position: 1 then, 0 now",
        "model.encoders.fine.position: 0 then, 1 now",
    ]
    assert describe_changed_facts(before={**short_form, "gone.setting": 1}, now=short_form) == []
