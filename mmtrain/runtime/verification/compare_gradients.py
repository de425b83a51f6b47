"""Compare the gradients that the ranks of a plan hold with those of one process."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmtrain.models.optim.parameter_specs import NamedShard, tp_shard
from mmtrain.program import StageGraph
from mmtrain.report.verification import Difference

# Of the distance of a gradient, relative to its norm; and of the norm below which that of all gradients counts.
MAX_RELATIVE_DISTANCE = 1e-4
MIN_NORM_SHARE = 1e-3
_MAX_ANGLE = 1e-3  # of a gradient that is said to be a multiple of the right one: distance to it over its norm


def stage_of_parameter(graph: StageGraph, parameter: str) -> str | None:
    """Return the stage with the layer of a parameter, such as `llm.1` for `llm.layers.3.norm.weight`; None without one.

    Of a matrix that two stages hold, the first is meant: its copy is the one that counts.
    """
    unit, _, rest = parameter.partition(".layers.")
    layer = rest.partition(".")[0]
    return next(
        (
            str(stage.id)
            for stage in graph.stages
            if stage.id.unit == unit and layer.isdigit() and int(layer) in range(*stage.layers)
        ),
        None,
    )


def compare_gradients(
    by_rank: Sequence[Sequence[NamedShard]],
    expected: Mapping[str, Tensor],
    max_distance: float = MAX_RELATIVE_DISTANCE,
) -> tuple[Difference, ...]:
    """Return the parameters whose gradients differ, those nearest to the loss first: errors spread from there.

    Args:
        by_rank: the shards that each rank holds; each element must be on exactly one rank.
        expected: the whole gradients by name, in the order of the model's parameters.
        max_distance: of a gradient, relative to its norm.
    """
    total_norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    shards: dict[str, list[tuple[int, NamedShard]]] = {name: [] for name in expected}
    unexpected = []
    for rank, of_rank in enumerate(by_rank):
        for shard in of_rank:
            if shard.name in shards:
                shards[shard.name].append((rank, shard))
            else:
                unexpected.append(Difference(shard.name, (rank,), None, float("inf")))
    differences = [
        difference
        for name in reversed(list(expected))
        if (difference := _compare(name, shards[name], expected[name], total_norm, max_distance)) is not None
    ]
    return (*differences, *unexpected)


def _compare(
    name: str, shards: Sequence[tuple[int, NamedShard]], expected: Tensor, total_norm: float, max_distance: float
) -> Difference | None:
    scale = max(float(expected.norm()), MIN_NORM_SHARE * total_norm)
    limit = max_distance * scale
    num_found, wrong_ranks = 0, []
    found, right = [], []
    for rank, shard in shards:
        mine, theirs = shard.tensor.flatten().float(), _elements_of(shard, expected)
        num_found += mine.numel()
        found.append(mine)
        right.append(theirs)
        if not float((mine - theirs).norm()) <= limit:  # also if it is not a number
            wrong_ranks.append(rank)
    if num_found != expected.numel():
        return Difference(name, (), None, float("inf"))
    mine, theirs = torch.cat(found), torch.cat(right)
    distance = float((mine - theirs).norm())
    if distance <= limit:
        return None
    ranks = tuple(dict.fromkeys(wrong_ranks or [rank for rank, _ in shards]))
    return Difference(name, ranks, _multiple(mine, theirs), distance / scale)


def _elements_of(shard: NamedShard, full: Tensor) -> Tensor:
    """Return the elements of a whole gradient that a shard holds, flattened."""
    part = tp_shard(full.reshape(shard.spec.full_shape), shard.spec, shard.tp_rank, shard.tp)
    first, end = shard.flat or (0, part.numel())
    return part.reshape(-1)[first:end]


def _multiple(found: Tensor, right: Tensor) -> float | None:
    """Return the factor between two gradients, or None if one is no multiple of the other."""
    right_sq = float(right.dot(right))
    if right_sq == 0:
        return None
    factor = float(found.dot(right)) / right_sq
    return factor if float((found - factor * right).norm()) <= _MAX_ANGLE * float(found.norm()) else None
