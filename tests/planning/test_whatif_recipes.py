"""The papers' models in recipes/whatif have plans on the clusters that their recipes name."""

from pathlib import Path

import pytest

from mmtrain.data import build_index
from mmtrain.planning import Plan
from mmtrain.planning.advise.baselines import BaselinePlanner
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import search_placements
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import load_recipe, recipe_fingerprint
from mmtrain.recipe.settings.schema import Recipe
from tests.plans import plan_recipe

FOLDER = Path(__file__).parents[2] / "recipes/whatif"
# Not planned here: 3,072 ranks, and 16 replicas that share sequences, take minutes where other work is going on.
LARGEST = {"optimus_197b.yaml", "long_video_7b.yaml"}
NAMES = sorted({path.name for path in FOLDER.glob("*.yaml")} - LARGEST - {"common.yaml"})


def planned(recipe: Recipe, num_alternatives: int) -> Plan:
    """Plan a recipe on the cluster that it names."""
    assert recipe.cluster.ranks is not None
    return plan_recipe(
        recipe,
        build_index(recipe).lengths,
        world_size=recipe.cluster.ranks,
        hardware=recipe.cluster.hardware,
        recipe_sha256=recipe_fingerprint(recipe),
        request=PlanRequest(num_alternatives=num_alternatives),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_published_model_fits_its_cluster(name: str) -> None:
    recipe = load_recipe(FOLDER / name, ["parallel.placement=unified"]).recipe
    chosen = planned(recipe, num_alternatives=1)
    assert 0.05 < chosen.predicted.mfu < 0.7
    assert chosen.world_size == recipe.cluster.ranks


@pytest.mark.slow
def test_how_many_alternatives_are_shown_does_not_change_the_plan() -> None:
    """Plan a model of which the five layouts with the best estimates are not the best ones as simulated."""
    recipe = load_recipe(FOLDER / "internvl_26b.yaml", ["parallel.placement=unified"]).recipe
    one, five = (planned(recipe, num_alternatives) for num_alternatives in (1, 5))
    assert (one.units, one.predicted) == (five.units, five.predicted)


@pytest.mark.slow
def test_few_microbatches_in_a_long_pipeline_are_divided_as_well_as_by_rules_of_thumb() -> None:
    """Search four microbatches on 16 ranks that recompute: the way down and up is most of the step.

    Of partitions that recompute, estimates are up to 3% above the simulator's steps, so the search alone may miss a
    partition that is as much faster. The planner also simulates the rules of thumb, and takes one that is faster.
    """
    meshes = ["parallel.placement=unified", "parallel.llm.tp=1", "parallel.llm.dp=32"]
    recipe = load_recipe(FOLDER / "mmscale_70b.yaml", meshes).recipe
    assert recipe.cluster.ranks is not None
    problem = formulate_problem(
        recipe,
        build_index(recipe).lengths,
        world_size=recipe.cluster.ranks,
        hardware=recipe.cluster.hardware,
        recipe_sha256=recipe_fingerprint(recipe),
    )
    evaluator, results = search_placements(problem, DEFAULT_BUDGET)
    baselines = BaselinePlanner(evaluator, results.enumerated).plan_all()
    assert len(baselines) > 3
    of_rules_s = min(baseline.step_time_s for baseline in baselines.values())
    assert results.fastest_s < 1.03 * of_rules_s
    assert planned(recipe, num_alternatives=1).predicted.step_time_s <= min(results.fastest_s, of_rules_s)


@pytest.mark.slow
def test_a_light_model_on_two_nodes_needs_no_pipeline(tmp_path: Path) -> None:
    """Reductions over both nodes go through all ports, so replicas of 0.3B + 1.1B cost less than bubbles.

    Encoders in the bubbles of a pipeline of two gain less on that than predictions can tell apart.
    """
    vision = "{layers: 24, hidden: 1024, heads: 16, ffn: 4096, patch: 14, max_side: 64}"
    llm = "{layers: 16, hidden: 2048, heads: 32, kv_heads: 8, ffn: 8192, vocab: 128256}"
    path = tmp_path / "light.yaml"
    path.write_text(
        f"name: light\nmodel: {{vision: {vision}, llm: {llm}}}\n"
        f"data: {{sources: [{{path: {FOLDER}/lengths/captions.csv}}], seq_len: 8192}}\n"
        "cluster: {hardware: h100-80g, ranks: 16}\n"
        "train: {steps: 1, global_batch: 64, optimizer: {lr: 1.0e-4}}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(path).recipe
    chosen = planned(recipe, num_alternatives=4)
    assert chosen.placement == "unified"
    assert {(unit.tp, unit.pp, unit.dp) for unit in chosen.units.values()} == {(1, 1, 16)}
