"""Probe every channel before training, so that a broken connection is named at once and not an hour later."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.errors import LaunchError
from mmtrain.program import Action, Recv, Send
from mmtrain.runtime.execution.process_groups import ProcessGroups
from mmtrain.runtime.world import World

CHANNEL_PROBE_TIMEOUT = timedelta(seconds=60)


def probe_channels(actions: Iterable[Action], groups: ProcessGroups, world: World) -> None:
    """Send one number over every channel that the program uses, in the program's own order.

    Raises LaunchError naming the edge and the peer that did not answer.
    """
    probed: set[tuple[object, ...]] = set()
    pending: list[tuple[dist.Work, torch.Tensor, Send | Recv]] = []
    for action in actions:
        if not isinstance(action, Send | Recv):
            continue
        channel = (type(action), action.edge, action.payload, action.peer)
        if channel in probed:
            continue
        probed.add(channel)
        group = groups.channels[action.edge, action.payload]
        number = torch.full((1,), float(world.rank), device=world.device)
        post = dist.isend if isinstance(action, Send) else dist.irecv
        work = post(number, action.peer, group=group)
        assert work is not None
        pending.append((work, number, action))
    for work, number, action in pending:
        try:
            work.wait(CHANNEL_PROBE_TIMEOUT)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {world.rank} cannot reach rank {action.peer} for {action.payload}s over edge {action.edge}: "
                f"{str(error).splitlines()[0]}. Check firewalls and the network interface between their machines"
            ) from error
        if isinstance(action, Recv) and int(number) != action.peer:
            raise LaunchError(
                f"rank {world.rank} expected rank {action.peer} on edge {action.edge}, "
                f"but rank {int(number)} answered; start the job again"
            )
