"""Adapters drop inputs while they train, and nothing in validation or where answers are generated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.world import World
from tests.distributed import RanksFailed, run_ranks
from tests.faults import FailAt
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.cells import ADAPTED, DROPPING
from tests.flow.runs import assert_same_end, request_for, run_all

ONE_RANK = {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}


def _losses(settings: Recipe) -> tuple[float, float, float, bool]:
    """Return the losses of validation, of a step of training and of the next step, and whether answers drop inputs."""
    context = build_rank_context(settings, plan(settings, **ONE_RANK), World(dist.get_rank(), 1, torch.device("cpu")))
    with torch.no_grad():  # new adapters have no effect
        for unit in context.units.values():
            for stage in unit.stages.values():
                for name, param in stage.named_parameters():
                    if name.endswith(".lora.b"):
                        param.fill_(0.05)
    data = step_data(context, 0, False)
    validation = context.validate(data).loss
    stages = {name: unit.stages.values() for name, unit in context.units.items()}
    of_answers = unit_inputs(data, stages, settings).values()
    keys = [each.item_keys if isinstance(each, EncoderInput) else each.token_keys for each in of_answers]
    drops = any(each is not None for each in keys)
    later = replace(data, meta=replace(data.meta, step=1))
    first, second = (context.train(each, lr=0.0).loss for each in (data, later))
    return validation, first, second, drops


@pytest.mark.parametrize("changes", [ADAPTED, DROPPING], ids=["without dropout", "with dropout"])
def test_steps_drop_inputs_and_validation_does_not(changes: dict[str, Any]) -> None:
    [(validation, first, second, answers_drop)] = run_ranks(1, _losses, recipe(**changes))
    [(without, *_)] = run_ranks(1, _losses, recipe(**ADAPTED))
    assert validation == without
    assert not answers_drop
    if changes == ADAPTED:
        assert first == second == pytest.approx(validation, rel=1e-6)
    else:
        assert len({round(loss, 4) for loss in (validation, first, second)}) == 3


@pytest.mark.slow
def test_a_killed_run_drops_the_same_inputs_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    """Also on another placement, where the masks of its steps are those of the unbroken run."""
    settings = ("train.lora.rank=4", "train.lora.dropout=0.3")
    unbroken, killed, moved = (
        request_for(data, tmp_path / name, *settings) for name in ("unbroken", "killed", "moved")
    )
    assert run_all(unbroken, unbroken) == ["", ""]
    for request in (killed, moved):
        with pytest.raises(RanksFailed, match="died without a word"):
            run_all(request, request, faults=FailAt(1, 4, "kill"))
    again = replace(killed, resume=True)
    assert run_all(again, again) == ["", ""]
    assert_same_end(killed.run_dir, unbroken.run_dir)
    elsewhere = request_for(data, moved.run_dir, *settings, "parallel.placement=unified", resume=True)
    assert run_all(elsewhere, elsewhere) == ["", ""]
    losses = [[step["loss"] for step in read_metrics(run.run_dir)] for run in (unbroken, moved)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
