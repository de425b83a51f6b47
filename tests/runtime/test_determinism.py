"""`train.deterministic` reaches torch and the kernels of attention."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.models.attention import AttentionOptions, SequenceLayout, attend
from mmtrain.runtime.execution.precision import CUBLAS_WORKSPACE_VARIABLE, set_determinism
from tests.waiting import MAX_WAIT_S


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CUBLAS_WORKSPACE_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(CUBLAS_WORKSPACE_VARIABLE)
    yield
    set_determinism(False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_that_can_choose_are_told(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        given.append(deterministic)
        return q

    monkeypatch.setattr("mmtrain.models.attention.fused.FusedKernel.load", lambda _: kernel)
    set_determinism(deterministic)
    x = torch.zeros(4, 2, 8)
    attend(x, x, x, SequenceLayout((4,)), AttentionOptions("flash_attn", causal=True))
    assert given == [deterministic]


def test_the_setting_holds_for_torch_and_leaves_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    set_determinism(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # else its attention would not be
    monkeypatch.setenv(CUBLAS_WORKSPACE_VARIABLE, ":16:8")
    set_determinism(True)

    assert os.environ[CUBLAS_WORKSPACE_VARIABLE] == ":16:8"
    set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rank_loads_neither_compilers_nor_trackers_that_it_does_not_use() -> None:
    program = (
        "import sys; from mmtrain.runtime.training import train; from mmtrain.runtime.execution import precision; "
        "precision.set_determinism(False); "
        "print({'torch._inductor', 'wandb', 'torch.utils.tensorboard'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_S, check=True)
    assert done.stdout == "set()\n", "every start of a rank would take a second longer"
