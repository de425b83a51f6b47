"""When nothing fits: each change that the message suggests lets a plan fit, and half of it does not."""

import json
import math
import re
from typing import Any

import pytest
import yaml

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.advise.suggestions import is_allowed
from mmtrain.planning.artifact.plan_memory import remedy
from mmtrain.planning.search.variants import with_expert_ranks
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import lengths, problem_for, recipe
from tests.plans import plan_recipe


def planned(world_size: int, memory_gib: float | None = None, moments: str = "fp32", **parallel: Any) -> Plan:
    settings = recipe(parallel=parallel, cluster={"memory_gib": memory_gib})
    optimizer = settings.train.optimizer.model_copy(update={"moments": moments})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"optimizer": optimizer})})
    return plan_recipe(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def suggested(world_size: int, memory_gib: float, **parallel: Any) -> str:
    with pytest.raises(PlanError, match="no plan fits") as error:
        planned(world_size, memory_gib, **parallel)
    return re.search(r"Any one of these makes room: (.*)\. If the ranks", str(error.value), re.S)[1]  # type: ignore[index]


ONE_REPLICA: dict[str, Any] = {"dp": 1, "recompute": "none"}
UNIFIED: dict[str, Any] = {"placement": "unified", "llm": ONE_REPLICA, "vision": ONE_REPLICA}


def test_the_suggested_memory_is_enough() -> None:
    named = float(re.search(r"ranks with ([0-9.]+) GiB", suggested(1, 0.02, **UNIFIED))[1])  # type: ignore[index]
    assert planned(1, named, **UNIFIED).world_size == 1
    suggested(1, named / 2, **UNIFIED)


def test_the_suggested_memory_assumes_recompute_where_the_recipe_leaves_it_open() -> None:
    again = {unit: {"dp": 1, "recompute": "all"} for unit in ("llm", "vision")}
    min_gib = max(planned(1, placement="unified", **again).predicted.peak_memory_gib.values())
    free: dict[str, Any] = {"placement": "unified", "llm": {"dp": 1}, "vision": {"dp": 1}}
    named = float(re.search(r"ranks with ([0-9.]+) GiB", suggested(1, min_gib / 2, **free))[1])  # type: ignore[index]
    assert named == pytest.approx(min_gib, rel=0.01)


def test_moments_in_bf16_are_suggested_where_they_make_room() -> None:
    again = {unit: {"dp": 1, "recompute": "all"} for unit in ("llm", "vision")}
    fp32, bf16 = (planned(1, moments=moments, placement="unified", **again) for moments in ("fp32", "bf16"))
    [most], [least] = (plan.predicted.peak_memory_gib.values() for plan in (fp32, bf16))
    [fp32_kinds], [bf16_kinds] = (plan.predicted.memory_kinds_gib.values() for plan in (fp32, bf16))
    assert bf16_kinds["optimizer"] == pytest.approx(fp32_kinds["optimizer"] / 2, rel=0.01)  # fp32 weights: no masters
    free: dict[str, Any] = {"placement": "unified", "llm": {"dp": 1}, "vision": {"dp": 1}}
    between = (most + least) / 2
    assert "train.optimizer.moments: bf16" in suggested(1, between, **free)
    assert planned(1, between, moments="bf16", **free).world_size == 1
    assert "train.optimizer.moments" not in suggested(1, least * 0.9, **free)


def test_the_suggested_number_of_ranks_is_enough() -> None:
    named = int(re.search(r"(\d+) ranks", suggested(1, 0.03, **UNIFIED))[1])  # type: ignore[index]
    assert planned(named, 0.03, **UNIFIED).world_size == named
    suggested(named // 2, 0.03, **UNIFIED)


def test_a_mixture_that_fits_nowhere_is_explained_with_experts_on_as_many_ranks_as_there_are() -> None:
    """Two ranks try one and two, though data and experts could be split further."""
    settings = recipe(
        vision=None,
        llm={"layers": 2, "moe": {"experts": 16, "top_k": 2, "ffn": 64}},
        parallel={"placement": "unified", "llm": {"tp": 1, "pp": 1, "recompute": "all"}},
        cluster={"memory_gib": 0.001},
    )
    problem, _ = with_expert_ranks(problem_for(settings, world_size=2), DEFAULT_BUDGET)
    assert problem.expert_steps_s == {1: math.inf, 2: math.inf}
    assert problem.choices["llm"].ep == 2, "a rank holds half of the experts"


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_nothing_is_suggested_that_only_makes_room_with_tensor_parallel_groups_on_two_nodes(world_size: int) -> None:
    """Plan in nodes of three, where every second group of two ranks lies on two nodes."""
    tp_2: dict[str, Any] = {unit: {"tp": 2, "recompute": "none"} for unit in ("llm", "vision")}
    settings = recipe(parallel={"placement": "disaggregated", **tp_2}, cluster={"memory_gib": 0.01})

    def suggested_in_nodes_of(ranks_per_node: int) -> str:
        cluster = settings.cluster.model_copy(update={"ranks_per_node": ranks_per_node})
        in_nodes = settings.model_copy(update={"cluster": cluster})
        with pytest.raises(PlanError) as error:
            plan_recipe(in_nodes, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)
        return str(error.value).splitlines()[-1]

    assert re.search(r": parallel.*; \d+ ranks; |: \d+ ranks; ", suggested_in_nodes_of(4))
    assert suggested_in_nodes_of(3).startswith("Any one of these makes room: perhaps a data.seq_len below")


def test_shorter_groups_are_suggested_where_they_make_room_and_hold_every_sample() -> None:
    longest = int(lengths().tokens.max())

    def with_seq_len(seq_len: int, memory_gib: float | None = None) -> Plan:
        settings = recipe(parallel=UNIFIED, cluster={"memory_gib": memory_gib})
        shorter = settings.model_copy(update={"data": settings.data.model_copy(update={"seq_len": seq_len})})
        return plan_recipe(shorter, lengths(), world_size=1, hardware="cpu-core", recipe_sha256="f" * 64)

    def need_gib(seq_len: int) -> float:
        return max(with_seq_len(seq_len).predicted.peak_memory_gib.values())

    whole = recipe().data.seq_len
    assert whole // 2 > longest
    between = (need_gib(whole) + need_gib(whole // 2)) / 2
    named = int(re.search(r"data\.seq_len: (\d+) \(a step", suggested(1, between, **UNIFIED))[1])  # type: ignore[index]
    assert named == whole // 2
    assert with_seq_len(named, between).world_size == 1
    too_little = 0.9 * need_gib(longest)
    assert f"perhaps a data.seq_len below {longest}, which leaves out" in suggested(1, too_little, **UNIFIED)


def test_recomputing_is_suggested_where_it_is_enough() -> None:
    peak = max(planned(1, **UNIFIED).predicted.peak_memory_gib.values())
    again = {unit: {"dp": 1, "recompute": "all"} for unit in ("llm", "vision")}
    min_gib = max(planned(1, placement="unified", **again).predicted.peak_memory_gib.values())
    limit = (peak + min_gib) / 2
    assert "recompute: all" in suggested(1, limit, **UNIFIED)
    assert "recompute: all" not in suggested(1, min_gib * 0.9, **UNIFIED)


def with_settings(settings: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other settings by dotted keys, whose dots are double underscores; nothing is checked."""
    tree = settings.model_dump(mode="json")
    for key, value in changes.items():
        section = tree
        *sections, name = key.split("__")
        for part in sections:
            section = section[part]
        section[name] = value
    return Recipe.model_validate_json(json.dumps(tree), strict=True)


def wrong_settings(settings: Recipe) -> set[object]:
    """Return the keys that the checks name; the recipe of these tests has one without pictures of that size."""
    return {problem.where for check in CHECKS for problem in check(settings)}


@pytest.mark.parametrize(
    "changes",
    [
        {"train__optimizer__kind": "muon"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"train__lora": {"rank": 4}, "cluster__memory_gib": 0.008}, marks=pytest.mark.slow),
        pytest.param({"train__optimizer__moments": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"parallel__placement": "replicated", "parallel__shard": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_recipe_that_gets_a_suggestion_may_follow_it(changes: dict[str, Any]) -> None:
    """Apply each as a user would, and validate with all checks."""
    settings = recipe(parallel={"placement": "unified", "llm": {"recompute": "none"}, "vision": {"recompute": "none"}})
    small = with_settings(settings, **{"cluster__memory_gib": 0.016, **changes})
    with pytest.raises(PlanError) as error:
        plan_recipe(small, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)
    suggestions = re.search(r"Any one of these makes room: (.*)\. If the ranks", str(error.value), re.S)[1]  # type: ignore[index]
    followed = re.findall(r"((?:data|train|parallel)\.[\w.]+): (\w+)", suggestions)
    assert followed
    for key, value in followed:
        changed = with_settings(small, **{key.replace(".", "__"): yaml.safe_load(value)})
        assert wrong_settings(changed) <= wrong_settings(small)


def test_settings_that_the_recipe_refuses_are_not_suggested() -> None:
    muon = with_settings(recipe(), train__optimizer__kind="muon")
    assert not is_allowed(muon, "train.optimizer.moments: bf16")
    assert is_allowed(recipe(), "train.optimizer.moments: bf16")
    assert is_allowed(muon, "parallel.llm.recompute: all and parallel.vision.recompute: all")
    assert not is_allowed(muon, "parallel.llm.recompute: all and train.optimizer.moments: bf16")
    assert is_allowed(muon, "8 ranks")


def test_a_device_that_is_too_small_is_told_only_what_the_recipe_allows() -> None:
    muon = with_settings(recipe(), train__optimizer__kind="muon")
    small = with_settings(recipe(), train__optimizer__moments="bf16")
    assert remedy("optimizer", recipe()) == "more dp, tp or pp of the unit, or train.optimizer.moments: bf16"
    assert remedy("optimizer", muon) == remedy("optimizer", small) == "more dp, tp or pp of the unit"


def test_the_nearest_numbers_of_ranks_are_suggested() -> None:
    fixed = {unit: {"tp": 2, "dp": 4} for unit in ("llm", "vision")}
    with pytest.raises(PlanError, match=r"or the number of ranks; possible: 16 or 24\.") as error:
        planned(20, placement="unified", **fixed)
    assert "make 8 ranks, which does not divide 20" in str(error.value)


@pytest.mark.slow
def test_simulated_plans_are_listed_before_meshes_that_were_only_bounded() -> None:
    """List them apart: a lower bound is less than any plan needs, so meshes would come first among the closest."""
    settings = recipe(cluster={"memory_gib": 0.005})
    with pytest.raises(PlanError) as error:
        plan_recipe(settings, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)
    first, tried, *others = str(error.value).splitlines()
    assert first == "no plan fits 2 ranks of cpu-core with 0.005 GiB each."
    assert tried == "The closest of those tried:"
    heading = others.index("By what ranks hold at least:")
    assert all(": rank " in line for line in others[:heading])
    assert all("sizes of" in line for line in others[heading + 1 : -1])
