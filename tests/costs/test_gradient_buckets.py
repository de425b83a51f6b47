"""Buckets are as small as allowed, hold all layers, and none of them is without a gradient."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs.gradient_buckets import MIN_BUCKET_PARAMETERS, bucket_starts, reduced_parameters
from mmtrain.costs.layer_arithmetic import num_trained_parameters
from mmtrain.models.shapes.model_shape import build_model_shape
from tests.flow.cases import recipe


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12))
def test_buckets_are_the_smallest_from_the_last_layer_on(trained: list[int], smallest: int) -> None:
    starts = bucket_starts(trained, num_replicas=2, min_parameters=smallest)
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    buckets = [trained[lo:hi] for lo, hi in pairwise([*starts, len(trained)])]
    assert len(buckets) == 1 or all(any(bucket) for bucket in buckets)
    for bucket in buckets[1:]:  # the first one holds what is left
        assert sum(bucket) >= smallest > sum(bucket[1:])
    left = buckets[0]
    if len(left) > 1 and sum(left[1:]) >= smallest:
        assert not left[0], "only layers without gradients are left to the last bucket"
        assert not any(left[: next(i for i in range(len(left) + 1) if sum(left[i:]) < smallest) - 1])


def test_the_smallest_bucket_grows_with_the_replicas() -> None:
    layers = [MIN_BUCKET_PARAMETERS] * 4
    assert bucket_starts(layers, 2) == bucket_starts(layers, 40) == (0, 1, 2, 3)
    assert bucket_starts(layers, 41) == (0, 2)
    assert bucket_starts([1000] * 4, 2) == (0,)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_matrix_is_reduced_with_the_embedding_alone_where_one_rank_holds_both(pp: int) -> None:
    shape = build_model_shape(recipe(model__llm__tie_embeddings=True))
    layers = shape.unit("llm").layers
    *others, head = reduced_parameters(shape, "llm", 1, pp)
    assert others == [num_trained_parameters(layer) for layer in layers[:-1]]
    matrix = layers[0].vocab * layers[0].hidden
    assert head == num_trained_parameters(layers[-1]) - (matrix if pp == 1 else 0)
    assert head > 0


def test_a_frozen_tied_matrix_leaves_the_head_its_norm() -> None:
    shape = build_model_shape(recipe(model__llm__tie_embeddings=True, train__freeze=("llm.layers.0.*",)))
    assert reduced_parameters(shape, "llm", 1, 1)[-1] == shape.unit("llm").layers[-1].hidden
