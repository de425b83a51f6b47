"""In a step no stage copies between host and device, and none reads a number of the device: each would stop the GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.balance.batch_meta import BatchMeta, ItemTable
from mmtrain.models import build_stage as stage_builder
from mmtrain.models.attention import AttentionBackend
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.llm_layers import TextContext
from mmtrain.models.stage.stage_inputs import TextInput, UnitInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.program.ir.graph import ContextMethod, CutSequences, UnitMesh
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.runtime.execution.context_inputs import context_share
from mmtrain.runtime.execution.unit_inputs import map_tensors
from tests.models.device_copies import META, DeviceCopies
from tests.models.factory import (
    AUDIO,
    DEEPSTACK,
    GROWING,
    MERGED,
    PIXTRAL,
    POOLED,
    RESAMPLED,
    SCALED,
    STANDARDIZED,
    WINDOWED,
    clips,
    images,
    settings,
    shape_of,
    text,
)
from tests.models.generator.tiny import DIT, UNET

NUM_FEATURES = 4
MODELS: dict[str, tuple[str, ModelSettings]] = {
    "llm": ("llm", settings(llm={"qkv_bias": True, "head_dim": 16})),
    "llm, time, row and column": ("llm", settings(llm={"head_dim": 16, "rope_sections": (2, 3, 3)})),
    "llm, windows": (
        "llm",
        settings(llm={"head_dim": 16, "window": 8, "window_rope_base": 1e4, "full_attention_blocks": (1,)}),
    ),
    "llm, images": ("llm", settings(llm={"head_dim": 16, "window": 8, "image_attention": "bidirectional"})),
    "llm, images in windows": (
        "llm",
        settings(llm={"window": 8, "full_attention_blocks": (1,), "image_attention": "bidirectional_in_windows"}),
    ),
    "llm, gated DeltaNets": (
        "llm",
        settings(
            llm={
                "head_dim": 16,
                "full_attention_blocks": (1,),
                "delta_net": {
                    "key_heads": 2,
                    "value_heads": 4,
                    "key_head_dim": 8,
                    "value_head_dim": 12,
                },
            }
        ),
    ),
    "vision, class token and grid": ("vision", settings(vision=SCALED)),
    "vision, rows and columns": ("vision", settings(vision={"positions": "factorized"})),
    "vision, windows": ("vision", settings(vision=WINDOWED)),
    "vision, stretched positions": ("vision", settings(vision=DEEPSTACK)),
    "vision, pooled": ("vision", settings(vision=POOLED)),
    "vision, merged": ("vision", settings(vision=MERGED)),
    "vision, pixtral": ("vision", settings(vision=PIXTRAL)),
    "vision, standardized": ("vision", settings(vision=STANDARDIZED)),
    "llm, growing queries": ("llm", settings(llm=GROWING)),
    "vision, resampled": ("vision", settings(vision=RESAMPLED)),
    "llm, queries": ("llm", settings(generator=DIT)),
    "generator, transformer": ("generator", settings(generator=DIT)),
    "generator, U-Net": ("generator", settings(generator=UNET)),
    "audio": ("audio", settings(audio={})),
    "audio, chunks": ("audio", settings(audio={**AUDIO, "chunk": 8, "max_frames": 80})),
}


def attend_without_numbers(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Stand for FlashAttention, to which the device says where sequences end."""
    assert {(ends.device, ends.dtype) for ends in (cu_seqlens_q, cu_seqlens_k)} == {(META, torch.int32)}
    return q + (k.sum() + v.sum()) * 0


