"""The costs of a gated DeltaNet: parameters of its modules, products that torch counts, and how they grow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.costs import AnalyticCosts, TokenLoad, num_parameters, preset
from mmtrain.costs.block_arithmetic import mixer_arithmetic
from mmtrain.costs.delta_net_arithmetic import DeltaNetArithmetic
from mmtrain.costs.layer_fields import checked_layer_fields, layer_fields, shape_of_fields
from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.delta_rule import DeltaWeights, DeltaWidths, mix_and_keep_state, mix_samples
from mmtrain.models.shapes.layer_shape import DELTA_CHUNK_TOKENS, GatedDeltaNet, LayerShape
from tests.models.factory import settings, shape_of, stage

DELTA_NET = {"key_heads": 4, "value_heads": 8, "key_head_dim": 8, "value_head_dim": 12}
LLM = {"delta_net": DELTA_NET, "full_attention_blocks": (1,), "attention_gate": True, "qk_norm": True}


PRODUCTS = ("bmm", "linalg_solve_triangular")
MOVE_NOTHING = (
    "view", "_unsafe_view", "unsqueeze", "transpose", "permute", "slice", "split", "split_with_sizes", "expand",
    "alias", "detach", "_reshape_alias", "empty", "new_empty", "empty_like",
)  # fmt: skip


class CountedKernels(TorchDispatchMode):
    """Counts kernels, and the numbers that those which are no product read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.moved = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in MOVE_NOTHING:
            self.kernels += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.moved += sum(map(_num_stored, tensors)) if name not in PRODUCTS else 0
        return out


def _num_stored(tensor: Tensor) -> int:
    """Return the numbers of a tensor that lie in memory; expanded ones are read once."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number


@pytest.mark.parametrize("lengths", [(704, 320), (4096, 1024), (64,) * 20, (700, 300, 45)], ids=str)
@pytest.mark.parametrize(("heads", "widths"), [((2, 4), (128, 128)), ((4, 4), (64, 128)), ((2, 8), (96, 64))])
def test_kernels_and_what_they_move_are_those_that_torch_runs(
    lengths: tuple[int, ...], heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    """Backward grows with tokens, too: were it slices that it adds up, each step would move all chunks."""
    (key_heads, value_heads), (key, value) = heads, widths
    net = {"key_heads": key_heads, "value_heads": value_heads, "key_head_dim": key, "value_head_dim": value}
    arithmetic = mixer_arithmetic(shape_of(settings(llm={**LLM, "delta_net": net})).unit("llm").layers[1])
    assert isinstance(arithmetic, DeltaNetArithmetic)
    of_key_head = DeltaWidths(key, value, value_heads // key_heads, 1e-6)
    shapes = (key_heads, of_key_head.convolved, 4), *((key_heads, of_key_head.ratio),) * 2, (value,)
    weights = DeltaWeights(*(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes))
    x = torch.empty(sum(lengths), key_heads, of_key_head.inputs, device="meta", requires_grad=True)
    with CountedKernels() as forward:
        out = mix_samples(x, weights, of_key_head, SequenceLayout(lengths).sample_chunks(x.device))
    with CountedKernels() as backward:
        out.backward(torch.empty_like(out))  # type: ignore[no-untyped-call]
    load = _load(*lengths)
    assert arithmetic.moved_numbers(load, 1, "forward") == pytest.approx(forward.moved, rel=0.07)
    assert arithmetic.moved_numbers(load, 1, "backward") == pytest.approx(backward.moved, rel=0.07)
    assert arithmetic.num_kernels(load, 1, "forward") == pytest.approx(forward.kernels, rel=0.1)
    assert arithmetic.num_kernels(load, 1, "backward") == pytest.approx(backward.kernels, rel=0.1)


def _blocks() -> tuple[LayerShape, LayerShape]:
    """Return a block with a gated DeltaNet, and one with gated attention."""
    return shape_of(settings(llm=LLM)).unit("llm").layers[1:3]  # type: ignore[return-value]


def _load(*lengths: int) -> TokenLoad:
    return TokenLoad.of(torch.tensor(lengths).numpy())


def test_parameters_are_those_of_the_modules() -> None:
    module = stage(settings(llm=LLM), "llm", layers=(1, 3))
    for index, block in zip((1, 2), _blocks(), strict=True):
        assert num_parameters(block) == sum(param.numel() for param in module.layers[str(index)].parameters())


def test_products_are_those_that_torch_counts() -> None:
    """Of whole chunks. torch does not count solutions of triangular systems, which are half a product each."""
    block, _ = _blocks()
    mixer = block.mixer
    assert isinstance(mixer, GatedDeltaNet)
    widths = DeltaWidths(mixer.key_head_dim, mixer.value_head_dim, 2, 1e-6)
    tokens = 5 * DELTA_CHUNK_TOKENS
    lengths = (3 * DELTA_CHUNK_TOKENS, 2 * DELTA_CHUNK_TOKENS)
    weights = DeltaWeights(
        torch.zeros(4, widths.convolved, mixer.taps), torch.zeros(4, 2), torch.zeros(4, 2), torch.ones(12)
    )
    chunks = SequenceLayout(lengths).sample_chunks(torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        mix_and_keep_state(torch.zeros(tokens, 4, widths.inputs), weights, widths, chunks)
    solved = tokens * mixer.value_heads * DELTA_CHUNK_TOKENS * (mixer.key_head_dim + mixer.value_head_dim)
    assert mixer_arithmetic(block).flops(_load(*lengths), 1) == counter.get_total_flops() + solved


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_costs_are_linear_in_tokens(precision: str) -> None:
    block, attending = _blocks()
    costs = AnalyticCosts(preset("h100-80g"), precision)  # type: ignore[arg-type]
    short, long = _load(*[4096] * 8), _load(*[4096] * 32)
    joined = _load(4096 * 32)

    def bytes_of(load: TokenLoad) -> int:
        return costs.activation_bytes(block, 1, load, False, input_grad=True)

    assert bytes_of(long) == bytes_of(joined) == 4 * bytes_of(short)
    arithmetic = mixer_arithmetic(block)
    assert isinstance(arithmetic, DeltaNetArithmetic)
    assert arithmetic.flops(joined, 1) == arithmetic.flops(long, 1) == 4 * arithmetic.flops(short, 1)
    assert mixer_arithmetic(attending).flops(joined, 1) > 30 * mixer_arithmetic(attending).flops(long, 1)
    forward, backward = (arithmetic.rule_seconds(costs.hardware, long, 1, d) for d in ("forward", "backward"))
    assert 2.5 * forward < backward < 4 * forward
    assert arithmetic.rule_seconds(costs.hardware, long, 2, "forward") < forward


def test_a_cost_table_states_it() -> None:
    for block in _blocks():
        stated = layer_fields(block)
        assert checked_layer_fields(stated) == stated
        assert shape_of_fields(stated) == replace(block, trainable=True)
