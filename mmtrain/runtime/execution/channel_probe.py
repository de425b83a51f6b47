"""Probe every channel before training, so that a broken connection is named at once and not an hour later."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.errors import LaunchError
from mmtrain.program.ir.channels import Channel
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.process_groups import ProcessGroups, channel_text
from mmtrain.runtime.world import World

CHANNEL_PROBE_TIMEOUT = timedelta(seconds=60)


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
