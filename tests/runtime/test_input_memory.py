"""Predicted bytes of a step's input, against the tensors that come to a device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmtrain.costs import HeldLayers, TokenLoad
from mmtrain.costs.rank_memory import INPUT_ARENA_GROWTH, NUM_INPUT_ARENAS, step_input_bytes
from mmtrain.models.stage.stage_inputs import EncoderInput, UnitInput
from mmtrain.runtime.execution import input_arena, step_prefetcher
from mmtrain.runtime.execution.unit_inputs import map_tensors
from tests.models.factory import images, load_of_text, settings, shape_of, stage, text


def test_costs_know_the_arenas() -> None:
    assert (NUM_INPUT_ARENAS, INPUT_ARENA_GROWTH) == (step_prefetcher._NUM_ARENAS, input_arena._GROWTH)


# A text has no positions in time, row and column, for which costs leave room.
@pytest.mark.parametrize(("unit", "max_ratio"), [("vision", 1.6), ("llm", 3.5)])
def test_the_input_of_a_stage_takes_what_is_predicted(unit: str, max_ratio: float) -> None:
    model = settings()
    layers = shape_of(model).unit(unit).layers
    inputs: UnitInput
    if unit == "vision":
        sides = [(8, 8), (6, 4), (2, 6)]
        inputs = images(*sides)
        load = TokenLoad.of(torch.tensor([rows * cols for rows, cols in sides]).numpy())
    else:
        inputs = text(300, 212)
        load = load_of_text(inputs)
    tensors: list[Tensor] = []
    map_tensors(
        {"data": inputs, "tables": stage(model, unit).host_tables(inputs)},
        lambda tensor: tensors.append(tensor) or tensor,
    )
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if isinstance(inputs, EncoderInput) and inputs.cells is not None:  # a run brings pixels as bytes
        nbytes += inputs.cells.numel() - inputs.cells.nbytes
    held = HeldLayers(layers, (True,) * len(layers), (False,) * len(layers), 1, 1, 1, load, num_microbatches=1)
    assert 1 <= step_input_bytes(held) / nbytes <= max_ratio
    assert step_input_bytes(held) * 3 == step_input_bytes(replace(held, num_microbatches=3))
