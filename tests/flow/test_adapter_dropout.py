"""Adapters drop inputs while they train, and nothing in validation or where answers are generated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.cells import ADAPTED, DROPPING

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
