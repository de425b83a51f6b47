"""Predicted activations and working memory of gated DeltaNets of Qwen3.5-9B's widths, against counts on `meta`."""

from typing import Any

import pytest
import torch

from mmtrain.costs import AnalyticCosts, HeldLayers, preset
from mmtrain.costs.rank_memory import microbatch_activation_bytes, stage_working_bytes
from mmtrain.models import build_stage as stage_builder
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_module import StageSpec
from tests.costs.counted_stages import count, large_stages_on_meta
from tests.costs.test_memory_of_large_models import TARGET_EVERY, llm_inputs
from tests.models.device_copies import META
from tests.models.factory import settings, shape_of

# One block has a gated DeltaNet, the other one attention with a gate.
QWEN3_5_9B: dict[str, Any] = {
    "layers": 2, "hidden": 4096, "ffn": 12288, "heads": 16, "kv_heads": 4, "head_dim": 256, "vocab": 248320,
    "qk_norm": True, "zero_centered_norms": True, "attention_gate": True, "full_attention_blocks": (1,),
    "delta_net": {"key_heads": 16, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128},
}  # fmt: skip


def predicted_over_counted(stage: tuple[int, int], recompute: bool) -> tuple[float, float]:
    """Return the ratios of saved bytes and of the peak."""
    model = settings(llm=QWEN3_5_9B)
    whole = shape_of(model)
    blocks = frozenset(range(*stage)) if recompute else frozenset[int]()
    options = stage_builder.StageOptions(torch.bfloat16, META, seed=1)
    inputs, load = llm_inputs(TARGET_EVERY)
    with large_stages_on_meta():
        module = stage_builder.build_stage(
            model, whole, StageSpec("llm", stage, blocks), ParallelGroups.single(), options
        )
        hidden = torch.empty(load.tokens, 4096, dtype=torch.bfloat16, device=META, requires_grad=True)
        counted = count(module, inputs, hidden)
    costs = AnalyticCosts(preset("h200-141g"), "bf16")
    layers = whole.unit("llm").layers[slice(*stage)]
    held = HeldLayers(layers, (True,) * len(layers), (recompute,) * len(layers), 1, 1, 1, load)
    saved = microbatch_activation_bytes(held, costs, "bf16")
    peak = saved + stage_working_bytes(held, costs, "bf16")
    return saved / counted.saved, peak / counted.peak


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [(1, 2), (2, 3)])
def test_a_block_holds_what_is_predicted(stage: tuple[int, int], recompute: bool) -> None:
    saved_ratio, peak_ratio = predicted_over_counted(stage, recompute)
    assert 1.0 <= saved_ratio <= 1.07
    assert 1.0 <= peak_ratio <= 1.06
