"""What reducing gradients in fp32 and in bf16 takes, counted by hand."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts, preset
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.framework import Execution
from mmtrain.costs.gradient_reduction import GradientReduction
from mmtrain.costs.hardware import Link
from mmtrain.costs.layer_arithmetic import num_trained_parameters
from mmtrain.costs.sharded_layers import ShardedLayers
from tests.models.factory import settings, shape_of

COUNT = 8_000_000
FREE_START = replace(preset("h100-80g"), kernel_launch_s=0.0, collective_start_s=0.0)
COSTS = AnalyticCosts(FREE_START, "bf16")
FP32, BF16 = GradientReduction(COSTS), GradientReduction(COSTS, "bf16")


def test_in_fp32_it_is_one_reduce_scatter() -> None:
    group = GroupLayout(8, nodes=2)
    assert FP32.nbytes(COUNT) == 4 * COUNT
    assert FP32.seconds(COUNT, group) == COSTS.collective("reduce_scatter", 4 * COUNT, group)
    assert FP32.rounding_seconds(COUNT, group) == FP32.adding_seconds(COUNT, group) == 0.0


@pytest.mark.parametrize(("ranks_on_node", "times"), [(1, 0.5), (2, 1.0), (8, 4.0)])
def test_an_all_to_all_sends_half_the_bytes_through_a_port_where_a_node_has_one_replica(
    ranks_on_node: int, times: float
) -> None:
    """A ring enters a node once, whatever ranks it has, and its bytes are shared out over the ports of them."""
    links = replace(FREE_START, inter_node=Link(1e9, 0.0, 0.0), intra_node=Link(1e15, 0.0, 0.0), ports_per_rank=1.0)
    costs = AnalyticCosts(links, "bf16")
    group = GroupLayout(64 * ranks_on_node, nodes=64)
    in_fp32, in_bf16 = (GradientReduction(costs, dtype).seconds(COUNT, group) for dtype in ("fp32", "bf16"))
    assert in_bf16 / in_fp32 == pytest.approx(times, rel=0.02)


def test_a_rank_moves_what_it_rounds_and_adds_up() -> None:
    """Rounding reads 4 bytes and writes 2. Of four shards, a sum is written, read and written 3 times, and moved."""
    group = GroupLayout(4)
    bytes_per_s = FREE_START.moved_bytes_per_s
    assert BF16.rounding_seconds(COUNT, group) * bytes_per_s == pytest.approx(6 * COUNT)
    moved = (2 + 4) + 3 * (2 + 4 + 4) + (4 + 4)
    assert BF16.adding_seconds(COUNT, group) * bytes_per_s == pytest.approx(moved * COUNT / 4)
    assert BF16.rounding_seconds(0, group) == BF16.adding_seconds(COUNT, GroupLayout(1)) == 0.0


def test_other_frameworks_add_up_in_bf16_on_the_way() -> None:
    group = GroupLayout(8, nodes=8)
    costs = replace(COSTS, execution=Execution(sums_on_the_way=True))
    reduction = GradientReduction(costs, "bf16")
    assert reduction.seconds(COUNT, group) == COSTS.collective("reduce_scatter", 2 * COUNT, group)
    assert reduction.rounding_seconds(COUNT, group) == reduction.adding_seconds(COUNT, group) == 0.0


def test_copies_of_sharded_layers_add_up_in_fp32() -> None:
    block = shape_of(settings()).unit("llm").layers[1]
    in_fp32, in_bf16 = (ShardedLayers(COSTS, 8, 4, 2, 8, grad_reduce=dtype) for dtype in ("fp32", "bf16"))
    between = [
        prices.reduce_seconds(block, True) - prices.reduce_seconds(block, False) for prices in (in_fp32, in_bf16)
    ]
    assert between[0] == pytest.approx(between[1])
    count, copy = num_trained_parameters(block, 1), GroupLayout(4)
    assert in_bf16.reduce_seconds(block, False) == BF16.seconds(count, copy)
    copies_s = BF16.rounding_seconds(count, copy) + BF16.adding_seconds(count, copy)
    assert in_bf16.rounded_copies_seconds(block) == copies_s > in_fp32.rounded_copies_seconds(block) == 0.0
