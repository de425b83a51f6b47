"""Predicted activations and working memory of mixtures of Qwen3-30B-A3B's widths, against what is counted on `meta`.

Of a group of ranks that hold experts together, the one is counted whose experts have most rows, as predicted.
"""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, preset
from mmtrain.costs.expert_spread import arriving_rows, fullest_rank_load
from mmtrain.costs.rank_memory import microbatch_activation_bytes, stage_working_bytes
from mmtrain.models import build_stage as stage_builder
from mmtrain.models.kernels import grouped_gemm
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.megatron.experts import ExpertMlp, RowCounts
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.models.stage.stage_module import StageSpec
from tests.costs.counted_stages import count, large_stages_on_meta
from tests.costs.test_memory_of_large_models import TARGET_EVERY, llm_inputs
from tests.distributed import fork_ranks
from tests.models.device_copies import META
from tests.models.factory import settings, shape_of

QWEN3_30B: dict[str, Any] = {
    "layers": 2, "hidden": 2048, "ffn": 6144, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936,
    "qk_norm": True, "moe": {"experts": 128, "top_k": 8, "ffn": 768},
}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ep", [1, 8])
def test_a_mixture_holds_what_is_predicted(ep: int, recompute: bool) -> None:
    [(saved_ratio, peak_ratio)] = fork_ranks(1, predicted_over_counted, ep, recompute)
    assert 1.0 <= saved_ratio <= 1.01
    assert 1.0 <= peak_ratio <= 1.1


def predicted_over_counted(rank: int, world_size: int, folder: Path, ep: int, recompute: bool) -> tuple[float, float]:
    """Return the ratios of saved bytes and of the peak in a process that stands for one of eight ranks."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    model = settings(vision=None, llm=QWEN3_30B)
    whole = shape_of(model, parallel={"llm": {"ep": ep, "expert_spread": 0.5}})
    blocks = frozenset({1, 2}) if recompute else frozenset[int]()
    options = stage_builder.StageOptions(torch.bfloat16, META, seed=1)
    single, everyone = dist.new_group([0]), dist.group.WORLD
    groups = ParallelGroups(single, everyone, single, ep=everyone if ep > 1 else None)
    inputs, load = llm_inputs(TARGET_EVERY)
    mixture = whole.unit("llm").layers[1].mlp
    assert isinstance(mixture, MoeMlp)
    with (
        large_stages_on_meta(),
        patch.object(ExpertMlp, "_count_rows", lambda *_: counts_of_the_fullest(mixture, load)),
        patch.object(grouped_gemm, "grouped_gemm_problem", lambda *_: None),  # as on CUDA
    ):
        module = stage_builder.build_stage(model, whole, StageSpec("llm", (0, 4), blocks), groups, options)
        counted = count(module, inputs, None)
    costs = AnalyticCosts(preset("h200-141g"), "bf16")
    layers = whole.unit("llm").layers
    input_grad, recomputed = tuple(i > 0 for i in range(4)), tuple(i in blocks for i in range(4))
    held = HeldLayers(layers, input_grad, recomputed, 1, ep, 1, load)
    saved = microbatch_activation_bytes(held, costs, "bf16")
    peak = saved + stage_working_bytes(held, costs, "bf16")
    return saved / counted.saved, peak / counted.peak


def counts_of_the_fullest(mixture: MoeMlp, load: TokenLoad) -> RowCounts:
    """Return rows by rank and expert, of which the first rank's experts have as many as the fullest rank should."""
    ep, rows = mixture.ep, load.tokens * mixture.top_k
    of_first = math.floor(rows * fullest_rank_load(mixture) / ep)
    counts = torch.zeros(ep, mixture.experts, dtype=torch.int64)
    counts[:, 0], counts[:, -1] = of_first, rows - of_first
    of_ranks = torch.zeros(ep, ep, mixture.top_k + 1, dtype=torch.int64)
    if ep == 1:
        of_ranks[:, :, -1] = load.tokens
    else:  # rows have one or two copies each
        arriving = math.floor(load.tokens * arriving_rows(mixture) / ep)
        of_ranks[:, :, 1], of_ranks[:, :, 2] = 2 * arriving - of_first, of_first - arriving
    sent = int(of_ranks[0].sum())
    of_tokens = torch.zeros(ep, ep + 1, dtype=torch.int64)
    most = -(-sent // load.tokens)
    of_tokens[:, most] = sent - (most - 1) * load.tokens
    of_tokens[:, most - 1] = load.tokens - of_tokens[0, most]
    return RowCounts(counts, of_ranks, of_tokens)
