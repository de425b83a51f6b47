"""What is planned for this machine is what its torch can run."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.api import local_cluster
from mmtrain.api.plans import make_plan, plan_for_started_ranks
from mmtrain.errors import LaunchError
from mmtrain.models.stage.fully_sharded import require_fsdp2
from mmtrain.planning import Plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe
from tests.planning.factory import lengths, recipe

WITHOUT_PIPELINES = {"llm": {"tp": 1, "pp": 1}, "vision": {"tp": 1, "pp": 1}}


def _tight(cluster: dict[str, Any] | None = None, **parallel: Any) -> Recipe:
    """Return a recipe for which sharded replicas are the fastest plan, by a third, and others fit too."""
    return recipe(cluster={"memory_gib": 0.021, **(cluster or {})}, parallel={**WITHOUT_PIPELINES, **parallel})


def _placements(plan: Plan) -> set[str]:
    return {plan.placement} | {other.summary.partition(":")[0].split(", ")[-1] for other in plan.alternatives}


@pytest.fixture
def torch_without_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "version", {"torch": "2.11.0+cu130"}.__getitem__)


@pytest.fixture
def torch_with_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "version", {"torch": "2.13.0a0+git1"}.__getitem__)


def _plan_started(settings: Recipe) -> Plan:
    return plan_for_started_ranks(settings, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="a" * 64)


def _plan_here(settings: Recipe, **request: Any) -> Plan:
    return make_plan(settings, lengths(), PlanRequest(**request)).plan


def test_what_the_version_says_of_this_torch_is_so() -> None:
    """The version is asked before torch is loaded, which takes longer than a plan."""
    try:
        require_fsdp2()
    except LaunchError:
        assert not local_cluster.can_shard_here()
    else:
        assert local_cluster.can_shard_here()


@pytest.mark.usefixtures("torch_with_sharding")
def test_sharded_replicas_are_chosen_where_torch_can_shard() -> None:
    assert _plan_started(_tight()).shard == _plan_here(_tight()).shard == 2


@pytest.mark.usefixtures("torch_without_sharding")
def test_ranks_that_cannot_shard_get_another_plan() -> None:
    """`train` asks for its started ranks, `evaluate` for as many as it has, `plan` for this machine."""
    named = {"hardware": "cpu-core", "ranks": 2}
    for plan in (
        _plan_started(_tight(named)),
        plan_for_started_ranks(_tight(named), lengths(), 2),
        _plan_here(_tight()),
        _plan_here(_tight({"ranks": 2}), explain=True),
    ):
        assert "unified" in _placements(plan)
        assert "replicated" not in _placements(plan)


@pytest.mark.usefixtures("torch_without_sharding")
def test_whole_replicas_and_other_clusters_are_planned_as_ever() -> None:
    roomy = _tight({"memory_gib": 1}, zero=1)
    assert "replicated" in _placements(_plan_here(roomy, explain=True))
    assert _plan_here(_tight({"hardware": "cpu-core", "ranks": 2})).placement == "replicated"
    assert _plan_here(_tight(placement="replicated")).shard == 2  # `train` says what lacks


@pytest.mark.parametrize("can_shard", [True, False])
def test_planning_again_keeps_to_what_torch_can_run(can_shard: bool) -> None:
    present = _plan_started(_tight(placement="unified"))
    again = plan_again(_tight(), lengths(), present=present, costs=Path("cpu-core"), can_shard=can_shard)
    assert ("replicated" in _placements(again)) == can_shard
