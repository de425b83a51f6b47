"""Messages and collectives are measured on one node and across nodes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmtrain.costs import CostTable
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.errors import LaunchError
from mmtrain.runtime.profiling.message_profiler import (
    gemm_slowdown,
    measure_node_groups,
    measure_node_links,
    processor_share,
)
from mmtrain.runtime.profiling.profile import ProfileRequest, profile_node_links, ranks_per_node
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.world import Address, World, join, leave
from tests.distributed import fork_ranks
from tests.planning import factory

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")


def _profile(rank: int, size: int, folder: Path, port: int) -> str | None:
    address = Address(rank, size, rank % 2, "127.0.0.1", port, "torchrun", ranks_per_node=2)
    table = profile_node_links(ProfileRequest(factory.recipe(), "cpu-core", size, {}), address)
    return None if table is None else table.model_dump_json()


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_measured_whole_and_by_place() -> None:
    text, *others = fork_ranks(4, _profile, free_port())
    assert others == [None] * 3
    table = CostTable.model_validate_json(text)
    whole, by_place = {(kind, 4, 2) for kind in COLLECTIVES}, {(kind, 2, 2) for kind in COLLECTIVES}
    assert table.by_message.keys() == {("p2p", 2, 2), *whole, *by_place}
    assert all(seconds > 0 for entry in table.messages for seconds in entry.seconds)
    assert table.time_spread is not None
    assert table.time_spread.ranks is not None


def _in_groups(rank: int, size: int, folder: Path, port: int) -> list[MessageEntry]:
    world = join(Address(rank, size, rank, "127.0.0.1", port, "mmtrain"))
    entries = measure_node_groups(world, 2, sizes=(2**10, 2**14), with_overlap=True)
    leave()
    return entries


@pytest.mark.slow
def test_groups_of_a_node_are_measured_side_by_side() -> None:
    for entries in fork_ranks(4, _in_groups, free_port()):
        assert {(entry.kind, entry.size, entry.nodes) for entry in entries} == {
            ("p2p", 2, 1),
            *((kind, 2, 1) for kind in COLLECTIVES),
        }
        assert all(seconds > 0 for entry in entries for seconds in entry.seconds)
        overlapped = {entry.kind for entry in entries if entry.overlap_slowdown}
        assert overlapped == {"all_gather", "all_reduce", "reduce_scatter"}


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (5, 2)])
def test_ranks_on_one_node_or_unevenly_spread_are_rejected(size: int, per_node: int) -> None:
    with pytest.raises(LaunchError, match=rf"found {size} ranks with 2 on a node; to measure the links"):
        measure_node_links(World(0, size, torch.device("cpu")), per_node)


@pytest.mark.parametrize(
    ("hardware", "cluster", "per_machine", "per_node"),
    [
        ("h100-80g", {}, 8, 8),
        ("h100-80g", {}, 4, 4),  # half a node each
        ("gb200-nvl72", {}, 4, 72),  # a machine has four GPUs, an NVLink domain 18 machines
        ("h100-80g", {"ranks_per_node": 16}, 8, 16),
        ("h100-80g", {"ranks_per_node": 12}, 8, 8),
    ],
)
def test_a_node_may_hold_several_machines(
    hardware: str, cluster: dict[str, int], per_machine: int, per_node: int
) -> None:
    request = ProfileRequest(factory.recipe(cluster=cluster), hardware, 144, {})
    address = Address(0, 144, 0, "127.0.0.1", 1, "torchrun", ranks_per_node=per_machine)
    assert ranks_per_node(request, address) == per_node


def _losses_beside_an_all_reduce(rank: int, size: int, folder: Path, port: int) -> tuple[float, float]:
    world = join(Address(rank, size, rank, "127.0.0.1", port, "mmtrain"))
    data = torch.zeros(2**18)

    def start_collective() -> object:
        return dist.all_reduce(data, async_op=True)

    shares = processor_share(world, start_collective), gemm_slowdown(world, start_collective, 1e-4, side=32)
    leave()
    return shares


@pytest.mark.slow
def test_what_compute_loses_beside_a_collective_is_a_share_of_it() -> None:
    for processor, gemms in fork_ranks(2, _losses_beside_an_all_reduce, free_port()):
        assert 0.0 < processor <= 1.0, "gloo uses the core"
        assert 0.0 <= gemms <= 1.0
