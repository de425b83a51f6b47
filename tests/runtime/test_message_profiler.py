"""Messages and collectives are measured on one node and across nodes."""

from pathlib import Path

import pytest
import torch

from mmtrain.costs import CostTable
from mmtrain.errors import LaunchError
from mmtrain.runtime.profiling.message_profiler import measure_node_links
from mmtrain.runtime.profiling.profile import ProfileRequest, profile_node_links
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.world import Address, World
from tests.distributed import fork_ranks
from tests.plan import factory

COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")


def _profile(rank: int, size: int, folder: Path, port: int) -> str | None:
    address = Address(rank, size, rank % 2, "127.0.0.1", port, "torchrun", ranks_per_node=2)
    table = profile_node_links(ProfileRequest(factory.recipe(), "cpu-core", size, {}), address)
    return None if table is None else table.model_dump_json()


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_measured_whole_and_by_place() -> None:
    text, *others = fork_ranks(4, _profile, free_port(), timeout=120)
    assert others == [None] * 3
    table = CostTable.model_validate_json(text)
    whole, by_place = {(kind, 4, 2) for kind in COLLECTIVES}, {(kind, 2, 2) for kind in COLLECTIVES}
    assert table.by_message.keys() == {("p2p", 2, 2), *whole, *by_place}
    assert all(seconds > 0 for entry in table.messages for seconds in entry.seconds)


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (5, 2)])
def test_ranks_on_one_node_or_unevenly_spread_are_rejected(size: int, per_node: int) -> None:
    address = Address(0, size, 0, "127.0.0.1", 1, "torchrun", ranks_per_node=per_node)
    with pytest.raises(LaunchError, match=rf"found {size} ranks with 2 on a node; to measure the links"):
        measure_node_links(World(0, size, torch.device("cpu")), address)
