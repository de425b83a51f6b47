"""Save what one rank holds to a checkpoint, in the background, and restore it.

Weights and moments are copied to the host while the next step computes its gradients: only its update changes them.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from mmtrain.checkpoint import (
    Checkpoint,
    Ranks,
    SavingRun,
    Shard,
    ShardSpec,
    Snapshot,
    Storage,
    open_newest_good,
    save,
)
from mmtrain.errors import CheckpointError
from mmtrain.models.optim.held_state import BitSums
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.file_progress import FileProgress
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.world import World

_STAGING_BYTES = 256 * 2**20  # of pinned memory in each of two buffers: a whole snapshot would pin most of a host


@dataclass(frozen=True)
class SavedRank:
    """What saving needs of a rank."""

    world: World
    activity: Activity
    keep: int  # `train.checkpoint.keep`
    shards: Callable[[], Iterable[NamedShard]]  # the live tensors that this rank saves
    num_updates: Callable[[], int]  # of the optimizer so far
    storage: Callable[[int], Storage]  # where the checkpoint after so many steps is written to
    hold_update: Callable[[Callable[[], None]], None] = lambda wait: wait()  # calls `wait` before weights change
    checked_sums: Callable[[], Mapping[str, int]] = dict  # of the shards' bits, where they were checked in this step

    @classmethod
    def of(cls, rank_context: RankContext) -> Self:
        """Save what this rank of a run holds."""
        optimizer = rank_context.optimizer
        return cls(
            rank_context.world,
            rank_context.activity,
            rank_context.recipe.train.checkpoint.keep,
            lambda: (piece for unit in optimizer.units.values() for piece in unit.shards()),
            lambda: optimizer.num_updates,
            rank_context.faults.checkpoint_storage,
            optimizer.hold_update,
            optimizer.checked_sums,
        )


def checkpoint_ranks(world: World, files: FileProgress | None = None) -> Ranks:
    """Return how `mmtrain.checkpoint` reaches the other ranks; `files` learns when this rank waits for them."""
    files = files or FileProgress()

    def gather(value: Any) -> list[Any] | None:
        with files.waiting_for_ranks():
            values = world.all_gather(value)
        return values if world.is_first else None

    def broadcast(value: Any) -> Any:
        with files.waiting_for_ranks():
            return world.broadcast(value)

    return Ranks(world.rank, world.size, gather, broadcast)


def take_snapshot(rank: SavedRank, next_step: int, state: Mapping[str, object]) -> Snapshot:
    """Collect everything that steps from `next_step` on depend on; `state` is what the loop and its hooks add.

    The shards are the live tensors.
    """
    shards = [
        Shard(piece.name, shard_spec(piece), piece.tensor.view(shard_spec(piece).shape)) for piece in rank.shards()
    ]
    own_state = {"next_step": next_step, "num_updates": rank.num_updates()}
    # Nothing draws from this generator in a run without dropout; a resumed run restores its state all the same.
    rank_state = {"torch_rng": bytes(torch.get_rng_state().tolist()).hex()}
    return Snapshot(next_step, shards, {**state, **own_state}, rank_state)


class _Piece(NamedTuple):
    """A part of a tensor on its way to the host."""

    staged: Tensor  # in pinned memory; on a CPU, the live tensor
    target: Tensor
    arrived: torch.cuda.Event | None


class SnapshotCopy:
    """Copies of live tensors in host memory. They hold what the tensors held when this was made, after `run`.

    Until `wait` returns no live tensor may change.
    """

    def __init__(self, live: Sequence[Tensor], copies: Sequence[Tensor] | None = None) -> None:
        """Allocate the copies, where none are given, and on a GPU the buffers on the way; `run` fills them."""
        if copies is None:
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in live]
        self.copies = list(copies)
        self._live = live
        self._is_done = threading.Event()
        self._device = next((tensor.device for tensor in live if tensor.is_cuda), None)
        self._computed: torch.cuda.Event | None = None
        self._buffers: deque[Tensor] = deque()
        if self._device is not None:  # what was launched before must have changed the tensors
            with torch.cuda.device(self._device):
                self._buffers += [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record(torch.cuda.current_stream(self._device))

    def run(self) -> None:
        """Copy all tensors, on a GPU through pinned memory and on a stream beside that of the step."""
        try:
            pieces = self._host_pieces() if self._device is None else self._staged_pieces(self._device)
            for piece in pieces:
                if piece.arrived is not None:
                    piece.arrived.synchronize()
                piece.target.copy_(piece.staged)
        finally:
            self._is_done.set()  # also after an error: training goes on without this checkpoint

    def wait(self) -> None:
        """Wait until the live tensors may change."""
        self._is_done.wait()

    def _host_pieces(self) -> Iterator[_Piece]:
        for live, copy in zip(self._live, self.copies, strict=True):
            yield _Piece(live.detach(), copy, None)

    def _staged_pieces(self, device: torch.device) -> Iterator[_Piece]:
        """Yield pieces of all tensors, each while the next one is on its way."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        assert self._computed is not None
        stream.wait_event(self._computed)
        on_their_way: deque[tuple[_Piece, Tensor]] = deque()
        for live, target in self._parts():
            if not self._buffers:
                piece, buffer = on_their_way.popleft()
                yield piece
                self._buffers.append(buffer)
            buffer = self._buffers.popleft()
            staged = buffer[: live.nbytes].view(live.dtype)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                staged.copy_(live, non_blocking=True)
                arrived.record(stream)
            on_their_way.append((_Piece(staged, target, arrived), buffer))
        yield from (piece for piece, _ in on_their_way)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield flat parts that fit into a buffer, live and copy."""
        for live, copy in zip(self._live, self.copies, strict=True):
            num_elements = _STAGING_BYTES // live.element_size()
            live_parts = torch.split(live.detach().reshape(-1), num_elements)
            yield from zip(live_parts, torch.split(copy.view(-1), num_elements), strict=True)


class BackgroundSaver:
    """Saves in a thread, at most one checkpoint at a time; from a copy, if training goes on meanwhile.

    `done` tells whether this rank has written its part; `finish` waits for it and raises what went wrong. All ranks
    must finish in the same step, since a save that fails on one rank has failed on all.
    """

    def __init__(
        self,
        root: Path,
        rank: SavedRank,
        state: Callable[[], Mapping[str, object]],
        run: SavingRun | None = None,
    ) -> None:
        """Save to `root`; `state` returns what else a resumed run depends on, as JSON values."""
        self._root, self._rank, self._state, self._run = root, rank, state, run
        # A group of its own: the thread's collectives must not come between those of the steps. Without a timeout:
        # ranks wait in it for the slowest storage, and the watchdog knows whether that makes progress.
        self._ranks = checkpoint_ranks(rank.world.without_timeout(), rank.activity.files)
        self.step = 0  # after which the pending or the last save was started
        self.save_s = 0.0  # seconds that the last save took in its thread
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._error: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Whether a save was started and not finished."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, next_step: int, copy: bool) -> None:
        """Start to write; without `copy`, which takes host memory, no weight may change before `finish`."""
        assert not self.pending, "two saves at once would remove each other's drafts"
        self.step = next_step
        snapshot = take_snapshot(self._rank, next_step, self._state())
        copying = None
        if copy:
            copying = SnapshotCopy([shard.tensor for shard in snapshot.shards])
            copies = zip(snapshot.shards, copying.copies, strict=True)
            snapshot = replace(snapshot, shards=[replace(shard, tensor=tensor) for shard, tensor in copies])
        snapshot = replace(snapshot, verify=partial(require_sums, snapshot.shards, self._rank.checked_sums()))
        # A daemon: after a failure elsewhere, a save whose peers are gone must not keep the process.
        self._thread = threading.Thread(target=self._save, args=(snapshot, copying), name="mmtrain-saver", daemon=True)
        self._thread.start()
        if copying is not None:
            self._rank.hold_update(copying.wait)

    def finish(self) -> Path:
        """Wait for the pending save; return the checkpoint. Raises CheckpointError, the same on all ranks."""
        assert self._thread is not None, "no save is pending"
        self._thread.join()
        error = self._error
        self._thread = None
        self._error = None
        if error is not None:
            raise error
        assert self._folder is not None
        return self._folder

    def _save(self, snapshot: Snapshot, copying: SnapshotCopy | None) -> None:
        files = self._rank.activity.files
        files.start()
        start_s = time.perf_counter()
        try:
            if copying is not None:
                copying.run()
            self._folder = save(
                self._root,
                snapshot,
                keep=self._rank.keep,
                ranks=self._ranks,
                storage=self._rank.storage(snapshot.step),
                progress=files.advance,
                run=self._run,
            )
        except BaseException as error:
            self._error = error
        self.save_s = time.perf_counter() - start_s


def require_sums(shards: Sequence[Shard], sums: Mapping[str, int]) -> None:
    """Raise CheckpointError for a shard whose bits do not have the sum that was taken of it; some may have none."""
    known = [shard for shard in shards if shard.name in sums]
    devices = {shard.tensor.device for shard in known}
    for device in devices:
        of_device = [shard for shard in known if shard.tensor.device == device]
        found = BitSums([shard.tensor for shard in of_device], device).compute().tolist()
        for shard, found_sum in zip(of_device, found, strict=True):
            if found_sum != sums[shard.name]:
                raise CheckpointError(
                    f"{shard.name} on {socket.gethostname()} has changed since it was checked: a bit flipped in memory "
                    "or on the way to it"
                )


def restore_checkpoint(
    root: Path,
    rank_context: RankContext,
    on_bad: Callable[[str], None],
    world: World | None = None,
    require: Callable[[Checkpoint], None] = lambda _: None,
) -> Checkpoint:
    """Load the newest good checkpoint into this rank; report damaged ones through `on_bad` and pass over them.

    `world`: the same ranks without a timeout, for checkpoints that take long to read. `require` raises for one of
    another run, before any tensor is looked for.

    Raises CheckpointError when none is good or the model does not fit.
    """
    checkpoint = open_checkpoint(root, rank_context, on_bad, world or rank_context.world)
    load_checkpoint(checkpoint, rank_context, require)
    return checkpoint


def open_checkpoint(root: Path, rank_context: RankContext, on_bad: Callable[[str], None], world: World) -> Checkpoint:
    """Open the newest good checkpoint; see `restore_checkpoint`."""
    files = rank_context.activity.files
    files.start()
    required = ("facts", "next_step", "num_updates")  # what `take_snapshot` writes
    return open_newest_good(root, on_bad, checkpoint_ranks(world, files), files.advance, required)


def load_checkpoint(
    checkpoint: Checkpoint, rank_context: RankContext, require: Callable[[Checkpoint], None] = lambda _: None
) -> None:
    """Load a checkpoint into this rank; see `restore_checkpoint`."""
    require(checkpoint)
    for unit in rank_context.optimizer.units.values():
        unit.load(lambda piece: checkpoint.read(piece.name, shard_spec(piece)))
    rank_context.optimizer.num_updates = int(checkpoint.state["num_updates"])
    # All ranks draw from the same stream, so a rank that did not exist then continues that of rank 0.
    rank = rank_context.world.rank
    rng_rank = rank if rank < checkpoint.world_size else 0
    state = bytes.fromhex(checkpoint.rank_state(rng_rank)["torch_rng"])
    torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))


def shard_spec(piece: NamedShard) -> ShardSpec:
    """Describe a named shard as `mmtrain.checkpoint` expects it."""
    dim = piece.spec.dim
    if dim is None:
        return ShardSpec(piece.spec.full_shape, flat=piece.flat)
    rows = piece.spec.full_shape[dim] // piece.tp
    return ShardSpec(piece.spec.full_shape, dim, piece.tp_rank * rows, (piece.tp_rank + 1) * rows, piece.flat)
