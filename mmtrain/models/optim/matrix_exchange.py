"""Bring each weight that several ranks hold in parts to one of them, and what it makes of the weight back.

A weight is divided twice: tensor parallelism splits it, and replicas share out what each TP rank holds (ZeRO-1, FSDP).
So it travels in two all-to-alls: among the replicas, to one of them on every TP rank, then inside that one's TP group.
Weights of one round have an owner each. Large ones come first, so those of a round are of like size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.shapes.param_spec import ParamSpec


@dataclass(frozen=True)
class DividedWeight:
    """A weight whose elements several ranks hold."""

    spec: ParamSpec
    ranges: tuple[tuple[int, int], ...]  # [first, last) of the flattened weight of a TP rank, by replica

    def size(self, replica: int) -> int:
        """Return how many elements a replica holds."""
        first, last = self.ranges[replica]
        return last - first


class MatrixExchange:
    """Moves weights between the ranks that hold them and their owners, some of them in each round.

    Args:
        weights: in an order that is the same on all ranks.
        replicas: the ranks that share out what one TP rank holds.
        tp: the ranks that split the weights.
        dtype: in which they travel.
        device: where they are.
    """

    def __init__(
        self,
        weights: Sequence[DividedWeight],
        replicas: dist.ProcessGroup,
        tp: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights, self._replicas, self._tp = weights, replicas, tp
        self._dtype, self._device = dtype, device
        largest_first = sorted(range(len(weights)), key=lambda i: -weights[i].spec.num_elements)
        num_owners = replicas.size() * tp.size()
        self.rounds = [largest_first[first : first + num_owners] for first in range(0, len(weights), num_owners)]

    def owned(self, numbers: Sequence[int]) -> int | None:
        """Return the number of the weight of a round that this rank owns; None if it owns none."""
        place = self._tp.rank() * self._replicas.size() + self._replicas.rank()
        return numbers[place] if place < len(numbers) else None

    def gather(self, numbers: Sequence[int], pieces: Sequence[Tensor]) -> Tensor | None:
        """Send this rank's pieces (elements,), of the exchange's type, of the weights of a round to their owners.

        Returns the whole weight (outputs, inputs) that this rank owns, if it owns one.
        """
        num_replicas, own_replica = self._replicas.size(), self._replicas.rank()
        sent = [
            torch.cat([self._empty, *(pieces[i] for i in range(owner, len(numbers), num_replicas))])
            for owner in range(num_replicas)
        ]
        own = numbers[own_replica::num_replicas]  # one for each rank of the TP group, or fewer
        sizes = [sum(self._weights[i].size(replica) for i in own) for replica in range(num_replicas)]
        shards = self._joined(own, _all_to_all(sent, sizes, self._replicas))
        owned = self.owned(numbers)
        if self._tp.size() == 1:
            return None if owned is None else _whole(shards, self._weights[owned].spec)
        to_ranks = [*shards, *(self._empty for _ in range(self._tp.size() - len(shards)))]
        size = 0 if owned is None else self._weights[owned].spec.num_elements // self._tp.size()
        arrived = _all_to_all(to_ranks, [size] * self._tp.size(), self._tp)
        return None if owned is None else _whole(arrived, self._weights[owned].spec)

    def scatter(self, numbers: Sequence[int], whole: Tensor | None) -> list[Tensor]:
        """Send back what the owners made of their weights (outputs, inputs); return this rank's pieces (elements,)."""
        num_replicas, own_replica = self._replicas.size(), self._replicas.rank()
        own, owned = numbers[own_replica::num_replicas], self.owned(numbers)
        shards: list[Tensor] = []
        if whole is not None:
            assert owned is not None, "an owner made it"
            shards = _shards(whole, self._weights[owned].spec, self._tp.size())
        if self._tp.size() > 1:
            sizes = [self._weights[i].spec.num_elements // self._tp.size() for i in own]
            sizes += [0] * (self._tp.size() - len(own))
            shards = _all_to_all(shards or [self._empty] * self._tp.size(), sizes, self._tp)[: len(own)]
        sent = [torch.cat([self._empty, *self._pieces_of(own, shards, replica)]) for replica in range(num_replicas)]
        of_owners = [numbers[owner::num_replicas] for owner in range(num_replicas)]
        sizes = [sum(self._weights[i].size(own_replica) for i in held) for held in of_owners]
        pieces: dict[int, Tensor] = {}
        for held, arrived in zip(of_owners, _all_to_all(sent, sizes, self._replicas), strict=True):
            pieces |= zip(held, torch.split(arrived, [self._weights[i].size(own_replica) for i in held]), strict=True)
        return [pieces[i] for i in numbers]

    def _pieces_of(self, numbers: Sequence[int], shards: Sequence[Tensor], replica: int) -> list[Tensor]:
        """Return what a replica holds of the flattened weights of this TP rank."""
        ranges = (self._weights[i].ranges[replica] for i in numbers)
        return [shard[first:last] for shard, (first, last) in zip(shards, ranges, strict=True)]

    @property
    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def _joined(self, numbers: Sequence[int], arrived: Sequence[Tensor]) -> list[Tensor]:
        """Return the flattened weights of this TP rank, put together from the pieces of all replicas."""
        of_replicas = [
            torch.split(tensor, [self._weights[i].size(replica) for i in numbers])
            for replica, tensor in enumerate(arrived)
        ]
        return [torch.cat([pieces[k] for pieces in of_replicas]) for k in range(len(numbers))]


def _all_to_all(sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send a flat tensor to each rank; return those that come from each, of these sizes."""
    if group.size() == 1:
        return list(sent)
    joined = torch.cat(list(sent))
    arrived = joined.new_empty(sum(sizes))
    dist.all_to_all_single(arrived, joined, list(sizes), [len(tensor) for tensor in sent], group=group)
    return list(torch.split(arrived, list(sizes)))


def _whole(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Return a whole weight (outputs, inputs) of what each TP rank holds of it, flattened."""
    views = [shard.view(spec.local_shape(len(shards))) for shard in shards]
    whole = views[0] if len(views) == 1 else torch.cat(views, dim=spec.dim or 0)
    return whole.view(-1, spec.full_shape[-1])


def _shards(whole: Tensor, spec: ParamSpec, tp: int) -> list[Tensor]:
    """Return what each TP rank holds of a whole weight (outputs, inputs), flattened."""
    return [shard.flatten() for shard in whole.view(spec.full_shape).chunk(tp, dim=spec.dim or 0)]
