"""Pieces of tensors and their regions agree with plain numpy indexing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.checkpoint import Shard, ShardSpec


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    start, stop = (0, 0) if dim is None else sorted(draw(st.tuples(*[st.integers(0, shape[dim])] * 2)))
    spec = ShardSpec(shape, dim, start, stop)
    if draw(st.booleans()):
        lo, hi = sorted(draw(st.tuples(*[st.integers(0, spec.size)] * 2)))
        spec = ShardSpec(shape, dim, start, stop, (lo, hi))
    return spec


def piece_of(full: np.ndarray, spec: ShardSpec) -> np.ndarray:
    """Index the piece with numpy."""
    box = full if spec.dim is None else full.take(range(spec.start, spec.stop), axis=spec.dim)
    return box if spec.flat is None else box.reshape(-1)[spec.flat[0] : spec.flat[1]]


@given(specs())
def test_regions_are_the_flattened_piece_in_order(spec: ShardSpec) -> None:
    full = np.arange(int(np.prod(spec.full_shape))).reshape(spec.full_shape)
    expected = piece_of(full, spec)
    regions = spec.regions()
    rebuilt = [full[tuple(slice(lo, hi) for lo, hi in region.box)].reshape(-1) for region in regions]
    assert np.array_equal(np.concatenate([*rebuilt, np.empty(0, int)]), expected.reshape(-1))
    assert [region.offset for region in regions] == list(np.cumsum([0, *map(len, rebuilt)]))[:-1]
    assert len(regions) <= max(1, 2 * len(spec.full_shape) - 1)
    assert spec.shape == expected.shape


@given(specs())
def test_text_round_trip(spec: ShardSpec) -> None:
    assert ShardSpec.from_text(spec.to_text(), spec.full_shape) == spec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 6), 2, 0, 1), "dim 2 of a tensor of shape"),
        (((4, 6), 0, 2, 5), r"rows \[2, 5\) along dim 0"),
        (((4, 6), None, 0, 4), "without a dim"),
        (((4, 6), 0, 0, 2, (0, 13)), r"elements \(0, 13\)"),
    ],
)
def test_a_piece_outside_the_tensor_is_rejected(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardSpec(*arguments)


def test_a_tensor_of_another_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"w: tensor of shape \(3, 6\) for a piece of \(2, 6\)"):
        Shard("w", ShardSpec((4, 6), 0, 0, 2), torch.zeros(3, 6))


@pytest.mark.parametrize("text", ["", "rows", "0[1:2", "0[1:2]{3}", "-1[0:2]"])
def test_text_that_is_no_piece_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a piece"):
        ShardSpec.from_text(text, (4, 4))
