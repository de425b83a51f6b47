"""Copies of weights that are made while training goes on."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.execution import checkpointing
from mmtrain.runtime.execution.checkpointing import SnapshotCopy
from mmtrain.runtime.execution.optimizer import Optimizer
from tests.waiting import MAX_WAIT_S


class Unit:
    """The optimizer of a unit with one weight, which grows by one with each update."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)

    def grad_sq_sum(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.float64)

    def step(self, lr: float, clip: object) -> None:
        self.weight += 1

    def count_update(self) -> None:
        """Count nothing."""


def test_an_update_waits_until_the_weights_are_copied() -> None:
    unit = Unit()
    world = SimpleNamespace(size=1, device=torch.device("cpu"))
    optimizer = Optimizer(cast(Any, {"llm": unit}), OptimizerSettings(lr=1.0), cast(Any, world), None)
    copying = SnapshotCopy([unit.weight])
    optimizer.hold_update(copying.wait)
    update = threading.Thread(target=optimizer.step, args=(1.0,), daemon=True)
    update.start()
    copying.run()
    update.join(MAX_WAIT_S)
    assert copying.copies[0].tolist() == [0, 0, 0]
    assert unit.weight.tolist() == [1, 1, 1]
    optimizer.step(1.0)  # and none after it waits
    assert unit.weight.tolist() == [2, 2, 2]


def test_training_goes_on_after_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = SnapshotCopy([torch.ones(2)])
    monkeypatch.setattr(copying, "copies", [torch.ones(3)])
    with pytest.raises(RuntimeError):
        copying.run()
    copying.wait()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_gpu_is_what_it_held_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_STAGING_BYTES", 4096)
    live = [torch.full((size,), float(size), device="cuda") for size in (1, 5000, 77, 3000)]
    live.append(torch.full((30, 40), 2.0, device="cuda", dtype=torch.bfloat16))
    expected = [tensor.cpu() for tensor in live]
    copying = SnapshotCopy(live)
    thread = threading.Thread(target=copying.run)
    thread.start()
    copying.wait()
    for tensor in live:
        tensor.zero_()
    thread.join()
    for copy, held in zip(copying.copies, expected, strict=True):
        assert torch.equal(copy, held)
