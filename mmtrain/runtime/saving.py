"""From a running job to a checkpoint and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmtrain.checkpoint import Checkpoint, Ranks, Shard, ShardSpec, open_newest_good, save
from mmtrain.models.shards import NamedShard
from mmtrain.runtime.job import Job
from mmtrain.runtime.world import World


def ranks_of(world: World) -> Ranks:
    """Let the checkpoint room talk to the other ranks."""
    return Ranks(
        world.rank,
        world.size,
        gather=lambda value: world.gather(value) if world.is_first else _sent(world.gather(value)),
        broadcast=world.broadcast,
    )


def save_job(root: Path, job: Job, next_step: int, facts: dict[str, object]) -> Path:
    """Save everything that the steps from `next_step` on depend on; `facts` are the settings they hang on."""
    shards = [
        Shard(piece.name, shard_spec(piece), _stored(piece))
        for unit in job.optimizer.units.values()
        for piece in unit.shards()
    ]
    state = {"facts": facts, "next_step": next_step, "num_updates": job.optimizer.num_updates}
    # Nothing draws from this generator yet in a run without dropout; a resumed run still continues where it stood.
    own = {"torch_rng": bytes(torch.get_rng_state().tolist()).hex()}
    return save(
        root,
        next_step,
        shards,
        state,
        own,
        keep=job.recipe.train.checkpoint.keep,
        ranks=ranks_of(job.world),
        storage=job.faults.storage(next_step),
    )


def restore_job(root: Path, job: Job, on_bad: Callable[[str], None]) -> Checkpoint:
    """Load the newest good checkpoint into the job; damaged ones are reported through `on_bad` and passed over.

    Raises CheckpointError when none is good or the model does not fit.
    """
    checkpoint = open_newest_good(root, on_bad, ranks_of(job.world))
    for unit in job.optimizer.units.values():
        unit.load(lambda piece: checkpoint.read(piece.name, shard_spec(piece)))
    job.optimizer.num_updates = int(checkpoint.state["num_updates"])
    if job.world.rank < checkpoint.world_size:
        state = bytes.fromhex(checkpoint.rank_state(job.world.rank)["torch_rng"])
        torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))
    return checkpoint


def shard_spec(piece: NamedShard) -> ShardSpec:
    """Describe a piece to the checkpoint room."""
    dim = piece.spec.dim
    if dim is None:
        return ShardSpec(piece.spec.full_shape, flat=piece.flat)
    rows = piece.spec.full_shape[dim] // piece.tp
    return ShardSpec(piece.spec.full_shape, dim, piece.tp_rank * rows, (piece.tp_rank + 1) * rows, piece.flat)


def _stored(piece: NamedShard) -> Tensor:
    return piece.tensor.view(shard_spec(piece).shape)


def _sent(_: list[Any]) -> None:
    """The ranks that only send to rank 0 get nothing back."""
