"""Predicted activations and working memory of gated DeltaNets of Qwen3.5-9B's widths, against counts on `meta`."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmtrain.balance import BatchMeta
from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, preset
from mmtrain.costs.rank_memory import microbatch_activation_bytes, stage_working_bytes
from mmtrain.models import build_stage as stage_builder
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.program import Microbatch, UnitMesh
from mmtrain.program.ir.context_loads import part_loads, split_microbatches
from mmtrain.runtime.execution.context_inputs import context_share
from tests.costs.counted_stages import count, large_stages_on_meta
from tests.costs.test_memory_of_large_models import TARGET_EVERY, llm_inputs
from tests.models.device_copies import META, on_device
from tests.models.factory import settings, shape_of
from tests.models.test_device_copies import TwoRanks, exchange_without_numbers

# One block has a gated DeltaNet, the other one attention with a gate.
QWEN3_5_9B: dict[str, Any] = {
    "layers": 2, "hidden": 4096, "ffn": 12288, "heads": 16, "kv_heads": 4, "head_dim": 256, "vocab": 248320,
    "qk_norm": True, "zero_centered_norms": True, "attention_gate": True, "full_attention_blocks": (1,),
    "delta_net": {"key_heads": 16, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128},
}  # fmt: skip


def predicted_over_counted(
    stage: tuple[int, int], recompute: bool, inputs: TextInput, load: TokenLoad, groups: ParallelGroups
) -> tuple[float, float]:
    """Return the ratios of saved bytes and of the peak."""
    model = settings(llm=QWEN3_5_9B)
    whole = shape_of(model)
    blocks = frozenset(range(*stage)) if recompute else frozenset[int]()
    options = stage_builder.StageOptions(torch.bfloat16, META, seed=1)
    with large_stages_on_meta():
        module = stage_builder.build_stage(model, whole, StageSpec("llm", stage, blocks), groups, options)
        hidden = torch.empty(load.tokens, 4096, dtype=torch.bfloat16, device=META, requires_grad=True)
        counted = count(module, inputs, hidden)
    costs = AnalyticCosts(preset("h200-141g"), "bf16")
    layers = whole.unit("llm").layers[slice(*stage)]
    held = HeldLayers(layers, (True,) * len(layers), (recompute,) * len(layers), 1, 1, 1, load)
    saved = microbatch_activation_bytes(held, costs, "bf16")
    peak = saved + stage_working_bytes(held, costs, "bf16")
    return saved / counted.saved, peak / counted.peak


def shared_inputs(lengths: tuple[int, ...]) -> tuple[TextInput, TokenLoad]:
    """Return what the first of two ranks computes of a microbatch."""
    tokens, zeros = np.array(lengths), np.zeros(len(lengths), dtype=np.int64)
    mesh = UnitMesh("llm", 1, 1, 1, (0, 1), 1, cp=2)
    meta = BatchMeta(0, 0, np.arange(len(tokens)), tokens, tokens, zeros, zeros, {})
    text = TextInput(lengths, torch.zeros(sum(lengths), dtype=torch.int64), torch.full((sum(lengths),), -100))
    load = part_loads(mesh, meta, split_microbatches(mesh, meta))[Microbatch("llm", 0, 0)]
    return on_device(context_share(text, mesh, meta, 0, 0), META), load


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [(1, 2), (2, 3)])
def test_a_block_holds_what_is_predicted(stage: tuple[int, int], recompute: bool) -> None:
    inputs, load = llm_inputs(TARGET_EVERY)
    saved_ratio, peak_ratio = predicted_over_counted(stage, recompute, inputs, load, ParallelGroups.single())
    assert 1.0 <= saved_ratio <= 1.07
    assert 1.0 <= peak_ratio <= 1.06


@pytest.mark.parametrize("lengths", [(16_384,), (16_384, 600, 1800, 1600, 2200)], ids=str)
def test_a_gated_delta_net_whose_ranks_share_sequences_holds_what_is_predicted(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest sample is cut; each rank has all of its tokens for some heads."""
    exchange_without_numbers(monkeypatch)
    inputs, load = shared_inputs(lengths)
    groups = replace(ParallelGroups.single(), cp=TwoRanks())
    saved_ratio, peak_ratio = predicted_over_counted((1, 2), False, inputs, load, groups)
    assert 0.999 <= saved_ratio <= 1.07
    assert 1.0 <= peak_ratio <= 1.08
