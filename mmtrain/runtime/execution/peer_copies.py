"""Copy what a rank holds into its node's memory and into that of its peer, beside the training, and read it back.

All processes of a run end when one of them fails, so copies lie in files of a tmpfs (`checkpoint.memory_copies`), which
outlive them. If a node is lost with its memory, those of its ranks come from the nodes of their peers.
"""

import errno
import os
import socket
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint import Checkpoint, Snapshot, memory_copies, tensorfile
from mmtrain.checkpoint.folders import state_file, tensor_file
from mmtrain.checkpoint.memory_copies import SLOTS, CopyRecord, slot_folder
from mmtrain.errors import UserError
from mmtrain.runtime.execution.checkpointing import SavedRank, SnapshotCopy, require_sums, shard_spec, take_snapshot
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.world import World

MESSAGE_BYTES = 64 << 20  # of one send
END_WAIT_S = 2.0  # for a copy that is under way when the run fails: its peers may be gone
LAST_COPY_WAIT_S = 60.0  # for one that is under way when the run ends: its peer may have failed to copy


@dataclass(frozen=True)
class NodeMemory:
    """Where the copies of a run lie in this node's memory, and which ranks share a node."""

    root: Path
    nodes: tuple[int, ...]  # of each rank

    @classmethod
    def join(cls, world: World, root: Path) -> "NodeMemory":
        """Make the folder of this node, and find out who shares it; all ranks call this together.

        Raises UserError, on all ranks, if a rank cannot make it.
        """
        problem, place = "", ""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = root.lstat()
            place = f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is a link, or a folder of another user; remove it")
        except OSError as error:
            problem = f"train.peer_copies.folder: {root} on {socket.gethostname()} cannot be used: {error.strerror}"
        places = cast(list[tuple[str, str]], world.all_gather((place, problem)))
        raise_first(problem for _, problem in places)
        numbers: dict[str, int] = {}
        return cls(root, tuple(numbers.setdefault(place, len(numbers)) for place, _ in places))

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return self._ranks_by_node[node]

    @cached_property
    def _ranks_by_node(self) -> list[list[int]]:
        ranks: list[list[int]] = [[] for _ in range(max(self.nodes) + 1)]
        for rank, node in enumerate(self.nodes):
            ranks[node].append(rank)
        return ranks

    @cached_property
    def peers(self) -> list[int | None]:
        """For each rank, the one whose node keeps a copy of its state; None on one node.

        Nodes keep each other's copies in pairs, the last three of an odd number in a ring: so the loss of two nodes
        seldom hits both copies of anything (GEMINI, SOSP 2023).
        """
        num_nodes = len(self._ranks_by_node)
        peers: list[int | None] = [None] * len(self.nodes)
        for node, ranks in enumerate(self._ranks_by_node if num_nodes > 1 else []):
            first_of_ring = num_nodes - 3
            in_ring = num_nodes % 2 == 1 and node >= first_of_ring
            other = first_of_ring + (node - first_of_ring + 1) % 3 if in_ring else node ^ 1
            candidates = self._ranks_by_node[other]
            for number, rank in enumerate(ranks):
                peers[rank] = candidates[number % len(candidates)]
        return peers

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks whose copies a rank keeps beside its own."""
        return [other for other, peer in enumerate(self.peers) if peer == rank]


def raise_first(problems: Any) -> None:
    """Raise UserError for the first problem that is not empty."""
    first = next(filter(None, problems), None)
    if first is not None:
        raise UserError(first)


class PeerCopies:
    """Copies one rank's state in a thread, at most one copy at a time, in turn into two slots.

    `done` tells whether this rank's part is complete, here and at its peer. The next copy may start once that is so on
    all ranks: it overwrites the copy before the last one.
    """

    def __init__(
        self,
        memory: NodeMemory,
        rank: SavedRank,
        state: Callable[[], Mapping[str, object]],
        course: str,
        kept_slot: int | None = None,
    ) -> None:
        """Take room for the copies; all ranks call this together.

        kept_slot: the copy from which the run goes on; the other one is written first.

        Raises UserError, on all ranks, if the memory of a node has not enough room.
        """
        self._memory, self._rank, self._state, self._course = memory, rank, state, course
        self._slot = 0 if kept_slot is None else 1 - kept_slot
        self._sent_to = memory.peers[rank.world.rank]
        # A group of its own, without a timeout: messages come as long as the slowest copy takes.
        self._group = rank.world.without_timeout().group if self._sent_to is not None else None
        shards = tensorfile.in_file_order(take_snapshot(rank, 0, {}).shards)
        self.num_bytes = memory_copies.num_file_bytes(shards)
        sizes = cast(list[int], rank.world.all_gather(self.num_bytes))
        self._sizes = {other: sizes[other] for other in (rank.world.rank, *memory.kept_by(rank.world.rank))}
        self._mapped: dict[int, dict[int, Tensor]] = {}  # by slot and rank: the memory of the files
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None  # what went wrong with a copy; none is taken afterwards
        self.step = 0  # after which the pending or the last copy was taken
        problem = ""
        try:
            for slot in (self._slot,) if kept_slot is not None else SLOTS:
                self._map(slot)
        except OSError as error:
            problem = self._no_room(error)
        raise_first(rank.world.all_gather(problem))

    def _no_room(self, error: OSError) -> str:
        free = os.statvfs(self._memory.root)
        free_gib = free.f_bavail * free.f_frsize / 2**30
        gib = 2 * sum(self._sizes.values()) / 2**30
        return (
            f"train.peer_copies.folder: {self._memory.root} on {socket.gethostname()} has no room for the copies of "
            f"rank {self._rank.world.rank}, {gib:.3g} GiB ({error.strerror}; {free_gib:.3g} GiB "
            "are left). Make it larger (Docker: --shm-size; else mount -o remount,size=), name another folder in "
            "memory, or set train.peer_copies.every to 0"
        )

    def _map(self, slot: int) -> None:
        """Take room for the files of a slot; what else the slot holds is of ranks that are on other nodes now."""
        folder = slot_folder(self._memory.root, slot)
        of_node = self._memory.ranks_of(self._memory.nodes[self._rank.world.rank])
        expected = {*of_node, *(other for rank in of_node for other in self._memory.kept_by(rank))}
        memory_copies.remove_files(folder, {*memory_copies.ranks_in(folder)} - expected)
        for rank in self._sizes:
            memory_copies.invalidate(folder, rank)
        self._mapped[slot] = {
            rank: memory_copies.map_file(folder / tensor_file(rank), num_bytes)
            for rank, num_bytes in self._sizes.items()
        }

    @property
    def pending(self) -> bool:
        """Whether a copy was started and not finished."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether this rank's part of the last copy is complete; never after one that failed."""
        return self.error is None and (self._thread is None or not self._thread.is_alive())

    def start(self, next_step: int) -> None:
        """Start to copy what steps from `next_step` on depend on. Weights do not change before this rank's is taken."""
        assert not self.pending, "two copies at once would leave none that is complete"
        try:
            if self._slot not in self._mapped:
                self._map(self._slot)
        except OSError as error:
            self.error = error
            return
        self.step = next_step
        world, folder, mapped = self._rank.world, slot_folder(self._memory.root, self._slot), self._mapped[self._slot]
        for rank in self._sizes:
            memory_copies.invalidate(folder, rank)
        snapshot = take_snapshot(self._rank, next_step, self._state())
        shards = tensorfile.in_file_order(snapshot.shards)
        memory_copies.write_header(mapped[world.rank], tensorfile.header_of(shards))
        copying = SnapshotCopy([shard.tensor for shard in shards], memory_copies.tensors_in(mapped[world.rank], shards))
        copied = [replace(shard, tensor=tensor) for shard, tensor in zip(shards, copying.copies, strict=True)]
        verify = partial(require_sums, copied, self._rank.checked_sums())
        snapshot = replace(snapshot, shards=copied, verify=verify)
        self._thread = threading.Thread(
            target=self._copy, args=(snapshot, copying, folder, mapped), name="mmtrain-copier", daemon=True
        )
        self._thread.start()
        self._rank.hold_update(copying.wait)
        self._slot = 1 - self._slot

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for the copy that is pending, at most `limit_s`."""
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None

    def remove(self) -> None:
        """Remove what the ranks of this node have copied, and what they keep for others; the run has ended."""
        self.finish(LAST_COPY_WAIT_S)
        self._mapped.clear()
        memory_copies.remove_all(self._memory.root)

    def _copy(self, snapshot: Snapshot, copying: SnapshotCopy, folder: Path, mapped: Mapping[int, Tensor]) -> None:
        try:
            copying.run()
            world = self._rank.world
            snapshot.verify()
            record = CopyRecord.of(snapshot, self._course, world.rank, world.size, mapped[world.rank])
            memory_copies.commit(folder, record)
            if self._sent_to is not None:
                self._exchange(record, folder, mapped)
        except BaseException as error:
            self.error = error

    def _exchange(self, record: CopyRecord, folder: Path, mapped: Mapping[int, Tensor]) -> None:
        """Send this rank's copy to its peer, and receive those that it keeps.

        Sends start before any wait: ranks that keep each other's copies would wait for each other.
        """
        own = self._rank.world.rank
        content = torch.frombuffer(bytearray(record.to_bytes()), dtype=torch.uint8)
        sends = [self._send(torch.tensor([len(content)])), self._send(content)]
        sends += [self._send(part) for part in torch.split(mapped[own], MESSAGE_BYTES)]
        for rank in self._sizes:
            if rank == own:
                continue
            size = torch.zeros(1, dtype=torch.int64)
            self._receive(size, rank).wait()
            content_there = torch.empty(int(size), dtype=torch.uint8)
            receives = [self._receive(content_there, rank)]
            receives += [self._receive(part, rank) for part in torch.split(mapped[rank], MESSAGE_BYTES)]
            for receive in receives:
                receive.wait()
            received = CopyRecord.from_bytes(content_there.numpy().tobytes())
            if memory_copies.bit_sum(mapped[rank]) != received.bit_sum:
                raise RuntimeError(f"the copy of rank {rank} changed on the way to rank {own}")
            memory_copies.commit(folder, received)
        for send in sends:
            send.wait()

    def _send(self, tensor: Tensor) -> dist.Work:
        assert self._sent_to is not None
        return _started(dist.isend(tensor, self._sent_to, group=self._group))

    def _receive(self, tensor: Tensor, rank: int) -> dist.Work:
        return _started(dist.irecv(tensor, rank, group=self._group))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


@dataclass(frozen=True)
class FoundCopy:
    """A copy that all nodes together have whole; equal on all ranks."""

    step: int
    slot: int
    holders: tuple[tuple[int, ...], ...]  # for each rank that copied: the nodes whose memory has its file


def find_newest_copy(world: World, memory: NodeMemory, course: str) -> FoundCopy | None:
    """Return the newest complete copy of this course of the run; None if there is none. All ranks call this together.

    The ranks of a node share the reading of its files.
    """
    node = memory.nodes[world.rank]
    of_node = memory.ranks_of(node)
    files = memory_copies.find_copied_ranks(memory.root)[of_node.index(world.rank) :: len(of_node)]
    seen = [(slot, memory_copies.read_record(slot_folder(memory.root, slot), rank)) for slot, rank in files]
    good = [(slot, r.rank, r.step, r.world_size) for slot, r in seen if r is not None and r.course == course]
    holders: defaultdict[tuple[int, int, int], defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for other, of_rank in enumerate(cast(list[list[tuple[int, int, int, int]]], world.all_gather(good))):
        for slot, rank, step, world_size in of_rank:
            holders[step, slot, world_size][rank].add(memory.nodes[other])
    complete = [key for key, of_ranks in holders.items() if of_ranks.keys() == set(range(key[2]))]
    if not complete:
        return None
    step, slot, world_size = newest = max(complete)
    return FoundCopy(step, slot, tuple(tuple(sorted(holders[newest][rank])) for rank in range(world_size)))


def open_found_copy(world: World, memory: NodeMemory, found: FoundCopy, rank_context: RankContext) -> Checkpoint:
    """Return the copy as a checkpoint, with what this node needs of it in its memory; all ranks call this together."""
    folder = slot_folder(memory.root, found.slot)
    node = memory.nodes[world.rank]
    is_first_here = memory.ranks_of(node)[0] == world.rank
    records = _share_records(world, memory, found, folder)
    checkpoint = memory_copies.open_copy(folder, records, rank_context.activity.files.advance)
    if is_first_here:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for record in records:
            (folder / state_file(record.rank)).write_bytes(record.rank_state_bytes())
    all_nodes = set(memory.nodes)
    if any(set(nodes) != all_nodes for nodes in found.holders):
        _fetch_files(world, memory, found, records, _needed_files(checkpoint, rank_context))
    world.all_gather(None)  # no rank reads before its node has everything
    return checkpoint


def _share_records(world: World, memory: NodeMemory, found: FoundCopy, folder: Path) -> list[CopyRecord]:
    """Return the records of all ranks that copied; the first rank of the first node that has a file reads it."""
    mine = {}
    for rank, nodes in enumerate(found.holders):
        if memory.ranks_of(nodes[0])[0] == world.rank:
            mine[rank] = memory_copies.record_file(folder, rank).read_bytes()
    gathered = cast(list[dict[int, bytes]], world.all_gather(mine))
    contents = {rank: content for of_rank in gathered for rank, content in of_rank.items()}
    return [CopyRecord.from_bytes(contents[rank]) for rank in range(len(found.holders))]


def _needed_files(checkpoint: Checkpoint, rank_context: RankContext) -> set[int]:
    """Return whose files this rank reads: it loads what it holds into itself, and so learns which pieces that is."""
    wanted = []

    def note(piece: Any) -> Tensor:
        wanted.append((piece.name, shard_spec(piece)))
        live: Tensor = piece.tensor
        return live.detach().clone()

    for unit in rank_context.optimizer.units.values():
        unit.load(note)
    return memory_copies.files_needed(checkpoint, wanted)


def _fetch_files(
    world: World, memory: NodeMemory, found: FoundCopy, records: Sequence[CopyRecord], needed: set[int]
) -> None:
    """Send files between the first ranks of nodes, one after another in an order that all ranks know."""
    folder, own = slot_folder(memory.root, found.slot), world.rank
    of_ranks = cast(list[set[int]], world.all_gather(needed))
    for rank, holders in enumerate(found.holders):
        sender = memory.ranks_of(holders[0])[0]
        for node in sorted(set(memory.nodes) - set(holders)):
            receiver = memory.ranks_of(node)[0]
            if own not in (sender, receiver) or not any(rank in of_ranks[other] for other in memory.ranks_of(node)):
                continue
            mapped = memory_copies.map_file(folder / tensor_file(rank), records[rank].num_bytes)
            for part in torch.split(mapped, MESSAGE_BYTES):
                if own == sender:
                    dist.send(part, receiver, group=world.group)
                else:
                    dist.recv(part, sender, group=world.group)
