"""Copies of a rank's part of a checkpoint in host memory, as files of a tmpfs, which outlive the process.

ROOT/copy-0/, ROOT/copy-1/           written in turn, so that one is complete while the other changes
    rank-00003.safetensors           as in a checkpoint; training copies into its mapped memory
    rank-00003.copy                  written last, by rename, and removed first: the step, the sum and the pieces
    rank-00003.json                  state of rank 3 only; written where copies are read

A node's memory holds the files of its own ranks and those of their peers on another node. What lies on all nodes
together is complete if it has the files of all ranks after one step.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint import tensorfile
from mmtrain.checkpoint.load import Checkpoint
from mmtrain.checkpoint.manifest import Manifest, join_pieces
from mmtrain.checkpoint.save import Snapshot, describe_pieces
from mmtrain.checkpoint.storage import ProgressCallback, ignore_progress
from mmtrain.checkpoint.tensor_pieces import Shard, overlap
from mmtrain.system_calls import reserve_bytes

if TYPE_CHECKING:
    import torch

SLOTS = (0, 1)
_WORD_BYTES = 8


@dataclass(frozen=True)
class CopyRecord:
    """What a rank's file of tensors holds; without it, the file is being written."""

    rank: int
    world_size: int
    step: int
    course: str  # tells what the run has left by going back from what it has trained since
    num_bytes: int
    bit_sum: int  # of the file's bytes, as 64-bit words modulo 2^64
    pieces: Mapping[str, Any]
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return the record's file, which starts with the SHA-256 of the rest."""
        body = json.dumps(asdict(self), allow_nan=False).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, content: bytes) -> "CopyRecord":
        """Read what `to_bytes` wrote. Raises ValueError and TypeError for anything else."""
        digest, _, body = content.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the record of a copy has changed")
        return cls(**json.loads(body))

    def rank_state_bytes(self) -> bytes:
        """Return the file of the rank's state, as a checkpoint has it."""
        return json.dumps(self.rank_state, allow_nan=False).encode()

    @classmethod
    def of(cls, snapshot: Snapshot, course: str, rank: int, world_size: int, memory: "torch.Tensor") -> "CopyRecord":
        """Describe what a rank has copied to `memory`, the bytes of its file."""
        return cls(
            rank,
            world_size,
            snapshot.step,
            course,
            memory.numel(),
            bit_sum(memory),
            describe_pieces(snapshot.shards, rank),
            snapshot.state,
            snapshot.rank_state,
        )


def slot_folder(root: Path, slot: int) -> Path:
    """Return the folder of one of the two copies."""
    return root / f"copy-{slot}"


def record_file(folder: Path, rank: int) -> Path:
    """Return where the record of a rank's copy lies."""
    return folder / f"rank-{rank:05d}.copy"


def bit_sum(memory: "torch.Tensor") -> int:
    """Return the sum of bytes as 64-bit words modulo 2^64: it changes with any one bit, at the speed of memory."""
    import torch

    num_words = memory.numel() // _WORD_BYTES
    rest = int.from_bytes(memory[num_words * _WORD_BYTES :].numpy().tobytes(), "little")
    return (int(memory[: num_words * _WORD_BYTES].view(torch.int64).sum()) + rest) % 2**64


def map_file(path: Path, num_bytes: int) -> "torch.Tensor":
    """Return the memory of a file of this size, which is made if it is not there. Raises OSError if there is no room.

    Room is taken now: writing to a mapped page for which there is none would kill the process.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size != num_bytes:
        path.unlink()
    with path.open("ab") as file:
        reserve_bytes(file.fileno(), num_bytes)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def write_header(memory: "torch.Tensor", header: bytes) -> None:
    """Write the start of a file of tensors into its memory."""
    import torch

    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)


def tensors_in(memory: "torch.Tensor", ordered: Sequence[Shard]) -> list["torch.Tensor"]:
    """Return where these shards lie in the memory of their file, which starts with its header."""
    views = []
    start = len(tensorfile.header_of(ordered))
    for shard in ordered:
        stop = start + shard.tensor.nbytes
        views.append(memory[start:stop].view(shard.tensor.dtype).view(shard.tensor.shape))
        start = stop
    return views


def num_file_bytes(ordered: Sequence[Shard]) -> int:
    """Return the size of the file of these shards."""
    return len(tensorfile.header_of(ordered)) + sum(shard.tensor.nbytes for shard in ordered)


def invalidate(folder: Path, rank: int) -> None:
    """Say that a rank's file changes from now on."""
    record_file(folder, rank).unlink(missing_ok=True)


