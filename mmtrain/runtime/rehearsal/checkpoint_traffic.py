"""The checkpoint of a rehearsal: shrunken files, written by the saver of training in the time of the whole ones."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mmtrain.checkpoint import LocalStorage
from mmtrain.checkpoint.storage import FileSum
from mmtrain.costs import Precision, num_parameters, num_trained_parameters
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.models.optim.named_shards import MOMENTS, NamedShard
from mmtrain.models.optim.parameter_specs import ParamSpec
from mmtrain.program import ModelTiming
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.activity import SAVING, Activity
from mmtrain.runtime.execution.checkpointing import BackgroundSaver, SavedRank
from mmtrain.runtime.world import World

MASTER_WEIGHT_BYTES = 4  # of a trained parameter; its two moments come beside it, as `ZeroAdamW.shards` yields them
NUM_SHRUNKEN_SHARDS = 16  # of a rank; the watchdog hears of progress after each
NUM_HEADER_CHUNKS = 2  # that `tensorfile.chunks` yields before the tensors
SHRUNKEN_SHARD_ELEMENTS = 256  # a checkpoint of 64 ranks is a megabyte
# At which a save in the background copies what it writes. A guess for host memory that is written through buffers
# behind PCIe 4.0 x16 (25 GB/s at best, for pinned memory); it has not been measured.
HOST_COPY_BYTES_PER_S = 10e9


@dataclass(frozen=True)
class CheckpointSpeed:
    """How fast checkpoints are written."""

    disk_bytes_per_s: float  # by each rank, while all ranks write
    stretch: float  # how many times as long everything takes here

    def shard_s(self, num_bytes: int) -> float:
        """Return the stretched seconds of one shrunken shard of a rank that writes `num_bytes`."""
        return num_bytes / self.disk_bytes_per_s * self.stretch / NUM_SHRUNKEN_SHARDS


@dataclass(frozen=True)
class CheckpointTraffic:
    """What a rehearsed save took, in seconds of the plan."""

    total_bytes: int  # of the whole plan
    largest_bytes: int  # of the rank that writes most
    every: int  # `train.checkpoint.every`
    is_async: bool  # `train.checkpoint.async_save`
    copy_s: float  # in which a save in the background copies; the next update waits for its end
    save_s: float  # from the end of the step until the checkpoint is committed
    step_s: float  # of a step with no save beside it
    step_beside_save_s: float | None  # of the steps beside the save; None without any

    @property
    def wait_s(self) -> float:
        """Seconds for which training stands still, at most, at each checkpoint, once saves follow each other."""
        if not self.is_async:
            return self.save_s
        until_next_s = self.every * self.step_s
        return max(self.copy_s, self.save_s - until_next_s) if self.every else self.copy_s

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes beside a save."""
        return 1.0 if self.step_beside_save_s is None else self.step_beside_save_s / self.step_s

    @property
    def worst_loss_s(self) -> float | None:
        """Seconds of work of all ranks that a kill costs at most: up to the commit of the next checkpoint.

        None if only the end of the run is saved: a kill costs everything.
        """
        return self.every * self.step_s + self.wait_s + self.save_s if self.every else None


def checkpoint_bytes(timing: ModelTiming, rank: int, moments: Precision = "fp32") -> int:
    """Return how many bytes of tensors a rank of the plan writes at a checkpoint.

    ZeRO-1 shards what trains over the replicas; the first replica writes what does not. Tensors that every rank of a TP
    group holds, such as norms, count on each of them, though one writes them. `moments`: `train.optimizer.moments`.
    """
    trained_bytes = MASTER_WEIGHT_BYTES + len(MOMENTS) * ELEMENT_BYTES[moments]
    total = 0.0
    for stage_id, replica in timing.graph.held_by(rank):
        mesh = timing.graph.mesh(stage_id.unit)
        layers = timing.shape.unit(stage_id.unit).layers
        for layer in (layers[i] for i in range(*timing.graph.stage(stage_id).layers)):
            num_held, num_trained = num_parameters(layer, mesh.tp), num_trained_parameters(layer, mesh.tp)
            if layer.kind == "head" and timing.shape.tied_embeddings:  # the embedding's rank writes the matrix
                matrix = layer.vocab * layer.hidden // mesh.tp
                num_held -= matrix
                num_trained -= matrix if layer.trainable else 0
            total += num_trained * trained_bytes / mesh.num_replicas
            if replica == 0:
                total += (num_held - num_trained) * timing.element_bytes
    return round(total)


class _SlowStorage(LocalStorage):
    """Takes `shard_s` seconds to write each shard; writes files without shards as fast as it can."""

    def __init__(self, shard_s: float) -> None:
        self._shard_s = shard_s

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """See `Storage`."""
        return super().write(path, self._delayed(chunks) if path.suffix == ".safetensors" else chunks)

    def _delayed(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for number, chunk in enumerate(chunks):
            if number >= NUM_HEADER_CHUNKS:
                time.sleep(self._shard_s)
            yield chunk


def _shrunken_shards(rank: int) -> Iterator[NamedShard]:
    """Yield small tensors in the place of a rank's; no two ranks hold the same one."""
    for number in range(NUM_SHRUNKEN_SHARDS):
        spec = ParamSpec(f"rank{rank}.{number}", (SHRUNKEN_SHARD_ELEMENTS,), None)
        yield NamedShard(spec.name, spec, 0, 1, None, torch.zeros(SHRUNKEN_SHARD_ELEMENTS))


@dataclass
class RehearsedSave:
    """Saves once, as `train.checkpoint` says: `start` after a step, `finish` after the last."""

    saver: BackgroundSaver
    activity: Activity
    is_async: bool
    copy_s: float  # stretched

    def start(self, step: int) -> None:
        """Save after `step` steps; return when training would go on."""
        self.activity.start(SAVING)
        self.saver.start(step, copy=self.is_async)
        if self.is_async:
            time.sleep(self.copy_s)
        else:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is committed."""
        if self.saver.pending:
            self.activity.start(SAVING)
            self.saver.finish()


def prepare_save(
    recipe: Recipe, world: World, activity: Activity, root: Path, num_bytes: int, speed: CheckpointSpeed
) -> RehearsedSave:
    """Return what saves `num_bytes` of this rank in shrunken form under `root`. All ranks call this together."""
    storage = _SlowStorage(speed.shard_s(num_bytes))
    checkpoint = recipe.train.checkpoint
    rank = SavedRank(
        world, activity, checkpoint.keep, partial(_shrunken_shards, world.rank), lambda: 0, lambda step: storage
    )
    copy_s = num_bytes / HOST_COPY_BYTES_PER_S * speed.stretch
    return RehearsedSave(BackgroundSaver(root, rank, dict), activity, checkpoint.async_save, copy_s)