@pytest.mark.parametrize("attention", ["sdpa", "flash_attn"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if "U-Net" in case else []) for case in MODELS]
)
def test_a_step_neither_copies_nor_reads(
    case: str, attention: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmtrain.models.attention.fused.FusedKernel.load", lambda _: attend_without_numbers)
    monkeypatch.setattr(stage_builder, "choose_backend", lambda *_: attention)
    unit, model = MODELS[case]
    module = stage_on_meta(model, unit)
    first, second = (brought_inputs(module, inputs_of(case, seed)) for seed in (0, 1))
    run_step(module, first)  # fills tables that last for the run
    with DeviceCopies() as copies:
        run_step(module, second)
    assert copies.found == set()


@pytest.mark.parametrize("attention", ["sdpa", "flash_attn"])
@pytest.mark.parametrize(
    ("case", "method", "split"),
    [
        ("llm", "ulysses", "auto"),
        ("llm", "ulysses", "even"),
        ("llm", "ring", "auto"),
        ("llm", "ring", "even"),
        ("llm, time, row and column", "ring", "even"),
        ("llm, windows", "ulysses", "even"),
        ("llm, gated DeltaNets", "ulysses", "auto"),
        ("llm, gated DeltaNets", "ulysses", "even"),
        ("llm, images", "ulysses", "auto"),
        ("llm, images", "ulysses", "even"),
    ],
)
def test_ranks_that_share_sequences_neither_copy_nor_read(
    case: str, method: ContextMethod, split: CutSequences, attention: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmtrain.models.attention.fused.FusedKernel.load", lambda _: attend_without_numbers)
    monkeypatch.setattr(stage_builder, "choose_backend", lambda *_: attention)
    exchange_without_numbers(monkeypatch)
    unit, model = MODELS[case]
    module = stage_on_meta(model, unit, cp_group=TwoRanks())
    first, second = (brought_inputs(module, share_of(inputs_of(case, seed), method, split)) for seed in (0, 1))
    run_step(module, first)
    with DeviceCopies() as copies:
        run_step(module, second)
    assert copies.found == set()


@pytest.mark.parametrize("case", ["vision, class token and grid", "audio", "generator, transformer"])
def test_a_microbatch_without_items_neither_copies_nor_reads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has one in each step that has fewer images than there are ranks."""
    monkeypatch.setattr("mmtrain.models.attention.fused.FusedKernel.load", lambda _: attend_without_numbers)
    monkeypatch.setattr(stage_builder, "choose_backend", lambda *_: "flash_attn")
    unit, model = MODELS[case]
    module = stage_on_meta(model, unit)
    nothing = brought_inputs(module, without_items(inputs_of(case, seed=0)))
    run_step(module, nothing)
    with DeviceCopies() as copies:
        run_step(module, nothing)
    assert copies.found == set()


@pytest.mark.parametrize("case", [case for case, (unit, _) in MODELS.items() if unit != "generator"])
def test_a_stage_of_one_layer_gets_what_it_needs(case: str) -> None:
    """Stages without blocks rotate nothing, and those without the first layer have no positions to look up."""
    unit, model = MODELS[case]
    inputs = inputs_of(case, seed=0)
    hidden = None
    for layer in range(len(shape_of(model).unit(unit).layers)):
        module = stage_on_meta(model, unit, (layer, layer + 1))
        with torch.no_grad():
            hidden = module(hidden, brought_inputs(module, inputs))
    assert hidden is not None


class TwoRanks:
    """Stands for the group of two ranks that share sequences."""

    def size(self) -> int:
        return 2


def exchange_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let collectives and messages do nothing but check that they are asked to move what lies on the device."""

    def all_to_all(
        received: Tensor, rows: Tensor, num_received: list[int], num_sent: list[int], group: TwoRanks
    ) -> None:
        assert rows.device == received.device == META
        assert (len(rows), len(received)) == (sum(num_sent), sum(num_received))

    def start(messages: list[Tensor]) -> list[dist.Work]:
        assert {rows.device for rows in messages} == {META}
        return []

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "P2POp", lambda operation, rows, **_: rows)
    monkeypatch.setattr(dist, "batch_isend_irecv", start)


def share_of(text: UnitInput, method: ContextMethod, split: CutSequences) -> TextInput:
    """Return what the first of two ranks computes of a microbatch, whose features are one image of the first sample."""
    assert isinstance(text, TextInput)
    mesh = UnitMesh("llm", 1, 1, 1, (0, 1), 1, cp=2, cp_method=method, cp_split=split)
    num_sequences = len(text.lengths)
    zeros = np.zeros(num_sequences, dtype=np.int64)
    tokens = np.array(text.lengths, dtype=np.int64)
    one, num_features = zeros[:1], zeros[:1] + NUM_FEATURES
    image = ItemTable(one, one, num_features, num_features, num_features, num_features, one, one)
    meta = BatchMeta(0, 0, np.arange(num_sequences), tokens, tokens, zeros, zeros, {"vision": image})
    return context_share(text, mesh, meta, 0, 0)


def stage_on_meta(
    model: ModelSettings, unit: str, layers: tuple[int, int] | None = None, cp_group: Any = None
) -> StageModule:
    whole = shape_of(model)
    groups = replace(ParallelGroups.single(), cp=cp_group)
    spec = StageSpec(unit, layers or (0, len(whole.unit(unit).layers)), recompute=frozenset({2}))
    options = StageOptions(torch.bfloat16, META, seed=1, attention="sdpa")
    return build_stage(model, whole, spec, groups, options)


def brought_inputs(module: StageModule, inputs: UnitInput) -> UnitInput:
    """Bring to the device what a run's arena brings: a microbatch, with the index tables that the stage asks for."""
    tables = {name: torch.from_numpy(table) for name, table in module.host_tables(inputs).items()}
    return map_tensors(replace(inputs, tables=tables), lambda tensor: tensor.to(META))


def inputs_of(case: str, seed: int) -> UnitInput:
    """Return a ragged microbatch; another seed has other lengths."""
    if case.startswith("vision"):
        return images((8, 8), (4, 6 - 2 * seed), (4, 4), (4, 4))
    if case.startswith("audio"):
        return clips(16, 8 + 4 * seed, 16)
    if case.startswith("generator"):
        return drawings((8, 8), (4, 12 - 4 * seed), (8, 8), patch_features=4 if "U-Net" in case else 16)
    made = text(66, 20 + seed, 20 + seed, places=range(NUM_FEATURES))
    assert made.labels is not None
    targets = (made.labels != -100).nonzero().flatten()
    position_ids = None
    if "column" in case:
        position_ids = torch.arange(sum(made.lengths)).expand(3, -1).contiguous()
    spans = ((2, 12), (70, 74)) if "images" in case else ()
    queries = torch.arange(10, 10 + DIT["context_tokens"]) if "queries" in case else None
    given: dict[str, Any] = {
        "target_positions": targets,
        "position_ids": position_ids,
        "image_spans": spans,
        "query_positions": queries,
    }
    return TextInput(made.lengths, made.ids, made.labels, made.feature_positions, **given)


def drawings(*sizes: tuple[int, int], patch_features: int) -> GeneratorInput:
    """Make images of (rows, cols) cells to denoise, of which the last shall be drawn without its context."""
    rows, cols = zip(*sizes, strict=True)
    cells = torch.randn(sum(r * c for r, c in sizes), patch_features)
    kept = torch.ones(len(sizes))
    kept[-1] = 0
    timesteps = torch.arange(len(sizes))
    return GeneratorInput(rows, cols, cells, timesteps, torch.zeros_like(cells), torch.ones(len(cells)), kept)


def without_items(inputs: UnitInput) -> UnitInput:
    """Return a microbatch of the same unit without any item."""
    assert not isinstance(inputs, TextInput)
    by_item = ("timesteps", "kept_contexts", "cells", "targets", "counted")
    tensors = {name: getattr(inputs, name, None) for name in by_item}
    return replace(inputs, rows=(), cols=(), **{name: t[:0] for name, t in tensors.items() if t is not None})


def run_step(module: StageModule, inputs: UnitInput) -> None:
    """Run forward and backward."""
    features: dict[str, Tensor] = {}
    if isinstance(inputs, TextInput):
        num_rows = NUM_FEATURES
        if inputs.context is not None:  # of a sequence that is cut: each rank gets some, and passes on what it must
            num_rows = sum(inputs.context.features["vision"].num_sent)
        rows = torch.randn(num_rows, 48, device=META, dtype=torch.bfloat16, requires_grad=True)
        features = {"vision": rows}
    if isinstance(inputs, GeneratorInput):
        rows = torch.randn(len(inputs.rows) * DIT["context_tokens"], 48, device=META, dtype=torch.bfloat16)
        features = {"llm": rows.requires_grad_()}
    context = module.context(inputs, features)
    if module.feeds_generator:
        assert isinstance(context, TextContext)
        outputs = module.run_to_queries(context, None, module.indices)
    else:
        outputs = (module.run(context, None, module.indices),)
    torch.autograd.backward([out.float().sum() for out in outputs])
