"""A stage run segment by segment gives, bit for bit, what it gives in one piece."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.model_shape import num_pieces
from mmtrain.models.stage_inputs import TextInput, UnitInput
from mmtrain.models.stage_module import StageModule
from mmtrain.program import Edge, StageId
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
    if not isinstance(inputs, TextInput):
        return MicrobatchState(StageId(unit, 1), inputs, {}, cuts, segments), None
    hidden = torch.randn(14, MODEL.llm.hidden, generator=torch.Generator().manual_seed(3)).requires_grad_()
    edge = Edge(StageId(unit, 0), StageId(unit, 1))
    return MicrobatchState(StageId(unit, 1), inputs, {edge: hidden}, cuts, segments), hidden


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
    found = {"output": output.detach()} if hidden is None else {"output": output.detach(), "hidden": hidden.grad}
    trained = {f"{unit}.{name}": p.grad for name, p in module.named_parameters() if p.requires_grad}
    return found | (trained if freeze else gradients(module))


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize(("recompute", "freeze"), [((), ()), ((1, 2, 3), ()), ((2,), ("*.layers.[01].*",))])
def test_segments_are_the_stage_bit_for_bit(unit: str, recompute: Sequence[int], freeze: Sequence[str]) -> None:
    wanted = _run(unit, WHOLE, recompute, freeze)
    for cut in CUTS:
        found = _run(unit, cut, recompute, freeze)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_layers_are_the_stage_bit_for_bit(unit: str, seed: int) -> None:
    """Cut anywhere, and otherwise in backward than in forward."""
    wanted = _run(unit, WHOLE, (), ())
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
    found = {"output": output.detach()} | ({} if hidden is None else {"hidden": hidden.grad}) | gradients(module)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_nothing_is_kept_for_a_backward_that_does_not_come() -> None:
    runner, _ = _runner("vision", (), ())
    microbatch, _ = _microbatch("vision", in_parts=True)
    with torch.no_grad():
        for lo, hi in CUTS[0]:
            runner.forward(microbatch, lo, hi)
            assert len(microbatch.part_outputs) == 1
    [kept] = microbatch.part_outputs[0]
    trained, _ = _microbatch("vision", in_parts=True)
    runner.forward(trained, 0, 4)
    assert len(trained.part_outputs) == 4
    assert torch.equal(kept, trained.part_outputs[-1][0])
