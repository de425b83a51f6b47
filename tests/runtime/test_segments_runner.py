"""A stage computes the same bits segment by segment as in one piece."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import num_pieces
from mmtrain.models.stage.stage_inputs import TextInput, UnitInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.program import Edge, Microbatch, StageId
from mmtrain.runtime.execution.unit import MicrobatchState, UnitRunner
from tests.models.factory import gradients, images, randomize, settings, stage, text

MODEL = settings()
WHOLE: list[tuple[int, int]] = []
CUTS = [[(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)], [(0, 4)]]


def _runner(unit: str, recompute: Sequence[int], freeze: Sequence[str]) -> tuple[UnitRunner, StageModule]:
    layers = (0, 4) if unit == "vision" else (1, 5)
    module = stage(MODEL, unit, layers, recompute=recompute, freeze=freeze)
    randomize(module)
    return UnitRunner(unit, {StageId(unit, 1): module}, ParallelGroups.single()), module


def _microbatch(unit: str, in_parts: bool) -> tuple[MicrobatchState, Tensor | None]:
    inputs: UnitInput = images((2, 4), (4, 4)) if unit == "vision" else text(9, 5)
    cuts, segments = (tuple(range(5)), [(layer, 0) for layer in range(4)]) if in_parts else ((), [])
    stage_id = StageId(unit, 1)
    mb = Microbatch(unit, 0, 0)
    if not isinstance(inputs, TextInput):
        return MicrobatchState(stage_id, mb, inputs, {}, cuts, segments), None
    hidden = torch.randn(14, MODEL.llm.hidden, generator=torch.Generator().manual_seed(3)).requires_grad_()
    received = {Edge(StageId(unit, 0), stage_id): hidden}
    return MicrobatchState(stage_id, mb, inputs, received, cuts, segments), hidden


def _run(unit: str, cut: list[tuple[int, int]], recompute: Sequence[int], freeze: Sequence[str]) -> dict[str, Tensor]:
    runner, module = _runner(unit, recompute, freeze)
    microbatch, hidden = _microbatch(unit, bool(cut))
    for lo, hi in cut or [(0, 4)]:
        runner.forward(microbatch, lo, hi)
    [output] = microbatch.part_outputs[-1]
    microbatch.output_gradients = [torch.linspace(-1, 1, output.numel()).view(output.shape)]
    for lo, hi in reversed(cut or [(0, 4)]):
        runner.backward(microbatch, lo, hi)
    assert not microbatch.part_outputs
    assert not microbatch.part_inputs
    tensors = {"output": output.detach()} if hidden is None else {"output": output.detach(), "hidden": hidden.grad}
    trained = {f"{unit}.{name}": p.grad for name, p in module.named_parameters() if p.requires_grad}
    return tensors | (trained if freeze else gradients(module))


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize(("recompute", "freeze"), [((), ()), ((1, 2, 3), ()), ((2,), ("*.layers.[01].*",))])
def test_segments_equal_the_stage_bit_for_bit(unit: str, recompute: Sequence[int], freeze: Sequence[str]) -> None:
    expected = _run(unit, WHOLE, recompute, freeze)
    for cut in CUTS:
        result = _run(unit, cut, recompute, freeze)
        assert result.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(result[name], expected[name])] == []


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_layers_equal_the_stage_bit_for_bit(unit: str, seed: int) -> None:
    """Cut at random places, which differ between forward and backward."""
    expected = _run(unit, WHOLE, (), ())
    runner, module = _runner(unit, (), ())
    pieces = [num_pieces(module.shape.layers[index].kind) for index in module.indices]
    segments = [(layer, piece) for layer, count in enumerate(pieces) for piece in range(count)]
    assert len(segments) > 16
    chance = Random(seed)
    up, down = ([0, *sorted(chance.sample(range(1, len(segments)), 6)), len(segments)] for _ in range(2))
    microbatch, hidden = _microbatch(unit, in_parts=True)
    microbatch.part_bounds, microbatch.segments = sorted({*up, *down}), segments
    for lo, hi in pairwise(up):
        runner.forward(microbatch, lo, hi)
    [output] = microbatch.part_outputs[-1]
    microbatch.output_gradients = [torch.linspace(-1, 1, output.numel()).view(output.shape)]
    for lo, hi in reversed(list(pairwise(down))):
        runner.backward(microbatch, lo, hi)
    result = {"output": output.detach()} | ({} if hidden is None else {"hidden": hidden.grad}) | gradients(module)
    assert result.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize("cut", [WHOLE, CUTS[1]])
def test_what_a_stage_passed_on_is_freed_and_its_gradient_still_enters(unit: str, cut: list[tuple[int, int]]) -> None:
    expected = _run(unit, cut, (), ())
    runner, module = _runner(unit, (), ())
    microbatch, hidden = _microbatch(unit, bool(cut))
    for lo, hi in cut or [(0, 4)]:
        runner.forward(microbatch, lo, hi)
    storage = weakref.ref(microbatch.part_outputs[-1][0].untyped_storage())
    microbatch.output_gradients = [torch.linspace(-1, 1, expected["output"].numel()).view(expected["output"].shape)]
    assert storage() is not None
    microbatch.release_output()
    assert storage() is None
    for lo, hi in reversed(cut or [(0, 4)]):
        runner.backward(microbatch, lo, hi)
    result = ({} if hidden is None else {"hidden": hidden.grad}) | gradients(module)
    assert result.keys() == expected.keys() - {"output"}
    assert [name for name, tensor in result.items() if not torch.equal(tensor, expected[name])] == []


def test_part_outputs_are_kept_only_where_a_backward_follows() -> None:
    runner, _ = _runner("vision", (), ())
    microbatch, _ = _microbatch("vision", in_parts=True)
    with torch.no_grad():
        for lo, hi in CUTS[0]:
            runner.forward(microbatch, lo, hi)
            assert len(microbatch.part_outputs) == 1
    [last_output] = microbatch.part_outputs[0]
    trained, _ = _microbatch("vision", in_parts=True)
    runner.forward(trained, 0, 4)
    assert len(trained.part_outputs) == 4
    assert torch.equal(last_output, trained.part_outputs[-1][0])
