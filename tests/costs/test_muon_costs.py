"""What Muon takes beside AdamW: state, memory of an update, and seconds."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmtrain.costs import AnalyticCosts, preset, state_bytes
from mmtrain.costs.muon_costs import (
    NEWTON_SCHULZ_STEPS,
    MuonGroup,
    num_muon_parameters,
    orthogonalization_seconds,
    update_bytes,
)
from mmtrain.costs.rank_memory import layer_state
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim import orthogonal_update
from mmtrain.models.optim.clip_factors import ClipFactors
from mmtrain.models.optim.matrix_exchange import DividedWeight
from mmtrain.models.optim.muon import Muon, MuonWeight
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.shapes.weight_matrices import WeightMatrices, weight_matrices
from tests.distributed import run_ranks
from tests.models.factory import settings, shape_of
from tests.models.live_tensors import LiveTensors

COSTS = AnalyticCosts(preset("h100-80g"), "bf16")
MOE: dict[str, Any] = {"moe": {"experts": 4, "top_k": 2, "ffn": 16, "dense_blocks": (0,), "shared_ffn": 20}}
DENSE_WEIGHTS = (48 + 24 + 24) * 48 + 48 * 48 + 3 * 80 * 48  # of a block: qkv, projection, gate, up and down
EXPERT_WEIGHTS, SHARED_WEIGHTS = 3 * 16 * 48, 3 * 20 * 48
ATTENTION_WEIGHTS = DENSE_WEIGHTS - 3 * 80 * 48


def test_the_iterations_that_are_priced_are_those_that_run() -> None:
    assert NEWTON_SCHULZ_STEPS == orthogonal_update.NEWTON_SCHULZ_STEPS


def test_parameters_are_counted_by_hand() -> None:
    layers = shape_of(settings(llm=MOE), parallel={"placement": "replicated", "llm": {"ep": 2}}).unit("llm").layers
    assert [num_muon_parameters(layers[i], 1) for i in (0, 1, 4)] == [(0, 0), (DENSE_WEIGHTS, 0), (0, 0)]
    of_mixture = (ATTENTION_WEIGHTS + SHARED_WEIGHTS) // 2, 4 * EXPERT_WEIGHTS // (2 * 2)
    assert num_muon_parameters(layers[2], 2) == of_mixture
    frozen = shape_of(settings(), freeze=("llm.*.linear_qkv.weight",)).unit("llm").layers[1]
    assert num_muon_parameters(frozen, 1) == (DENSE_WEIGHTS - 96 * 48, 0)


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 4), ("bf16", 4)])
def test_muon_keeps_one_moment_of_a_linear(precision: Any, num_bytes: int) -> None:
    block, head = shape_of(settings()).unit("llm").layers[1:3], shape_of(settings()).unit("llm").layers[-1]
    adam, muon = state_bytes(precision), state_bytes(precision, kind="muon")
    for dp in (1, 4):
        saved = layer_state(block[0], 1, dp, adam)[2] - layer_state(block[0], 1, dp, muon)[2]
        assert saved == DENSE_WEIGHTS * num_bytes / dp
        assert layer_state(head, 1, dp, adam) == layer_state(head, 1, dp, muon)


def test_seconds_are_those_of_the_products_shared_by_all_ranks_that_hold_a_weight() -> None:
    """On one rank nothing travels; iterations are 4 m^2 n + 2 m^3 FLOPs of a matrix (m, n), m <= n."""
    block = shape_of(settings(llm={"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192})).unit("llm").layers[1]
    flops = 0
    for weight in weight_matrices(block).values():
        for rows, columns in weight.shapes:
            m, n = min(rows, columns), max(rows, columns)
            flops += NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)
    alone_s = MuonGroup(1, 1, 1, 8).seconds(block, COSTS, "bf16")
    peak = preset("h100-80g").peak_flops("bf16")
    assert 0.4 < flops / (alone_s * peak) < 1
    shared_s = MuonGroup(2, 4, 1, 8).seconds(block, COSTS, "bf16")
    assert alone_s / 8 < shared_s < alone_s
    far_s = MuonGroup(2, 4, 1, 2).seconds(block, COSTS, "bf16")
    assert far_s > shared_s


def test_experts_are_shared_by_the_replicas_that_hold_them() -> None:
    wide = {"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 4096, "moe": {**MOE["moe"], "ffn": 1024}}
    layers = shape_of(settings(llm=wide), parallel={"placement": "replicated", "llm": {"ep": 2}}).unit("llm").layers
    whole_s, halved_s = (MuonGroup(1, dp, 2, 8).seconds(layers[2], COSTS, "bf16") for dp in (2, 4))
    assert halved_s < whole_s
    expert = weight_matrices(layers[2])["mlp.experts.0.linear_fc1"]
    products = COSTS.product(1024, 1024, 2048) + COSTS.product(1024, 1024, 1024) + COSTS.product(1024, 2048, 1024)
    assert orthogonalization_seconds(expert, COSTS) == pytest.approx(2 * NEWTON_SCHULZ_STEPS * products)


def peak_of_update(rows: tuple[int, ...], columns: int, dtype: torch.dtype, tp: int, num_replicas: int) -> float:
    """Return the bytes at the peak of an update of as many weights as there are ranks, per number of a weight."""
    groups = [ParallelGroups.single().dp] * 2
    if tp * num_replicas > 1:
        replica, place = divmod(dist.get_rank(), tp)
        of_places = [dist.new_group(list(range(first, tp * num_replicas, tp))) for first in range(tp)]
        of_replicas = [dist.new_group(list(range(tp * number, tp * (number + 1)))) for number in range(num_replicas)]
        groups = [of_places[place], of_replicas[replica]]
    size = sum(rows) * columns
    borders = [size // tp * number // num_replicas for number in range(num_replicas + 1)]
    weights = []
    for number in range(tp * num_replicas):
        spec = ParamSpec(f"llm.layers.1.{number}.weight", (sum(rows), columns), 0)
        master = nn.Parameter(torch.randn(size // (tp * num_replicas), generator=torch.Generator().manual_seed(number)))
        master.grad = torch.ones_like(master)
        divided = DividedWeight(spec, tuple(pairwise(borders)))
        weights.append(MuonWeight(divided, WeightMatrices(columns, rows), master, torch.zeros_like(master), 1.0, 0.1))
    muon = Muon(weights, groups[0], groups[1], 0.95, dtype, torch.device("cpu"))
    live = LiveTensors(on_host=True)
    for weight in weights:
        assert weight.master is not None
        assert weight.master.grad is not None
        assert weight.momentum is not None
        live.ignore([weight.master, weight.master.grad, weight.momentum])
    with live:
        muon.step(0.1, ClipFactors(torch.tensor(2.0), torch.zeros(())))
    return live.peak / size


def least_peak_of_updates(rows: tuple[int, ...], columns: int, dtype: torch.dtype, tp: int, num_replicas: int) -> float:
    """Return the least peak of three updates, which is the same on all ranks.

    A thread of gloo frees what it has sent, and on a busy machine it comes too late in some of them.
    """
    return min(peak_of_update(rows, columns, dtype, tp, num_replicas) for _ in range(3))


@pytest.mark.parametrize(("rows", "columns"), [((256,), 256), ((256, 256), 256), ((128,), 512), ((512,), 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_needs_as_much_memory_as_is_counted(rows: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
    counted = update_bytes(1, "bf16" if dtype == torch.bfloat16 else "fp32")
    assert 0.65 * counted < peak_of_update(rows, columns, dtype, 1, 1) <= 1.001 * counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_share_weights_need_no_more_memory_than_is_counted(dtype: torch.dtype) -> None:
    counted = update_bytes(1, "bf16" if dtype == torch.bfloat16 else "fp32")
    peaks = run_ranks(4, least_peak_of_updates, (128, 128), 256, dtype, 2, 2)
    assert 0.95 * counted < min(peaks) <= 1.001 * counted