def commit(folder: Path, record: CopyRecord) -> None:
    """Say that a rank's file is complete."""
    path = record_file(folder, record.rank)
    draft = _draft(path)
    draft.write_bytes(record.to_bytes())
    draft.replace(path)


def _draft(record: Path) -> Path:
    return record.with_suffix(".draft")


def read_record(folder: Path, rank: int) -> CopyRecord | None:
    """Return the record of a rank's file whose bytes are as they were copied; None if there is none."""
    import torch

    try:
        record = CopyRecord.from_bytes(record_file(folder, rank).read_bytes())
        path = folder / layout.tensor_file(rank)
        if record.rank != rank or path.stat().st_size != record.num_bytes:
            return None
        memory = torch.from_file(str(path), shared=True, size=record.num_bytes, dtype=torch.uint8)
    except (OSError, ValueError, TypeError, RuntimeError):
        return None
    return record if bit_sum(memory) == record.bit_sum else None


def find_copied_ranks(root: Path) -> list[tuple[int, int]]:
    """Return slot and rank of each file with a record in a node's memory, in order; nothing is verified."""
    return [
        (slot, int(path.stem.removeprefix("rank-")))
        for slot in SLOTS
        for path in sorted(slot_folder(root, slot).glob("rank-*.copy"))
    ]


def open_copy(folder: Path, records: Sequence[CopyRecord], progress: ProgressCallback = ignore_progress) -> Checkpoint:
    """Return the checkpoint that the files of a folder make up; `records`: those of all ranks, in order.

    Pieces of files that are not in this node's memory must not be read. Raises CheckpointError if pieces are missing.
    """
    first = records[0]
    tensors = join_pieces([record.pieces for record in records])
    manifest = Manifest(first.step, len(records), first.state, {}, tensors)
    return Checkpoint(folder, manifest, progress)


def files_needed(checkpoint: Checkpoint, wanted: Iterable[tuple[str, Any]]) -> set[int]:
    """Return the ranks of the files that reading the pieces `wanted`, names and `ShardSpec`s, touches."""
    ranks: set[int] = set()
    for name, spec in wanted:
        pieces = checkpoint.manifest.tensors[name].pieces if name in checkpoint.manifest.tensors else ()
        exact = next((piece.rank for piece in pieces if piece.spec == spec), None)
        if exact is not None:
            ranks.add(exact)
            continue
        boxes = [region.box for region in spec.regions()]
        for piece in pieces:
            if any(overlap(region.box, box) for region in piece.spec.regions() for box in boxes):
                ranks.add(piece.rank)
    return ranks


def remove_files(folder: Path, ranks: Iterable[int]) -> None:
    """Remove what a slot holds of these ranks, records first."""
    for rank in ranks:
        invalidate(folder, rank)
        names = (layout.tensor_file(rank), layout.state_file(rank), _draft(record_file(folder, rank)).name)
        for name in names:
            (folder / name).unlink(missing_ok=True)


def ranks_in(folder: Path) -> Iterator[int]:
    """Yield the ranks of which a slot holds anything."""
    yield from {int(path.name[len("rank-") :][:5]) for path in folder.glob("rank-*") if path.is_file()}


def remove_all(root: Path) -> None:
    """Remove the copies in a node's memory; other ranks of the node may do so at the same time."""
    for slot in SLOTS:
        folder = slot_folder(root, slot)
        remove_files(folder, list(ranks_in(folder)))
        with contextlib.suppress(OSError):
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
