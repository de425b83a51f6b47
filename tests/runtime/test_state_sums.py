"""Sums over the bits of what ranks hold: any flipped bit changes one, and it is named."""

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.optim.held_state import MAX_JOINED_WORDS, BitSums, HeldTensor
from mmtrain.runtime.execution.state_sums import StateSums
from mmtrain.runtime.world import World
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def flip(tensor: Tensor, byte: int, bit: int = 0) -> None:
    tensor.view(-1).view(torch.uint8).numpy()[byte] ^= 1 << bit


def some_tensors() -> list[Tensor]:
    """Return tensors of every kind: of words and of odd bytes, small and large, and a view that no word starts at."""
    long = torch.randn(MAX_JOINED_WORDS["cpu"] * 2 + 2)
    return [torch.randn(()), torch.randn(7), torch.randn(3, 5).bfloat16(), torch.zeros(0), long, torch.randn(9)[1:]]


def test_each_flipped_bit_changes_the_sum_of_its_tensor_alone() -> None:
    torch.manual_seed(0)
    tensors = some_tensors()
    sums = BitSums(tensors, CPU)
    before = sums.compute()
    for number, tensor in enumerate(tensors):
        for byte in {0, tensor.nbytes // 2, tensor.nbytes - 1} if tensor.nbytes else ():
            for bit in range(8):
                flip(tensor, byte, bit)
                assert (sums.compute() != before).nonzero().flatten().tolist() == [number]
                flip(tensor, byte, bit)
    assert torch.equal(sums.compute(), before)


def test_equal_tensors_have_equal_sums_wherever_they_lie() -> None:
    torch.manual_seed(0)
    values = torch.randn(100)
    elsewhere = torch.cat([torch.zeros(1), values])[1:]
    assert len(set(BitSums([values, values.view(10, 10), elsewhere], CPU).compute().tolist())) == 1
    assert BitSums([], CPU).compute().tolist() == []


def _held(changes: Literal["never", "by update", "by gather"], shared: bool = False) -> tuple[Tensor, HeldTensor]:
    tensor = torch.arange(6.0)
    group = dist.group.WORLD
    return tensor, HeldTensor("w", tensor, changes, (group,) if shared and group is not None else ())


def test_what_changes_between_two_updates_is_named_with_them_and_an_update_is_none() -> None:
    world = World(0, 1, CPU)
    tensor, held = _held("by update")
    sums = StateSums([held], world, 10)
    assert sums.check(10) is None
    for _ in range(2):
        sums.before_update()
        tensor.add_(1)
        sums.after_update()
    assert sums.check(12) is None
    assert sums.checked == {"w": int(BitSums([tensor], CPU).compute())}
    sums.before_update()
    sums.after_update()
    flip(tensor, 2)
    sums.before_update()
    sums.after_update()
    problem = sums.check(14)
    assert problem is not None
    assert problem.startswith("on rank 0 (")
    assert problem.endswith(", w changed between steps 13 and 14")


def test_frozen_weights_that_change_are_named() -> None:
    tensor, held = _held("never")
    sums = StateSums([held], World(0, 1, CPU), 0)
    sums.before_update()
    sums.after_update()
    flip(tensor, 2)
    problem = sums.check(1)
    assert problem is not None
    assert problem.endswith(", w changed between steps 0 and 1")


def _problem_of_ranks(wrong_rank: int) -> str | None:
    """Let the gathered weights of one rank be wrong in the second of three steps."""
    world = World(dist.get_rank(), dist.get_world_size(), CPU)
    tensor, held = _held("by gather", shared=True)
    sums = StateSums([held], world, 0)
    assert sums.check(0) is None
    for step in range(3):
        tensor.copy_(torch.arange(6.0) + step)
        if step == 1 and world.rank == wrong_rank:
            flip(tensor, 2)
        sums.before_update()
        sums.after_update()
    return sums.check(3)


@pytest.mark.parametrize(("num_ranks", "said"), [(2, "ranks 0, 1 ("), (3, "on rank 1 (")])
def test_replicas_that_differ_in_one_step_alone_are_named(num_ranks: int, said: str) -> None:
    problems = run_ranks(num_ranks, _problem_of_ranks, 1)
    assert len(set(problems)) == 1
    assert problems[0].startswith(said)
    assert "since step 2" in problems[0]


def _problem_of_loaded(wrong_rank: int) -> str | None:
    world = World(dist.get_rank(), dist.get_world_size(), CPU)
    tensor, held = _held("by update", shared=True)
    if world.rank == wrong_rank:
        flip(tensor, 2)
    return StateSums([held], world, 7).check(7)


def test_replicas_that_loaded_other_bits_are_named_before_the_first_step() -> None:
    for problem in run_ranks(3, _problem_of_loaded, 2):
        assert problem.startswith("on rank 2 (")
        assert problem.endswith("since step 7")
