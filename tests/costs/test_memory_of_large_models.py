"""Predicted activations and working memory of models of real widths, against what autograd and operations hold.

The models are built on torch's `meta` device: shapes without numbers. Two blocks stand for all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, preset
from mmtrain.costs.rank_memory import (
    RankLayer,
    layer_working_bytes,
    microbatch_activation_bytes,
    stage_working_bytes,
)
from mmtrain.models import build_stage as stage_builder
from mmtrain.models.megatron import ParallelGroups, prepare_megatron
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.models.stage.stage_module import StageSpec
from scripts.bench_long_memory import ON_HOST, QWEN_7B, VARIANTS, LongSequence, Variant, count_on_meta
from tests.costs.counted_stages import count, large_stages_on_meta
from tests.models.device_copies import META, on_device
from tests.models.factory import CPU, settings, shape_of
from tests.models.live_tensors import LiveTensors

QWEN: dict[str, Any] = {"layers": 2, "qkv_bias": True, "rope_base": 1e6}
LLMS: dict[str, dict[str, Any]] = {
    "1.5B": QWEN | {"hidden": 1536, "ffn": 8960, "heads": 12, "kv_heads": 2, "vocab": 151936},
    "7B": QWEN | {"hidden": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "vocab": 152064},
}
VIT: dict[str, Any] = {
    "layers": 2, "hidden": 1280, "ffn": 5120, "heads": 16, "patch": 14, "max_side": 64,
}  # fmt: skip
SEQUENCES = (1280,) * 6 + (512,)  # of an LLM's microbatch
IMAGES = ((64, 64), (48, 64), (32, 32), (64, 40))  # patches
TARGET_EVERY = 8  # tokens


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with large_stages_on_meta():
        yield
    prepare_megatron(CPU)


def llm_inputs(target_every: int) -> tuple[TextInput, TokenLoad]:
    total = sum(SEQUENCES)
    labels = torch.full((total,), -100)
    labels[::target_every] = 0
    targets = (labels != -100).nonzero().flatten()
    inputs = TextInput(SEQUENCES, torch.zeros(total, dtype=torch.int64), labels, target_positions=targets)
    return on_device(inputs, META), replace(TokenLoad.of(np.array(SEQUENCES)), targets=len(targets))


def vision_inputs() -> tuple[EncoderInput, TokenLoad]:
    rows, cols = zip(*IMAGES, strict=True)
    patches = torch.empty(sum(r * c for r, c in IMAGES), 3 * 14 * 14, device=META)
    return EncoderInput(rows, cols, patches), TokenLoad.of(np.array([r * c for r, c in IMAGES]))


# unit, and the LLM's settings; layers of the stage; whether blocks are recomputed
CASES: dict[str, tuple[str, slice, bool]] = {
    "1.5B": ("llm", slice(0, 4), False),
    "1.5B, recomputed": ("llm", slice(0, 4), True),
    "1.5B, head": ("llm", slice(3, 4), False),
    "1.5B, head, all targets": ("llm", slice(3, 4), False),
    "1.5B, activation again": ("llm", slice(0, 4), False),
    "7B": ("llm", slice(0, 4), False),
    "7B, embedding": ("llm", slice(0, 1), False),
    "7B, recomputed": ("llm", slice(0, 4), True),
    "7B, head": ("llm", slice(3, 4), False),
    "ViT 0.6B": ("vision", slice(0, 4), False),
    "ViT 0.6B, activation again": ("vision", slice(0, 4), False),
    "ViT 0.6B, recomputed": ("vision", slice(0, 4), True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_large_stage_holds_what_is_predicted(case: str) -> None:
    """Never predict too little; of what autograd saves, at most a hundredth too much, of the peak at most 15%."""
    unit, span, recompute = CASES[case]
    model = settings(vision=VIT if unit == "vision" else None, llm=LLMS.get(case.split(",")[0]))
    again = {unit: {"recompute_activation_function": case.endswith("activation again")}}
    whole = shape_of(model, parallel=again)
    indices = range(len(whole.unit(unit).layers))[span]
    blocks = frozenset({1, 2}) if recompute else frozenset[int]()
    options = stage_builder.StageOptions(torch.bfloat16, META, seed=1)
    spec = StageSpec(unit, (span.start, span.stop), blocks)
    module = stage_builder.build_stage(model, whole, spec, ParallelGroups.single(), options)
    every = 1 if case.endswith("all targets") else TARGET_EVERY
    inputs, load = vision_inputs() if unit == "vision" else llm_inputs(every)
    layers = whole.unit(unit).layers[span]
    hidden = None
    if span.start > 0:
        hidden = torch.empty(load.tokens, layers[0].hidden, device=META, dtype=torch.bfloat16, requires_grad=True)
    counted = count(module, inputs, hidden)

    costs = AnalyticCosts(preset("h200-141g"), "bf16")
    held = HeldLayers(layers, tuple(i > 0 for i in indices), tuple(i in blocks for i in indices), 1, 1, 1, load)
    saved = microbatch_activation_bytes(held, costs, "bf16")
    assert 1.0 <= saved / counted.saved <= 1.01
    assert 1.0 <= (saved + stage_working_bytes(held, costs, "bf16")) / counted.peak <= 1.15


@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_a_block_without_backward_holds_what_is_predicted_for_its_forward(unit: str) -> None:
    """Two frozen blocks behind nothing that trains: what one of them holds while it is computed, with its input."""
    model = settings(vision=VIT if unit == "vision" else None, llm=LLMS["7B"])
    whole = shape_of(model)
    options = stage_builder.StageOptions(torch.bfloat16, META, seed=1)
    module = stage_builder.build_stage(model, whole, StageSpec(unit, (1, 3)), ParallelGroups.single(), options)
    inputs, load = vision_inputs() if unit == "vision" else llm_inputs(TARGET_EVERY)
    layer = whole.unit(unit).layers[1]
    hidden = torch.empty(load.tokens, layer.hidden, device=META, dtype=torch.bfloat16)
    live = LiveTensors()
    live.ignore([*module.parameters(), hidden])  # the second block has an input of its own
    with torch.no_grad():
        module.run(module.context(inputs, {}), hidden, module.indices)  # makes tables that last
        with live:
            module.run(module.context(inputs, {}), hidden, module.indices)
    held = RankLayer(replace(layer, trainable=False), 1, input_grad=False)
    predicted = layer_working_bytes(held, load, AnalyticCosts(preset("h200-141g"), "bf16"), "bf16")
    assert 1.0 <= round(predicted / live.peak, 4) <= 1.05  # lengths of sequences take some bytes


@pytest.mark.long
@pytest.mark.parametrize("variant", [*VARIANTS, *ON_HOST], ids=lambda variant: variant.name)
def test_a_long_sequence_holds_what_is_predicted(variant: Variant) -> None:
    """Of a whole model with a target at every token: what it keeps and what it needs at most are in [1.00, 1.15]."""
    run = LongSequence(QWEN_7B | {"layers": 12}, 128 * 1024, variant)
    predicted, counted = run.predicted("bf16"), count_on_meta(run)
    assert 1.0 <= predicted.saved / counted.saved <= 1.01
    assert 1.0 <= predicted.peak / counted.peak <= 1.15
    assert counted.host <= predicted.host <= 1.15 * counted.host
