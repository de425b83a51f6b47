"""Weights that travel to their owners and back."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.optim.matrix_exchange import DividedWeight, MatrixExchange
from mmtrain.models.optim.parameter_specs import tp_shard
from mmtrain.models.shapes.param_spec import ParamSpec
from tests.distributed import run_ranks

SPECS = [
    ParamSpec("qkv", (12, 5), 0),
    ParamSpec("proj", (5, 8), 1),
    ParamSpec("gated", (2, 6, 5), 1),
    ParamSpec("small", (2, 3), 0),
    ParamSpec("down", (7, 4), 1),
]


def full(spec: ParamSpec) -> Tensor:
    return torch.arange(spec.num_elements, dtype=torch.float32).view(spec.full_shape) + len(spec.name)


def ranges(spec: ParamSpec, tp: int, num_replicas: int) -> tuple[tuple[int, int], ...]:
    """Cut a weight unevenly; the last replica holds nothing of the smallest one."""
    size = spec.num_elements // tp
    borders = [0, *(size * (r + 1) // num_replicas - (r == 0) for r in range(num_replicas - 1)), size]
    if spec.name == "small" and num_replicas > 1:
        borders[-2] = size
    return tuple(itertools.pairwise(borders))


def exchange_all(tp: int) -> tuple[list[str], bool]:
    """Return the weights that this rank owned, and whether what it got was right; owners add 1 to their weights."""
    rank, num_replicas = dist.get_rank(), dist.get_world_size() // tp
    tp_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, tp * num_replicas, tp)]
    replica_groups = [dist.new_group(list(range(place, tp * num_replicas, tp))) for place in range(tp)]
    replica, place = divmod(rank, tp)
    weights = [DividedWeight(spec, ranges(spec, tp, num_replicas)) for spec in SPECS]
    moved = MatrixExchange(weights, replica_groups[place], tp_groups[replica], torch.float32, torch.device("cpu"))
    owned_names = []
    is_right = sorted(itertools.chain(*moved.rounds)) == list(range(len(SPECS)))
    for numbers in moved.rounds:
        local = [tp_shard(full(SPECS[i]), SPECS[i], place, tp).flatten() for i in numbers]
        pieces = [shard[slice(*weights[i].ranges[replica])] for i, shard in zip(numbers, local, strict=True)]
        whole = moved.gather(numbers, pieces)
        owned = moved.owned(numbers)
        assert (whole is None) == (owned is None)
        if whole is not None and owned is not None:
            owned_names.append(SPECS[owned].name)
            is_right &= torch.equal(whole, full(SPECS[owned]).view(-1, SPECS[owned].full_shape[-1]))
            whole = whole + 1
        changed = moved.scatter(numbers, whole)
        is_right &= all(torch.equal(new, old + 1) for new, old in zip(changed, pieces, strict=True))
    return owned_names, is_right


@pytest.mark.parametrize(("tp", "num_replicas"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_each_weight_has_one_owner_and_every_rank_gets_its_part_back(tp: int, num_replicas: int) -> None:
    ranks = run_ranks(tp * num_replicas, exchange_all, tp)
    assert all(is_right for _, is_right in ranks)
    assert sorted(itertools.chain(*(names for names, _ in ranks))) == sorted(spec.name for spec in SPECS)
