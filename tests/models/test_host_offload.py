from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, preset
from mmtrain.costs.rank_memory import microbatch_activation_bytes, microbatch_host_bytes, stage_working_bytes
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES
from mmtrain.models.stage import host_offload
from mmtrain.models.stage.piecewise import run_block_pieces
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from tests.costs.counted_stages import count, large_stages_on_meta
from tests.models.device_copies import META, on_device
from tests.models.factory import DEEPSTACK, clips, gradients, images, randomize, settings, shape_of, stage, text

LENGTHS = (9, 12, 15)
INPUTS: dict[str, EncoderInput | TextInput] = {
    "vision": images((4, 6), (2, 2)), "audio": clips(20, 44), "llm": text(*LENGTHS),
}  # fmt: skip


@pytest.fixture
def host_copies() -> Iterator[list[Tensor]]:
    """Collect what is allocated in host memory."""
    copies: list[Tensor] = []
    allocate = host_offload.empty_on_host

    def collect(tensor: Tensor) -> Tensor:
        copies.append(allocate(tensor))
        return copies[-1]

    with patch.object(host_offload, "empty_on_host", collect):
        yield copies


def _gradients(module: StageModule, inputs: EncoderInput | TextInput, fetches_ahead: bool = False) -> dict[str, Tensor]:
    """Run two microbatches as 1F1B does; return the sum of their gradients."""
    randomize(module)
    outputs, contexts = [], []
    for _ in range(2):
        contexts.append(module.context(inputs, {}))
        outputs.append(module.run(contexts[-1], None, module.indices))
    for context, output in zip(contexts, outputs, strict=True):
        if fetches_ahead:
            context.offloaded.fetch_last()
        output.sum().backward()
    return gradients(module)


@pytest.mark.parametrize("unit", INPUTS)
@pytest.mark.parametrize(
    ("offload", "recompute"), [("all", ()), ("all", (2,)), ("all", (1, 2)), ("inputs", (1, 2)), ("inputs", (2,))]
)
def test_activations_in_host_memory_change_nothing(
    unit: str, offload: str, recompute: tuple[int, ...], host_copies: list[Tensor]
) -> None:
    model = settings(vision=DEEPSTACK, audio={})
    expected = _gradients(stage(model, unit, recompute=recompute), INPUTS[unit])
    assert not host_copies
    for fetches_ahead in (False, True):
        module = stage(model, unit, recompute=recompute, parallel={unit: {"offload": offload}})
        for name, gradient in _gradients(module, INPUTS[unit], fetches_ahead).items():
            assert torch.equal(gradient, expected[name]), name
    assert bool(host_copies) == bool(recompute)


def test_every_activation_is_copied_once_and_no_weight(host_copies: list[Tensor]) -> None:
    model = settings(llm={"layers": 1})
    module = stage(model, "llm", (1, 2), recompute=(1,), parallel={"llm": {"offload": "all"}})
    randomize(module)
    context = module.context(text(*LENGTHS), {})
    hidden = torch.randn(sum(LENGTHS), 48, generator=torch.Generator().manual_seed(2)).requires_grad_()
    module.run(context, hidden, module.indices)
    weights = [weight for weight in module.parameters() if weight.dim() == 2]
    rotation = [*context.packing.rope] if context.packing.rope is not None else []
    assert weights
    assert rotation
    for left, right in ((a, b) for i, a in enumerate(host_copies) for b in [*host_copies[:i], *weights, *rotation]):
        assert left.numel() != right.numel() or not torch.equal(left.flatten(), right.flatten())
    load = TokenLoad(sum(LENGTHS), sum(n * n for n in LENGTHS), max(LENGTHS), len(LENGTHS))
    costs = AnalyticCosts(preset("h200-141g"), "fp32")
    held = HeldLayers(module.shape.layers[1:2], (True,), (True,), 1, 1, 1, load)
    copied_bytes = sum(copy.numel() * copy.element_size() for copy in host_copies)
    predicted_bytes = microbatch_host_bytes(held, costs, "fp32")
    assert 0.85 * predicted_bytes <= copied_bytes <= predicted_bytes


def test_blocks_that_run_in_pieces_copy_piece_by_piece(host_copies: list[Tensor]) -> None:
    expected: dict[str, Tensor] = {}
    for parallel in (None, {"llm": {"offload": "all"}}):
        module = stage(settings(), "llm", (1, 4), recompute=(1, 3) if parallel else (), parallel=parallel)
        randomize(module)
        context = module.context(text(*LENGTHS), {})
        hidden = torch.randn(sum(LENGTHS), 48, generator=torch.Generator().manual_seed(2)).requires_grad_()
        state = run_block_pieces(module, context, (hidden,), 1, range(3))
        (joined,) = run_block_pieces(module, context, state, 1, range(3, len(BLOCK_PIECES)))
        module.run(context, joined, range(2, 4)).sum().backward()
        found = gradients(module)
        expected = expected or found
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name])
    assert host_copies


LLM_7B: dict[str, Any] = {
    "layers": 6, "hidden": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "vocab": 256, "qkv_bias": True,
}  # fmt: skip
NUM_TOKENS = 4096


@pytest.mark.parametrize(("offload", "recomputes"), [("none", False), ("all", True), ("none", True), ("inputs", True)])
def test_the_device_holds_what_is_predicted(offload: str, recomputes: bool) -> None:
    """Blocks of a 7B model on torch's `meta` device, two microbatches at once; copies to the host do not count."""
    model = settings(vision=None, llm=LLM_7B)
    whole = shape_of(model, parallel={"llm": {"offload": offload}})
    blocks = range(1, 7)
    spec = StageSpec("llm", (1, 7), frozenset(blocks if recomputes else ()))
    with large_stages_on_meta():
        module = build_stage(model, whole, spec, ParallelGroups.single(), StageOptions(torch.bfloat16, META, seed=1))
        received = [
            torch.empty(NUM_TOKENS, 3584, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        ]
        counted = count(module, on_device(text(NUM_TOKENS), META), *received)
    costs = AnalyticCosts(preset("h200-141g"), "bf16")
    load = TokenLoad(NUM_TOKENS, NUM_TOKENS**2, NUM_TOKENS, 1)
    held = HeldLayers(whole.unit("llm").layers[1:7], (True,) * 6, (recomputes,) * 6, 1, 1, 2, load)
    predicted_peak = 2 * microbatch_activation_bytes(held, costs, "bf16") + stage_working_bytes(held, costs, "bf16")
    assert 1.0 <= predicted_peak / counted.peak <= 1.15
    predicted_host = 2 * microbatch_host_bytes(held, costs, "bf16")
    assert counted.host <= predicted_host <= 1.15 * counted.host
    assert bool(counted.host) == (offload != "none")
