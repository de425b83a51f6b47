"""Create the process groups of a stage graph and connect them, on all ranks in one order.

Every channel (edge, payload, sender, receiver) has a group of its two ranks. NCCL has no tags: it runs the messages of
one communicator one after another, and a message that waits for its other end holds up those behind it, whichever way
they go. The deadlock test (`program.verify.deadlock`) therefore holds for one communicator a channel and for no fewer.

NCCL makes a communicator when a group is first used, and then blocks the rank until every other member uses it too. Two
ranks that start with different groups would wait for each other forever. So communicators are made here, before any
action runs, in the order of their creation, which is the same on all ranks.
Every channel is probed before training, so that a broken connection is named at once and not an hour later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import LayerShape, expert_shard
from mmtrain.models.stage.fully_sharded import UnitSharding, shard_mesh
from mmtrain.program import Dispatch, Edge, Recv, Send, Share, StageGraph, UnitMesh
from mmtrain.program.ir.channels import Channel, graph_channels
from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.gloo_threads import calm_gloo_threads
from mmtrain.runtime.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL
import contextlib
from collections.abc import Iterator
from datetime import timedelta

from mmtrain.errors import LaunchError

# Thread blocks of a channel's kernels. A receive occupies them while it waits, beside the layers that compute, and a
# message between two ranks needs few. Groups of collectives keep NCCL's default of up to 32. Not measured yet.
MAX_CHANNEL_THREAD_BLOCKS = 8
CHANNEL_PROBE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that this rank is a member of."""

    units: dict[str, ParallelGroups]
    channels: dict[Channel, dist.ProcessGroup]
    sharding: dict[str, UnitSharding]  # of units whose replicas hold shards, by unit; see `models.fully_sharded`
    tied_embeddings: dist.ProcessGroup | None  # first and last LLM stage of this rank's replica, same TP rank
    connected: tuple[dist.ProcessGroup, ...]  # those with more than one member, but for `later`; in order of creation
    later: tuple[dist.ProcessGroup, ...]  # of pipeline ranks, which only generation uses: connected by its first use


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until the message has arrived, or has left."""


@dataclass(frozen=True)
class Transport:
    """How one rank sends and receives rows: over which groups, and in which format."""

    rank: int
    groups: ProcessGroups
    widths: Mapping[Edge, int]  # features in a row, over each edge
    token_shards: Mapping[str, int]  # unit with sequence parallelism -> ranks that shard its tokens between stages
    device: torch.device
    dtype: torch.dtype
    # Edges inside a generator, over which a flat state goes, with the layer that reads it.
    state_readers: Mapping[Edge, LayerShape] = field(default_factory=dict)

    def send(self, rows: Tensor, message: Send) -> Pending:
        """Start to send rows to the message's peer; they must not change before they have left."""
        work = dist.isend(rows, message.peer, group=self.groups.channels[channel_of(message, self.rank)])
        assert work is not None
        return work

    def receive(self, rows: Tensor, message: Recv) -> Pending:
        """Start to receive rows from the message's peer."""
        work = dist.irecv(rows, message.peer, group=self.groups.channels[channel_of(message, self.rank)])
        assert work is not None
        return work

    def share(self, tensor: Tensor, share: Share, root: int) -> None:
        """Broadcast what the first rank of a TP group received, `root`, to the rest of it."""
        unit = (share.edge.dst if share.payload == "activation" else share.edge.src).unit
        dist.broadcast(tensor, src=root, group=self.groups.units[unit].tp)

    def exchange(
        self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], dispatch: Dispatch
    ) -> Tensor:
        """Send rows to all replicas and return those that they send, both in the order of the replicas.

        All replicas call this together. num_sent, num_received: rows to and from each of them.
        """
        received = rows.new_empty(sum(num_received), rows.shape[1])
        group = self.groups.units[dispatch.edge.src.unit].dp
        dist.all_to_all_single(received, rows, list(num_received), list(num_sent), group=group)
        return received

    def gather_rows(self, rows: Tensor, num_rows: int, dispatch: Dispatch) -> Tensor:
        """Return the rows of all replicas, as (replicas, num_rows, width); each replica's are padded to `num_rows`.

        All replicas call this together.
        """
        group = self.groups.units[dispatch.edge.src.unit].dp
        padded = rows.new_zeros(num_rows, rows.shape[1])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(group.size() * num_rows, rows.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return gathered.view(group.size(), num_rows, rows.shape[1])


def channel_text(channel: Channel) -> str:
    """Describe a channel for a user."""
    edge, payload, sender, receiver = channel
    return f"{payload}s over edge {edge} from rank {sender} to rank {receiver}"


def channel_of(message: Send | Recv, rank: int) -> Channel:
    """Return the channel over which `rank` sends or receives the message."""
    if isinstance(message, Send):
        return message.edge, message.payload, rank, message.peer
    return message.edge, message.payload, message.peer, rank


def build_groups(graph: StageGraph, world: World, activity: Activity | None = None) -> ProcessGroups:
    """Create every group of the graph and its communicator; return the groups that this rank belongs to.

    All ranks call this together. A rank that does not come is noticed by the watchdog, which finds in `activity` what
    it is missing for.
    """
    creator = _GroupCreator(world, activity or Activity())
    units: dict[str, ParallelGroups] = {}
    sharding = _create_sharding(creator, graph)
    for mesh in graph.meshes:
        tp, dp, pp, *optional = (
            creator.create(lines, f"the {axis} group of {mesh.unit}", connect=axis != "pp")
            for axis, lines in _mesh_lines(mesh).items()
        )
        if tp and dp and pp:
            units[mesh.unit] = ParallelGroups(tp, dp, pp, *optional)
    channels: dict[Channel, dist.ProcessGroup] = {}
    for channel in graph_channels(graph):
        _, _, sender, receiver = channel
        group = creator.create([sorted((sender, receiver))], channel_text(channel), for_messages=True)
        if group:
            channels[channel] = group
    tied_embeddings = creator.create(_tied_pairs(graph), "the group of tied embeddings")
    creator.connect()
    return ProcessGroups(units, channels, sharding, tied_embeddings, tuple(creator.purposes), tuple(creator.later))


def release_groups(groups: ProcessGroups) -> None:
    """Leave the groups of a stage graph, which hold connections and a GPU's memory; all ranks call this together."""
    alone = [group for unit in groups.units.values() for group in unit.all if group.size() == 1]
    for group in dict.fromkeys((*alone, *groups.connected, *groups.later)):
        dist.destroy_process_group(group)


def _create_sharding(creator: "_GroupCreator", graph: StageGraph) -> dict[str, UnitSharding]:
    """Create the groups of sharded units; those on the same ranks, divided alike into TP groups, have the same groups.

    The ranks at one place in the TP groups of all replicas share what that place holds; of experts, every `ep`-th.
    """
    meshes: dict[tuple[tuple[int, ...], int, int, int], DeviceMesh] = {}
    sharding = {}
    for mesh in graph.meshes:
        if mesh.shard is None:
            continue
        of_unit = []
        for ep in (1, mesh.ep):
            key = (mesh.ranks, mesh.tp, mesh.shard, ep)
            if key not in meshes:
                places = [list(mesh.ranks[place :: mesh.tp * ep]) for place in range(mesh.tp * ep)]
                meshes[key] = _create_shard_mesh(
                    creator, places, expert_shard(mesh.shard, ep), " of experts" * (ep > 1)
                )
            of_unit.append(meshes[key])
        sharding[mesh.unit] = UnitSharding(*of_unit)
    return sharding


def _create_shard_mesh(creator: "_GroupCreator", places: Sequence[list[int]], shard: int, of_what: str) -> DeviceMesh:
    """Create the groups of ranks that hold the same parameters; `shard` of each such list hold one copy together."""
    copies_at = [[ranks[first : first + shard] for first in range(0, len(ranks), shard)] for ranks in places]
    owners = [list(ranks) for copies in copies_at for ranks in zip(*copies, strict=True)]
    has_copies = len(copies_at[0]) > 1
    of_owners = creator.create(owners, f"the group of ranks with equal shards{of_what}") if has_copies else None
    of_copy = creator.create(chain.from_iterable(copies_at), f"the group of ranks that hold one copy{of_what}")
    assert of_copy is not None, "sharded units lie on all ranks"
    groups = [of_copy] if of_owners is None else [of_owners, of_copy]
    copies = next(copies for copies in copies_at if any(creator.rank in ranks for ranks in copies))
    return shard_mesh(groups, copies, creator.device)


class _GroupCreator:
    """Creates groups. Every rank must ask for the same ones in the same order: torch counts them for their names."""

    def __init__(self, world: World, activity: Activity) -> None:
        self._world, self._activity = world, activity
        # The default group has gloo beside NCCL, for objects; these groups exchange tensors of the device only.
        self._backend = "nccl" if world.device.type == "cuda" else "gloo"
        self.purposes: dict[dist.ProcessGroup, str] = {}  # of this rank's groups with other members, in order
        self.later: list[dist.ProcessGroup] = []  # likewise, of those that are not to be connected
        # No other rank need take part in a group of one; all groups of this rank alone are this one.
        self._alone = dist.new_group([world.rank], backend=self._backend, use_local_synchronization=True)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    def create(
        self, groups: Iterable[list[int]], purpose: str, for_messages: bool = False, connect: bool = True
    ) -> dist.ProcessGroup | None:
        """Create one group for each list of ranks; return the one with this rank in it."""
        mine: dist.ProcessGroup | None = None
        for ranks in groups:
            if ranks == [self._world.rank]:
                mine = self._alone
            elif len(ranks) > 1:
                options = _message_options() if for_messages and self._backend == "nccl" else None
                is_mine = self._world.rank in ranks
                if is_mine:
                    self._activity.connect(f"{purpose}, ranks {ranks}")
                timeout = self._world.collective_timeout
                group = dist.new_group(ranks, timeout=timeout, backend=self._backend, pg_options=options)
                if is_mine:
                    mine = group
                    if connect:
                        self.purposes[group] = f"{purpose}, ranks {ranks}"
                    else:
                        self.later.append(group)
        return mine

    def connect(self) -> None:
        """Make the communicators of all groups, and of the default group, where the backend has any (not gloo)."""
        device = self._world.device
        if self._world.size > 1:
            self._activity.connect("the group of all ranks")
            _communicate_eagerly(dist.group.WORLD, device)
        for group, purpose in self.purposes.items():
            self._activity.connect(purpose)
            _communicate_eagerly(group, device)
        calm_gloo_threads()


def _communicate_eagerly(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make a group's communicator now; with it NCCL sends messages too, and makes no other one for a pair of ranks.

    The device must not be bound to the default group for that: torch would split every later group from it, and a split
    waits for all ranks, also where a single rank creates a group of its own.
    """
    assert group is not None, "the default group exists"
    group._get_backend(device).eager_connect_single_device(device)


def _message_options() -> "ProcessGroupNCCL.Options":
    """Return options of a channel's communicator: few thread blocks, which start before those of layers."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs do not have it

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CHANNEL_THREAD_BLOCKS
    return options


def _mesh_lines(mesh: UnitMesh) -> dict[str, list[list[int]]]:
    """Return the lines of ranks along the mesh's axes, in the order of `ParallelGroups`.

    Along dp lie all replicas, those of one cp group too.
    """
    tp, replicas, pp = range(mesh.tp), range(mesh.num_replicas), range(mesh.pp)
    tp_groups = {(p, r): mesh.tp_group(p, r) for p in pp for r in replicas}
    cp_groups = [mesh.cp_replicas(first) for first in replicas[:: mesh.cp]] if mesh.cp > 1 else []
    ep_groups = [replicas[first : first + mesh.ep] for first in replicas[:: mesh.ep]] if mesh.ep > 1 else []
    reduces_apart = mesh.ep > 1 and mesh.shard is None  # else FSDP reduces gradients, over meshes of its own
    copies_of_experts = [replicas[place :: mesh.ep] for place in range(mesh.ep)] if reduces_apart else []
    return {
        "tp": [list(tp_group) for tp_group in tp_groups.values()],
        "dp": [[tp_groups[p, r][t] for r in replicas] for p in pp for t in tp],
        "pp": [[tp_groups[p, r][t] for p in pp] for r in replicas for t in tp],
        "cp": [[tp_groups[p, r][t] for r in cp_group] for p in pp for cp_group in cp_groups for t in tp],
        "ep": [[tp_groups[p, r][t] for r in ep_group] for p in pp for ep_group in ep_groups for t in tp],
        "expert_dp": [[tp_groups[p, r][t] for r in copies] for p in pp for copies in copies_of_experts for t in tp],
    }


def _tied_pairs(graph: StageGraph) -> list[list[int]]:
    """Return the ranks that hold the same shard of a matrix that the LLM's first and last stage both hold."""
    ends = [graph.stage(stage_id).tp_groups for stage_id in shared_embedding_stages(graph)]
    return [list(pair) for tp_groups in zip(*ends, strict=True) for pair in zip(*tp_groups, strict=True)]


def probe_channels(groups: ProcessGroups, world: World, activity: Activity | None = None) -> None:
    """Send one number over every channel of this rank, in the order of their creation, which all ranks share.

    A backend may block a rank at its first message of a channel until the other end has come too. In the order of the
    program, in which receives are posted ahead, ranks would then wait for each other in a cycle.

    Raises LaunchError naming the edge and the peer that did not answer.
    """
    activity = activity or Activity()
    pending: list[tuple[dist.Work, torch.Tensor, Channel]] = []
    for channel, group in groups.channels.items():
        number = torch.full((1,), float(world.rank), device=world.device)
        activity.connect(channel_text(channel))
        with _failure_named(channel, world.rank):
            work = _post(number, channel, group, world.rank)
        pending.append((work, number, channel))
    for work, number, channel in pending:
        activity.connect(channel_text(channel))
        with _failure_named(channel, world.rank):
            work.wait(CHANNEL_PROBE_TIMEOUT)
        edge, _, sender, receiver = channel
        if world.rank == receiver and int(number) != sender:
            raise LaunchError(
                f"rank {receiver} expected rank {sender} on edge {edge}, but rank {int(number)} answered; "
                "start the job again"
            )


def _post(number: torch.Tensor, channel: Channel, group: dist.ProcessGroup, rank: int) -> dist.Work:
    _, _, sender, receiver = channel
    work = dist.isend(number, receiver, group=group) if rank == sender else dist.irecv(number, sender, group=group)
    assert work is not None
    return work


@contextlib.contextmanager
def _failure_named(channel: Channel, rank: int) -> Iterator[None]:
    edge, payload, sender, receiver = channel
    peer = receiver if rank == sender else sender
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} cannot reach rank {peer} for {payload}s over edge {edge}: "
            f"{str(error).splitlines()[0]}. Check firewalls and the network interface between their machines"
        ) from error
