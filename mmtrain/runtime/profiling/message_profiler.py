"""Time messages and collectives, between the ranks of one node and across nodes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.costs.collectives import CollectiveKind
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.errors import LaunchError
from mmtrain.runtime.gloo_threads import calm_gloo_threads
from mmtrain.runtime.profiling.layer_profiler import median_without_outliers
from mmtrain.runtime.world import World

WARM_UP_REPEATS = 2
REPEATS = 7
BEFORE_GEMM_SIDE, GEMMS_BEFORE = 512, 2  # of those before each collective on a CPU: about 5 ms of a core
BESIDE_GEMM_SIDE = 2048  # of those timed beside collectives: each occupies all multiprocessors of a GPU
GEMMS_PER_REPEAT = 8  # of timing one
MESSAGE_BYTES = tuple(2**k for k in (10, 14, 18, 20, 22, 24))
GroupKind = CollectiveKind | Literal["all_to_all"]
MessageKind = Literal["p2p"] | GroupKind
_COLLECTIVES: tuple[GroupKind, ...] = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_OVERLAPPED = ("all_reduce", "all_gather", "reduce_scatter")  # those of tensor parallelism


@dataclass(frozen=True)
class _Members:
    """Ranks whose messages are timed, evenly spread over nodes. All ranks of a world time them together."""

    ranks: tuple[int, ...]  # ascending
    nodes: int
    group: dist.ProcessGroup | None  # None: the default group, or this rank only waits for the others


def measure_messages(world: World, sizes: tuple[int, ...] = MESSAGE_BYTES) -> list[MessageEntry]:
    """Time messages of `sizes` bytes between the first two ranks, and collectives over all ranks, on one node."""
    everyone = _Members(tuple(range(world.size)), 1, None)
    kinds: tuple[MessageKind, ...] = ("p2p", *_COLLECTIVES)
    return [_measure(world, kind, everyone, sizes) for kind in kinds]


def measure_node_groups(
    world: World, group_size: int, sizes: tuple[int, ...] = MESSAGE_BYTES, with_overlap: bool = False
) -> list[MessageEntry]:
    """Time messages between the first two ranks, and collectives inside groups of a node's ranks.

    All groups begin at the same time, as the tensor-parallel groups of a step do, and the ranks that hold one copy of
    sharded units.

    Args:
        world: of one node; its size is a multiple of `group_size`.
        group_size: ranks of a group.
        sizes: bytes of the messages and collectives.
        with_overlap: also measure what compute beside the collectives loses.
    """
    between_two = _measure(world, "p2p", _Members(tuple(range(world.size)), 1, None), sizes)
    groups = [tuple(range(first, first + group_size)) for first in range(0, world.size, group_size)]
    return [between_two, *_measure_collectives(world, groups, 1, sizes, with_overlap)]


def measure_node_links(world: World, per_node: int, sizes: tuple[int, ...] = MESSAGE_BYTES) -> list[MessageEntry]:
    """Time messages between two nodes, and collectives over 2, 4, ... and all nodes.

    Collectives are timed over all ranks of the nodes, and over one rank of each node, for all ranks of a node at once:
    so the data-parallel groups of a tensor-parallel unit share the network in a step. Messages are timed so, too: each
    rank of the first node sends to its counterpart on the second, as in a pipeline, and they share the node's ports.

    per_node: ranks of a node.

    Raises LaunchError if the ranks are not spread evenly over at least two nodes.
    """
    num_nodes, left_over = divmod(world.size, per_node)
    if num_nodes < 2 or left_over:
        raise LaunchError(
            f"mmtrain profile: found {world.size} ranks with {per_node} on a node; to measure the links between nodes, "
            "start equally many ranks on each of two or more nodes; to measure one machine, start `mmtrain profile` "
            "there without a launcher"
        )
    place = world.rank % per_node
    entries = [_measure(world, "p2p", _Members((place, per_node + place), 2, None), sizes)]
    for nodes in sorted({2**k for k in range(1, num_nodes.bit_length())} | {num_nodes}):
        ranks = range(nodes * per_node)
        entries += _measure_collectives(world, [tuple(ranks)], nodes, sizes)
        if per_node > 1:
            entries += _measure_collectives(world, [tuple(ranks[k::per_node]) for k in range(per_node)], nodes, sizes)
    return entries


def _measure_collectives(
    world: World,
    rank_groups: list[tuple[int, ...]],
    nodes: int,
    sizes: tuple[int, ...],
    with_overlap: bool = False,
) -> list[MessageEntry]:
    """Time collectives that groups of equal size begin at the same time. Every rank of the world calls this."""
    members = _Members(rank_groups[0], nodes, None)
    for ranks in rank_groups:
        group = dist.new_group(list(ranks))
        if world.rank in ranks:
            members = _Members(ranks, nodes, group)
    calm_gloo_threads()
    entries = [_measure(world, kind, members, sizes) for kind in _COLLECTIVES]
    if with_overlap:
        entries = [_with_overlap(world, entry, members) for entry in entries]
    if members.group is not None:
        dist.destroy_process_group(members.group)
    return entries


def _measure(world: World, kind: MessageKind, members: _Members, sizes: tuple[int, ...]) -> MessageEntry:
    """Time one kind of message or collective; all ranks of the world call this.

    In a run a collective follows layers. On a CPU its ranks are a little out of step then, and its threads asleep, so
    it does here too, and the mean over ranks counts: what each waits for the other on average.
    """
    size = 2 if kind == "p2p" else len(members.ranks)
    num_gemms = GEMMS_BEFORE if kind != "p2p" and world.device.type == "cpu" else 0
    matrix = torch.randn(BEFORE_GEMM_SIDE, BEFORE_GEMM_SIDE)
    takes_part = world.rank in members.ranks
    seconds = []
    for nbytes in sizes:
        data = torch.zeros(nbytes // 4 // size * size, device=world.device)
        operation = _operation(kind, data, members, world.rank)
        times = []
        for _ in range(WARM_UP_REPEATS + REPEATS):
            world.barrier()
            for _ in range(num_gemms):
                torch.mm(matrix, matrix)
            start_s = _now_s(world.device)
            if takes_part:
                operation()
            times.append(_now_s(world.device) - start_s)
        median_s = median_without_outliers(times[WARM_UP_REPEATS:])
        if kind != "p2p":
            of_ranks = cast(list[float | None], world.all_gather(median_s if takes_part else None))
            median_s = statistics.fmean(of_rank for of_rank in of_ranks if of_rank is not None)
        seconds.append(median_s)
    return MessageEntry(kind=kind, size=size, nodes=members.nodes, nbytes=sizes, seconds=tuple(seconds))


def _with_overlap(world: World, entry: MessageEntry, members: _Members) -> MessageEntry:
    """Return the entry of a collective with the share of its time that compute beside it loses, by size."""
    if entry.kind not in _OVERLAPPED:
        return entry
    slowdowns = []
    for nbytes, collective_s in zip(entry.nbytes, entry.seconds, strict=True):
        data = torch.zeros(nbytes // 4 // entry.size * entry.size, device=world.device)
        start_collective = _operation(entry.kind, data, members, world.rank, async_op=True)
        if world.device.type == "cpu":
            slowdowns.append(processor_share(world, start_collective))
        else:
            slowdowns.append(gemm_slowdown(world, start_collective, collective_s, BESIDE_GEMM_SIDE))
    return entry.model_copy(update={"overlap_slowdown": tuple(slowdowns)})


def processor_share(world: World, start_collective: Callable[[], object]) -> float:
    """Return the share of a collective's time in which it occupies the core of its rank, least of several repeats.

    Processor time and not what GEMMs beside it lose: of a few milliseconds, other work on the machine takes more.
    """
    times = []
    for _ in range(WARM_UP_REPEATS + REPEATS):
        world.barrier()
        start_s, start_processor_s = time.perf_counter(), time.process_time()
        start_collective().wait()  # type: ignore[attr-defined]
        times.append((time.process_time() - start_processor_s, time.perf_counter() - start_s))
    processor_s, elapsed_s = np.array(times[WARM_UP_REPEATS:]).min(axis=0).tolist()
    return float(np.clip(processor_s / elapsed_s, 0.0, 1.0))


def gemm_slowdown(world: World, start_collective: Callable[[], object], collective_s: float, side: int) -> float:
    """Return the share of a collective's time by which it lengthens GEMMs that take about as long and run beside it.

    The least of several repeats counts, since other work on the machine makes each longer. The GEMMs are (side, side).
    """
    device = world.device
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)

    def compute(num_gemms: int) -> None:
        for _ in range(num_gemms):
            torch.mm(matrix, matrix)

    def both(num_gemms: int) -> None:
        work = start_collective()
        compute(num_gemms)
        work.wait()  # type: ignore[attr-defined]

    def elapsed(run: Callable[[int], None], num_gemms: int) -> float:
        world.barrier()
        start_s = _now_s(device)
        run(num_gemms)
        return _now_s(device) - start_s

    gemm_s = min(elapsed(compute, GEMMS_PER_REPEAT) for _ in range(REPEATS)) / GEMMS_PER_REPEAT
    num_gemms = world.broadcast(max(1, round(collective_s / gemm_s)))
    assert isinstance(num_gemms, int)
    times = [
        (elapsed(compute, num_gemms), elapsed(both, 0), elapsed(both, num_gemms))
        for _ in range(WARM_UP_REPEATS + REPEATS)
    ]
    gemms_s, alone_s, both_s = np.array(times[WARM_UP_REPEATS:]).min(axis=0).tolist()
    lost_s = both_s - max(gemms_s, alone_s)
    return float(np.clip(lost_s / min(gemms_s, alone_s), 0.0, 1.0))


def _operation(
    kind: MessageKind, data: Tensor, members: _Members, rank: int, async_op: bool = False
) -> Callable[[], object]:
    """Return what a rank does in one message or collective of `data`; with `async_op` a collective is only started."""
    ranks, group = members.ranks, members.group
    own_part = data.chunk(len(ranks))[ranks.index(rank) if rank in ranks else 0].clone()
    # torch 2.13 renamed these and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    match kind:
        case "p2p":
            return lambda: dist.send(data, ranks[1]) if rank == ranks[0] else _receive(data, ranks, rank)
        case "all_reduce":
            return lambda: dist.all_reduce(data, group=group, async_op=async_op)
        case "broadcast":
            return lambda: dist.broadcast(data, src=ranks[0], group=group)
        case "all_gather":
            return lambda: gather(data, own_part, group=group, async_op=async_op)
        case "all_to_all":
            received = torch.empty_like(data)
            return lambda: dist.all_to_all_single(received, data, group=group, async_op=async_op)
        case "reduce_scatter":
            return lambda: scatter(own_part, data, group=group, async_op=async_op)


def _receive(data: Tensor, ranks: tuple[int, ...], rank: int) -> None:
    """Receive what the first of `ranks` sends to the second; others do nothing."""
    if rank == ranks[1]:
        dist.recv(data, ranks[0])


def _now_s(device: torch.device) -> float:
    """Return the time when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
