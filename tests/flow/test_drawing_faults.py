"""A rank that holds a generator is killed: the run ends as if it had not been."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.plan.plan_again import plan_again
from mmtrain.plan.planner import plan_recipe
from mmtrain.program import Backward
from mmtrain.recipe import load_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from tests.faults import FailAt
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.runs import assert_same_end, launch

NUM_STEPS = 4
# name -> (generator, ranks, settings)
RUNS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "a transformer on a rank of its own": (DIT, 3, ("parallel.placement=disaggregated",)),
    "a u-net at the end of one pipeline": (UNET, 2, ("parallel.placement=unified", "parallel.llm.tp=2")),
    "a sharded u-net": (UNET, 2, ("parallel.placement=replicated", "parallel.shard=all")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_rank_with_a_generator_is_replaced(name: str, tmp_path: Path) -> None:
    generator, num_ranks, settings = RUNS[name]
    write_samples(tmp_path)
    path = tmp_path / "recipe.json"
    plain = recipe(tmp_path, model__generator=dict(generator), train__steps=NUM_STEPS, train__checkpoint__every=2)
    path.write_text(plain.model_dump_json(exclude_unset=True))
    loaded = load_recipe(path, [*settings, f"cluster.ranks={num_ranks}"])
    unbroken = TrainRequest(loaded, plan_recipe, plan_again, "cpu-core", num_ranks, tmp_path / "unbroken")
    assert launch(unbroken) == (0, "")
    killed = replace(unbroken, run_dir=tmp_path / "killed", max_restarts=1)
    fault = FailAt(num_ranks - 1, 2, "kill", action=Backward, once=tmp_path / "was-killed")  # holds the generator
    assert launch(killed, fault) == (0, "")
    assert (tmp_path / "was-killed").exists()
    assert_same_end(tmp_path / "killed", tmp_path / "unbroken", NUM_STEPS)
