"""Plan files: read back exactly, rejected when damaged, old, or made for another recipe or cluster."""

import hashlib
import json
from pathlib import Path

import pytest

from mmtrain import __version__
from mmtrain.errors import PlanError
from mmtrain.planning import Plan, load_plan, require_match
from mmtrain.planning.artifact.plan_files import ranks_to_start
from mmtrain.recipe import recipe_fingerprint
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@pytest.fixture(scope="module")
def chosen() -> Plan:
    fingerprint = recipe_fingerprint(recipe())
    return plan_recipe(recipe(), lengths(), world_size=3, hardware="cpu-core", recipe_sha256=fingerprint)


def test_a_saved_plan_is_the_same_plan(chosen: Plan, tmp_path: Path) -> None:
    chosen.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == chosen


def test_the_fingerprint_is_that_of_the_whole_plan(chosen: Plan) -> None:
    assert chosen.sha256 == hashlib.sha256(chosen.model_dump_json().encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a plan file, since it is not JSON"),
        ("[]", "not a plan file, since it is not a JSON object"),
        ("{}", "is of format None, written by an unknown version of mmtrain; "),
        ('{"version": 1}', "is of format 1, .*, which reads format 2; make a new one with `mmtrain plan`"),
        ('{"version": 7, "mmtrain": "9.1"}', f"of format 7, written by mmtrain 9.1; this is mmtrain {__version__}, "),
        (
            '{"version": 2, "mmtrain": "9.1"}',
            f"damaged plan file .written by mmtrain 9.1; this is mmtrain {__version__}",
        ),
        ('{"version": 2, "world_size": "many"}', "damaged plan file: .*world_size"),
    ],
)
def test_other_files_are_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_unknown_keys_and_missing_files_are_rejected(chosen: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="cannot read the plan"):
        load_plan(path)
    path.write_text(json.dumps({**chosen.model_dump(mode="json"), "color": "red"}), encoding="utf-8")
    with pytest.raises(PlanError, match="damaged plan file: color"):
        load_plan(path)


@pytest.mark.parametrize("counts", [{"llm": 8}, {"vision": 8, "llm": 8, "audio": 8}, {"vision": 0, "llm": 8}])
def test_microbatches_that_do_not_match_the_units_are_rejected(
    chosen: Plan, counts: dict[str, int], tmp_path: Path
) -> None:
    saved = chosen.model_dump(mode="json")
    saved["schedule"]["num_microbatches"] = counts
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(
        PlanError, match=r"damaged plan file: .*num_microbatches is .*vision, llm a number of at least 1"
    ):
        load_plan(path)


def test_a_plan_for_something_else_is_rejected_with_all_differences(chosen: Plan) -> None:
    require_match(chosen, recipe(), 3, "cpu-core")
    differs = (
        r"train.global_batch \(plan 8, now 16\) changed.*number of ranks: plan 3, now 2.*hardware: plan `cpu-core`"
    )
    with pytest.raises(PlanError, match=f"(?s)the recipe: {differs}"):
        require_match(chosen, recipe(global_batch=16), 2, "h100-80g")
    with pytest.raises(PlanError) as caught:
        require_match(chosen, recipe(), 2, "cpu-core")
    assert "recipe" not in str(caught.value)


def test_only_the_first_of_many_settings_are_named(chosen: Plan) -> None:
    other = recipe(llm={"layers": 7, "hidden": 96, "heads": 6, "kv_heads": 3, "ffn": 100}, global_batch=16, seq_len=512)
    with pytest.raises(PlanError, match=r"model.llm.layers \(plan 4, now 7\).* and 2 more settings changed"):
        require_match(chosen, other, 3, "cpu-core")
    unrecorded = chosen.model_copy(update={"settings": {}})
    with pytest.raises(PlanError, match="the recipe: model, data lengths, constraints or batch changed"):
        require_match(unrecorded, other, 3, "cpu-core")


@pytest.mark.parametrize(
    ("cluster", "max_gpus", "expected"),
    [
        ({}, None, 3),
        ({"ranks": 8}, None, 8),  # and the plan is rejected
        ({"ranks": 8}, 4, 3),
        ({"ranks": 2}, 4, 2),
    ],
)
def test_a_plan_that_may_use_fewer_ranks_runs_on_its_own_number(
    chosen: Plan, cluster: dict[str, int], max_gpus: int | None, expected: int
) -> None:
    settings = recipe(cluster=cluster, parallel={"max_gpus": max_gpus})
    available = min(cluster.get("ranks", 2), max_gpus or 99)
    assert ranks_to_start(chosen, settings, available) == expected


def test_the_error_names_the_ranks_that_a_plan_needs(chosen: Plan) -> None:
    with pytest.raises(PlanError, match="the number of ranks: plan 3, now 8; start 3"):
        require_match(chosen, recipe(), 8, "cpu-core")
