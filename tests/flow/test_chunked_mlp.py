"""Recomputed blocks whose MLPs run in chunks of a few tokens compute what one process does."""

from typing import Any
from unittest.mock import patch

import pytest

from mmtrain.models.megatron import block_segments
from tests.flow.cases import Mesh, plan, recipe
from tests.flow.equality import assert_equals_one_process, train_steps

CHUNK_TOKENS = 7
ALL = (0, 1, 2, 3, 4)
# name -> (recipe changes, mesh of each unit)
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "tp2 with slices of tokens, pp2": (
        {},
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=ALL),
            "llm": Mesh((2,), (2, 3, 4, 5), tp=2, sp=True, recompute=ALL),
        },
    ),
    "shared sequences, inputs in host memory": (
        {"parallel__llm__offload": "inputs"},
        {"vision": Mesh((), (0,), recompute=ALL), "llm": Mesh((), (0, 1), cp=2, split="even", recompute=(1, 3))},
    ),
}


def train_in_small_chunks(*arguments: Any) -> Any:
    """Train as `train_steps` does."""
    with patch.object(block_segments, "MLP_CHUNK_TOKENS", CHUNK_TOKENS):
        return train_steps(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_chunks_of_recomputed_mlps_change_nothing(case: str) -> None:
    changes, meshes = CASES[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True, train=train_in_small_chunks)
