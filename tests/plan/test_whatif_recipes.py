"""The papers' models in recipes/whatif have plans on the clusters that their recipes name."""

from pathlib import Path

import pytest

from mmtrain.data import build_index
from mmtrain.plan.planner import plan_recipe
from mmtrain.plan.problem import PlanRequest
from mmtrain.recipe import load_recipe, recipe_fingerprint

FOLDER = Path(__file__).parents[2] / "recipes/whatif"
LARGEST = "optimus_197b.yaml"  # 3,072 ranks take minutes where other work is going on
QUICK = ("optimus_14b.yaml",)
OTHERS = sorted({path.name for path in FOLDER.glob("*.yaml")} - {LARGEST, *QUICK})


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_each_published_model_fits_its_cluster(name: str) -> None:
    recipe = load_recipe(FOLDER / name, ["parallel.placement=unified"]).recipe
    ranks, hardware = recipe.cluster.ranks, recipe.cluster.hardware
    assert ranks is not None
    chosen = plan_recipe(
        recipe,
        build_index(recipe).lengths,
        world_size=ranks,
        hardware=hardware,
        recipe_sha256=recipe_fingerprint(recipe),
        request=PlanRequest(num_alternatives=1),
    )
    assert 0.05 < chosen.predicted.mfu < 0.7
    assert chosen.world_size == ranks
