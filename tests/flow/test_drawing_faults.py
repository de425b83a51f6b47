"""A rank that holds a generator is killed: the run ends as if it had not been."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.planning import Plan
from mmtrain.planning.whatif import plan_again
from mmtrain.program import Backward
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE
from mmtrain.runtime.training.train_request import TrainRequest
from tests.faults import FailAt
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.runs import assert_same_end, launch
from tests.plans import plan_recipe

NUM_STEPS = 4
# name -> (generator, ranks, settings)
RUNS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "a transformer on a rank of its own": (DIT, 3, ("parallel.placement=disaggregated",)),
    "a u-net at the end of one pipeline": (UNET, 2, ("parallel.placement=unified", "parallel.llm.tp=2")),
    "a sharded u-net": (UNET, 2, ("parallel.placement=replicated", "parallel.shard=all")),
}


def unbroken_run(folder: Path, generator: dict[str, Any], num_ranks: int, *settings: str) -> TrainRequest:
    """Train without a fault; return the request."""
    write_samples(folder)
    path = folder / "recipe.json"
    plain = recipe(folder, model__generator=dict(generator), train__steps=NUM_STEPS, train__checkpoint__every=2)
    path.write_text(plain.model_dump_json(exclude_unset=True))
    loaded = load_recipe(path, [*settings, f"cluster.ranks={num_ranks}"])
    unbroken = TrainRequest(loaded, plan_recipe, plan_again, "cpu-core", num_ranks, folder / "unbroken")
    assert launch(unbroken) == (0, "")
    return unbroken


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_rank_with_a_generator_is_replaced(name: str, tmp_path: Path) -> None:
    generator, num_ranks, settings = RUNS[name]
    unbroken = unbroken_run(tmp_path, generator, num_ranks, *settings)
    killed = replace(unbroken, run_dir=tmp_path / "killed", max_restarts=1)
    fault = FailAt(num_ranks - 1, 2, "kill", action=Backward, once=tmp_path / "was-killed")  # holds the generator
    assert launch(killed, fault) == (0, "")
    assert (tmp_path / "was-killed").exists()
    assert_same_end(tmp_path / "killed", tmp_path / "unbroken", NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("generator", [DIT, UNET], ids=["transformer", "u-net"])
def test_a_run_with_a_generator_on_the_llms_ranks_goes_on_where_it_was_killed(
    generator: dict[str, Any], tmp_path: Path
) -> None:
    """Show it for images of two sizes, some of which are drawn without their context."""
    drawn = generator | {"image_size": 12, "bucket_step": 4, "context_dropout": 0.5}
    unbroken = unbroken_run(tmp_path, drawn, 2, "parallel.placement=colocated", "parallel.llm.pp=2")
    chosen = Plan.model_validate_json((unbroken.run_dir / PLAN_FILE).read_text())
    assert (chosen.placement, chosen.units["generator"].ranks) == ("colocated", (0, 1))
    killed = replace(unbroken, run_dir=tmp_path / "killed")
    code, _ = launch(killed, FailAt(1, 3, "kill", action=Backward))
    assert code != 0
    assert len(read_metrics(killed.run_dir)) < NUM_STEPS
    assert launch(replace(killed, resume=True)) == (0, "")
    assert_same_end(killed.run_dir, unbroken.run_dir, NUM_STEPS)
    assert all(step["drawing_loss"] > 0 for step in read_metrics(killed.run_dir))
