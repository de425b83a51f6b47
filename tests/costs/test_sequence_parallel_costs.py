"""Seconds that sequence parallelism adds, against counts of what a block and its neighbors exchange and move."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs import AnalyticCosts, GroupLayout, TokenLoad, preset
from mmtrain.costs.context_parallel_costs import sequence_parallel_seconds
from mmtrain.costs.hardware import Hardware, Link
from mmtrain.models.shapes.layer_shape import Attention, DenseMlp
from mmtrain.models.shapes.model_shape import LayerShape

BLOCK = LayerShape("decoder_block", hidden=64, out=64, mixer=Attention(4, 4, 16), mlp=DenseMlp(128))
HEAD = LayerShape("head", hidden=64, out=512, vocab=512)
EMBEDDING = LayerShape("embedding", hidden=64, out=64, vocab=512)
PROJECTOR = LayerShape("projector", hidden=64, out=32, mlp=DenseMlp(32))
LOAD = TokenLoad(100, 100, 1, 100)
NBYTES = 100 * 64 * 2


@dataclass(frozen=True)
class FixedCollectives(AnalyticCosts):
    """Each kind of collective takes a fixed time, whatever it moves."""

    def collective(self, kind: str, nbytes: int, group: GroupLayout) -> float:
        assert (nbytes, group.nodes) == (NBYTES, 1)
        return {"all_gather": 1.0, "reduce_scatter": 10.0, "all_reduce": 100.0}[kind]


def machine(memory_bytes_per_s: float = 1e30, link: Link | None = None) -> Hardware:
    """Return an H100 that hides no collective, and whose element-wise kernels reach the memory's full rate."""
    hardware = replace(preset("h100-80g"), memory_bytes_per_s=memory_bytes_per_s, memory_efficiency=1.0)
    hardware = replace(hardware, overlap_slowdown=1.0, group_rates=())
    return replace(hardware, intra_node=link, collective_start_s=0.0) if link else hardware


def added(layer: LayerShape, on: Hardware, tp: int = 2, input_grad: bool = True, fixed: bool = True) -> float:
    costs = (FixedCollectives if fixed else AnalyticCosts)(on, "bf16")
    return sequence_parallel_seconds(layer, tp, LOAD, costs, on, "bf16", input_grad=input_grad)


@pytest.mark.parametrize(
    ("layer", "input_grad", "exchanged"),
    [
        (BLOCK, True, 4 * (10 + 1 - 100) + 2),  # two reductions each way, and both GEMMs' inputs once more
        (HEAD, True, 1 + 1 + (10 - 100)),
        (EMBEDDING, True, 1),
        (PROJECTOR, True, 1),
    ],
)
def test_exchanges_are_counted(layer: LayerShape, input_grad: bool, exchanged: float) -> None:
    assert added(layer, machine(), input_grad=input_grad) == pytest.approx(exchanged)


def test_a_block_without_backward_exchanges_only_in_forward() -> None:
    frozen = replace(BLOCK, trainable=False)
    assert added(frozen, machine(), input_grad=False) == pytest.approx(2 * (10 + 1 - 100))
    assert added(frozen, machine(), input_grad=True) == pytest.approx(4 * (10 + 1 - 100))
    assert added(replace(EMBEDDING, trainable=False), machine(), input_grad=False) == 0


def test_in_backward_only_what_runs_beside_gemms_of_gradients_is_hidden() -> None:
    """As in `tp_linear`: two reductions beside the weights' gradients, two gathers beside those of the inputs."""
    hiding = replace(machine(), overlap_slowdown=0.0, bf16_flops=1e-3)  # GEMMs that hide any collective
    assert added(BLOCK, hiding) == pytest.approx(2 * (10 + 1 - 100) + 2 * 1)
    frozen = replace(BLOCK, trainable=False)  # without gradients of weights nothing runs beside
    assert added(frozen, hiding) == pytest.approx(4 * (10 + 1 - 100))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_norms_and_residuals_move_a_share_of_the_tokens(tp: int) -> None:
    free = Link(1e30, 0.0, 0.0)
    whole = 3 * 10 * NBYTES  # forward, and twice as much in backward
    slow = machine(memory_bytes_per_s=1000.0, link=free)
    assert added(BLOCK, slow, tp, fixed=False) == pytest.approx(-whole / 1000 * (1 - 1 / tp))


@given(st.sampled_from([BLOCK, HEAD, EMBEDDING, PROJECTOR]), st.sampled_from([2, 4, 8]), st.booleans())
def test_rings_move_as_much_either_way(layer: LayerShape, tp: int, input_grad: bool) -> None:
    """With the costs of a ring, and without those of moving memory or of starting, additional gathers cost time."""
    on = machine(link=preset("h100-80g").intra_node)
    gather = AnalyticCosts(on, "bf16").collective("all_gather", NBYTES, GroupLayout(tp))
    times = added(layer, on, tp, input_grad, fixed=False) / gather
    assert times == pytest.approx({"decoder_block": 2, "head": 1, "embedding": 1, "projector": 1}[layer.kind])


def test_only_the_whole_head_leaves_out_tokens_without_target() -> None:
    """Its shards are of all tokens, so with few targets sequence parallelism costs the head more than it saves."""
    few = replace(LOAD, targets=10)
    on = machine()
    costs = AnalyticCosts(on, "bf16")
    gather, scatter = (costs.collective(kind, NBYTES, GroupLayout(2)) for kind in ("all_gather", "reduce_scatter"))
    reduce = costs.collective("all_reduce", NBYTES // 10, GroupLayout(2))
    seconds = sequence_parallel_seconds(HEAD, 2, few, costs, on, "bf16")
    assert seconds == pytest.approx(2 * gather + scatter - reduce)
