"""Placements are searched for this machine as for any other."""

from pathlib import Path

from mmtrain.api.plans import make_plan, plan_for_started_ranks
from mmtrain.planning import Plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe
from tests.planning.factory import lengths, recipe

WITHOUT_PIPELINES = {"llm": {"tp": 1, "pp": 1}, "vision": {"tp": 1, "pp": 1}}


def _tight(**parallel: str) -> Recipe:
    """Return a recipe for which sharded replicas are the fastest plan, by a third, and others fit too."""
    return recipe(cluster={"memory_gib": 0.0204}, parallel={**WITHOUT_PIPELINES, **parallel})


def _plan_started(settings: Recipe) -> Plan:
    return plan_for_started_ranks(settings, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="a" * 64)


def test_sharded_replicas_are_chosen_where_they_are_fastest() -> None:
    """`train` asks for its started ranks, `plan` for this machine, and `replan` for the ranks that run."""
    assert _plan_started(_tight()).shard == make_plan(_tight(), lengths(), PlanRequest()).plan.shard == 2
    present = _plan_started(_tight(placement="unified"))
    assert plan_again(_tight(), lengths(), present=present, costs=Path("cpu-core")).shard == 2
