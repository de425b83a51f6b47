"""Putting together what the ranks of a test hold."""

import torch
from torch import Tensor

from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.runtime.execution.checkpointing import shard_spec


def copy(piece: NamedShard) -> NamedShard:
    """The shard as it is now, whatever comes into its buffer later."""
    return NamedShard(piece.name, piece.spec, piece.tp_rank, piece.tp, piece.flat, piece.tensor.clone())


def whole(pieces: list[NamedShard]) -> dict[str, Tensor]:
    """Put the shards of all ranks together; an element that nobody or somebody else brings too stays visible."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        spec = shard_spec(piece)
        full = whole.setdefault(piece.name, torch.full(spec.full_shape, float("nan")))
        place = full if spec.dim is None else full.narrow(spec.dim, spec.start, spec.stop - spec.start)
        local = place.reshape(-1).clone()
        lo, hi = spec.flat or (0, local.numel())
        assert bool(local[lo:hi].isnan().all()), f"two ranks answer for the same elements of {piece.name}"
        local[lo:hi] = piece.tensor.reshape(-1)
        place.copy_(local.view(place.shape))
    return whole
