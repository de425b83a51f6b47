"""From a running job to a checkpoint and back."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint import Checkpoint, Ranks, Shard, ShardSpec, Snapshot, open_newest_good, save
from mmtrain.models.named_shards import NamedShard
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.world import World


def checkpoint_ranks(world: World, group: dist.ProcessGroup | None = None) -> Ranks:
    """Let the checkpoint room talk to the other ranks, over a group of all ranks (default: the world's own)."""

    def gather(value: Any) -> list[Any] | None:
        everyone = world.all_gather(value, group)
        return everyone if world.is_first else None

    return Ranks(world.rank, world.size, gather, lambda value: world.broadcast(value, group))


def take_snapshot(job: RankContext, next_step: int, facts: dict[str, object], copy: bool) -> Snapshot:
    """Everything that the steps from `next_step` on depend on; `facts` are the settings they hang on.

    Without `copy` the shards are the live tensors: they must be written before training goes on.
    """
    shards = [
        Shard(piece.name, shard_spec(piece), _stored(piece, copy))
        for unit in job.optimizer.units.values()
        for piece in unit.shards()
    ]
    state = {"facts": facts, "next_step": next_step, "num_updates": job.optimizer.num_updates}
    # Nothing draws from this generator yet in a run without dropout; a resumed run still continues where it stood.
    own = {"torch_rng": bytes(torch.get_rng_state().tolist()).hex()}
    return Snapshot(next_step, shards, state, own)


def _write(root: Path, job: RankContext, taken: Snapshot, ranks: Ranks) -> Path:
    keep, storage = job.recipe.train.checkpoint.keep, job.faults.checkpoint_storage(taken.step)
    return save(root, taken, keep=keep, ranks=ranks, storage=storage)


class BackgroundSaver:
    """Saves in a thread, from a copy where training is to go on meanwhile; at most one save at a time.

    `done` says whether this rank's part is over; `finish` waits for it and raises what went wrong. Ranks must settle
    in the same step, since a failed save counts on all of them.
    """

    def __init__(self, root: Path, job: RankContext, facts: dict[str, object]) -> None:
        self._root, self._job, self._facts = root, job, facts
        # A group of its own: the thread's collectives must not come between those of the steps.
        group = dist.new_group(backend="gloo") if job.world.size > 1 else None
        self._ranks = checkpoint_ranks(job.world, group)
        self.step = 0  # that the save under way, or the last one, comes after
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._error: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Whether a save was started and not settled."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether settling would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, next_step: int, copy: bool) -> None:
        """Begin to write; without `copy`, which takes host memory, nothing may change before `finish`."""
        assert not self.pending, "two saves at once would remove each other's drafts"
        self.step = next_step
        taken = take_snapshot(self._job, next_step, self._facts, copy=copy)
        # A daemon: after a failure elsewhere, a save whose peers are gone must not keep the process.
        self._thread = threading.Thread(target=self._save, args=(taken,), name="mmtrain-saver", daemon=True)
        self._thread.start()

    def finish(self) -> Path:
        """Wait for the save under way; return the checkpoint. Raises CheckpointError, the same on all ranks."""
        assert self._thread is not None, "no save is under way"
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        assert self._folder is not None
        return self._folder

    def _save(self, taken: Snapshot) -> None:
        try:
            self._folder = _write(self._root, self._job, taken, self._ranks)
        except BaseException as error:
            self._error = error


def restore_checkpoint(root: Path, job: RankContext, on_bad: Callable[[str], None]) -> Checkpoint:
    """Load the newest good checkpoint into the job; damaged ones are reported through `on_bad` and passed over.

    Raises CheckpointError when none is good or the model does not fit.
    """
    checkpoint = open_newest_good(root, on_bad, checkpoint_ranks(job.world))
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


def _stored(piece: NamedShard, copy: bool) -> Tensor:
    tensor = piece.tensor.view(shard_spec(piece).shape)
    return tensor.detach().to("cpu", copy=True) if copy else tensor
