"""Plans in which an encoder that tp does not divide has a replica on each rank of the LLM's TP groups."""

from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_partition import anchored_partition, layer_chains, partitioned_layout
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, lengths, recipe
from tests.plans import mesh_assignments, plan_recipe

FIVE_HEADS = VISION | {"heads": 5, "hidden": 100}


def five_heads(vision: dict[str, Any] | None = None, **llm: Any) -> Recipe:
    parallel = {"placement": "unified", "vision": vision or {}, "llm": llm}
    return recipe(vision=FIVE_HEADS, parallel=parallel, cluster={"ranks_per_node": 4})


def evaluated(settings: Recipe, world_size: int) -> Evaluator:
    problem = formulate_problem(settings, lengths(), world_size=world_size, hardware="h100-80g", recipe_sha256="f" * 64)
    return Evaluator(problem)


def planned(settings: Recipe, world_size: int, hardware: str = "h100-80g") -> Plan:
    return plan_recipe(settings, lengths(), world_size=world_size, hardware=hardware, recipe_sha256="f" * 64)


def unified_assignments(settings: Recipe, world_size: int) -> list[MeshAssignment]:
    choices = evaluated(settings, world_size).problem.choices
    return [a for a in mesh_assignments(choices, world_size) if a.placement == "unified"]


def test_an_encoder_has_the_tensor_parallel_size_of_the_llm_only_where_that_divides_it() -> None:
    meshes = {
        (a.meshes[LLM].tp, a.meshes["vision"].tp, a.meshes["vision"].dp // a.meshes[LLM].dp)
        for a in unified_assignments(five_heads(), 4)
    }
    assert meshes == {(1, 1, 1), (2, 1, 2), (4, 1, 4)}
    parallel = {"placement": "unified"}
    divided = unified_assignments(recipe(parallel=parallel), 4)
    assert all(a.meshes["vision"] == a.meshes[LLM] for a in divided)
    two_heads = recipe(vision=VISION | {"heads": 2}, parallel=parallel, cluster={"ranks_per_node": 4})
    of_tp4 = {a.meshes["vision"].tp for a in unified_assignments(two_heads, 4) if a.meshes[LLM].tp == 4}
    assert of_tp4 == {1}


def test_a_recipe_may_ask_for_replicas_where_tp_divides_the_encoder() -> None:
    sizes = {"vision": {"tp": 1}, "llm": {"tp": 2, "dp": 2}}
    [assignment] = unified_assignments(recipe(parallel={"placement": "unified", **sizes}), 4)[:1]
    assert assignment.meshes == {"vision": MeshSize(1, 1, 4), LLM: MeshSize(2, 1, 2)}
    assert str(assignment) == "unified: tp2 pp1 dp2, vision tp1 dp4"
    sizes["vision"]["dp"] = 4
    assert unified_assignments(recipe(parallel={"placement": "unified", **sizes}), 4)[0] == assignment


def test_sizes_that_do_not_go_together_are_named() -> None:
    with pytest.raises(PlanError, match=r"vision\.dp \(4\) and parallel\.llm\.dp \(4\) do not go together"):
        planned(five_heads({"dp": 4}, tp=2, dp=4), 8)


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_bounds_estimate_and_simulation_agree(tp: int, pp: int, vpp: int) -> None:
    settings = five_heads(tp=tp, dp=2, vpp=vpp)
    evaluator = evaluated(settings, tp * pp * 2)
    [assignment] = unified_assignments(settings, tp * pp * 2)
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    chains = layer_chains(assignment, layer_costs, choices)
    partition = anchored_partition(assignment, layer_costs, choices, evaluator.memory_bytes)
    assert partition is not None
    [estimate] = evaluator.estimator(None).estimate(assignment, chains, [partition], [None] * len(chains))
    layout = partitioned_layout(assignment, layer_costs, partition)
    simulated = simulate_layout(layout, layout.default_schedule, layer_costs, evaluator.problem.hardware).step_time_s
    assert estimate == pytest.approx(simulated, rel=0.06)  # messages between units are not estimated
    assert estimate <= simulated * 1.0001
    microbatches = assignment.pipeline_microbatches
    bounds = (evaluator.time_lower_bound(unit, mesh, microbatches[unit]) for unit, mesh in assignment.meshes.items())
    assert sum(bounds) <= simulated


def test_the_plan_has_replicas_and_the_llm_its_tensor_parallel_size() -> None:
    plan = planned(five_heads(tp=2, dp=2), 8)
    vision, llm = plan.units["vision"], plan.units[LLM]
    assert (vision.tp, vision.dp, vision.sp) == (1, 4, False)
    assert (llm.tp, llm.dp) == (2, 2)
    assert vision.ranks[:4] == (0, 1, 2, 3)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_memory_that_is_short_is_saved_on_the_ranks_of_both_units() -> None:
    settings = five_heads(tp=2, dp=2, pp=1)
    roomy = planned(settings, 4, "cpu-core")
    limit = 0.9 * max(roomy.predicted.peak_memory_gib.values())
    short = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"memory_gib": limit})})
    plan = planned(short, 4, "cpu-core")
    assert max(plan.predicted.peak_memory_gib.values()) <= limit
    assert sum(unit.num_recomputed for unit in plan.units.values()) > 0


def test_a_replica_is_balanced_for_its_share_of_the_items() -> None:
    """Two replicas cost a rank about as much per image as one that is divided in two."""
    costs = []
    for vision in ({"tp": 1}, {"tp": 2}):
        settings = recipe(parallel={"placement": "unified", "vision": vision, "llm": {"tp": 2, "dp": 2}})
        chosen = planned(settings, 4, "cpu-core")
        assert chosen.units["vision"].tp == vision["tp"]
        [load] = derive_step_targets(settings, chosen, lengths()).loads
        costs.append(load.costs["vision"].linear / load.costs[LLM].linear)
    assert costs[0] == pytest.approx(costs[1], rel=0.3)
