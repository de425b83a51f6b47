"""Seconds of collectives by how their groups lie on nodes."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs import AnalyticCosts, GroupLayout, preset
from mmtrain.costs.collectives import collective_seconds

H100 = preset("h100-80g")
AT_ONCE = replace(
    H100,
    collective_start_s=0.0,
    group_rates=(),
    intra_node=replace(H100.intra_node, step_s=0.0),
    inter_node=replace(H100.inter_node, step_s=0.0),
)
GB = 10**9


def ring_seconds(per_node: int, nodes: int, nbytes: int, ranks_per_port: int = 1) -> float:
    """Play an all-gather: as many rings as a node has ranks, each entering and leaving the nodes at another rank.

    ranks_per_port: consecutive ranks of a node whose messages to other nodes leave through one port.
    """
    size = per_node * nodes
    carried: Counter[tuple[str, int]] = Counter()  # bytes that a rank sends over a link in one step
    for ring in range(per_node):
        order = [(ring + i) % per_node for i in range(per_node)]
        ranks = [node * per_node + local for node in range(nodes) for local in order]
        for rank, following in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            is_inside = rank // per_node == following // per_node
            link, place = ("nvlink", rank) if is_inside else ("port", rank // ranks_per_port)
            carried[link, place] += nbytes // per_node // size
    speed = {"nvlink": H100.intra_node.bytes_per_s, "port": H100.inter_node.bytes_per_s}
    return (size - 1) * max(sent / speed[link] for (link, _), sent in carried.items())


@pytest.mark.parametrize(("per_node", "nodes"), [(8, 1), (2, 1), (1, 2), (1, 7), (2, 4), (3, 2), (8, 2), (8, 16)])
def test_a_group_sends_through_a_port_for_each_rank_on_a_node(per_node: int, nodes: int) -> None:
    nbytes = 128 * 7 * 9 * 1000
    group = GroupLayout(per_node * nodes, nodes)
    # In a node of two or three ranks not every ring passes every NVLink, so the rings are a little faster.
    tolerance = 0.51 if 1 < per_node < 8 and nodes > 1 else 0.15
    gathered = collective_seconds(AT_ONCE, "all_gather", nbytes, group)
    assert gathered == pytest.approx(ring_seconds(per_node, nodes, nbytes), rel=1e-9 if nodes == 1 else tolerance)
    assert gathered >= ring_seconds(per_node, nodes, nbytes) * (1 - 1e-9)
    assert collective_seconds(AT_ONCE, "reduce_scatter", nbytes, group) == gathered
    assert collective_seconds(AT_ONCE, "all_reduce", nbytes, group) <= 2 * gathered * (1 + 1e-9)


@pytest.mark.parametrize(("per_node", "nodes"), [(8, 2), (8, 16), (72, 2), (72, 3)])
@pytest.mark.parametrize("ranks_per_port", [1, 2, 4])
def test_ranks_that_share_a_port_share_its_rate(per_node: int, nodes: int, ranks_per_port: int) -> None:
    """Whole nodes, and all groups of one rank a node at once, as the data-parallel groups of a tensor-parallel unit."""
    nbytes = 128 * 7 * 9 * 72 * 1000
    machine = replace(AT_ONCE, ports_per_rank=1 / ranks_per_port, ranks_per_node=per_node)
    whole = collective_seconds(machine, "all_gather", nbytes, GroupLayout(per_node * nodes, nodes))
    played = ring_seconds(per_node, nodes, nbytes, ranks_per_port)
    assert played * (1 - 1e-9) <= whole <= 1.15 * played
    through_port = Counter[int]()  # bytes that leave the first node in a step of each group's ring
    for rank in range(per_node):
        through_port[rank // ranks_per_port] += nbytes // nodes
    slowest = (nodes - 1) * max(through_port.values()) / H100.inter_node.bytes_per_s
    strided = GroupLayout.strided(nodes, per_node, per_node)
    assert collective_seconds(machine, "all_gather", nbytes, strided) == pytest.approx(slowest)


@pytest.mark.parametrize("ranks_per_port", [1, 2, 4, 8])
def test_messages_of_all_ranks_of_a_node_share_its_ports(ranks_per_port: int) -> None:
    """In a pipeline all eight ranks send to the next stage's node at once; a message waits for its port."""
    nbytes = 10**8
    machine = replace(H100, ports_per_rank=1 / ranks_per_port)
    through_port = Counter(rank // ranks_per_port for rank in range(8))
    slowest = max(through_port.values()) * nbytes / H100.inter_node.bytes_per_s
    costs = AnalyticCosts(machine, "bf16")
    assert costs.transfer(nbytes, same_node=False) == pytest.approx(H100.inter_node.latency_s + slowest)
    assert costs.transfer(nbytes, same_node=True) == AnalyticCosts(H100, "bf16").transfer(nbytes, same_node=True)
    assert costs.all_to_all(0, nbytes, GroupLayout(16, 2)) == costs.transfer(nbytes, same_node=False)


def test_an_nvl72_is_one_node() -> None:
    rack = preset("gb200-nvl72")
    inside, across = GroupLayout.strided(72, 1, rack.ranks_per_node), GroupLayout.strided(72, 2, rack.ranks_per_node)
    assert (inside.nodes, across.nodes, across.fewest_per_node) == (1, 2, 36)
    nbytes = GB
    once_s = 71 / 72 * nbytes / rack.collective_bytes_per_s(72, is_all_reduce=False)
    steps_s = rack.collective_start_s + 71 * rack.intra_node.step_s
    assert collective_seconds(rack, "all_gather", nbytes, inside) == pytest.approx(steps_s + once_s)
    one_a_rack = collective_seconds(rack, "all_gather", nbytes, GroupLayout.strided(2, 72, rack.ranks_per_node))
    assert one_a_rack == pytest.approx(
        rack.collective_start_s + rack.inter_node.step_s + nbytes / 2 / rack.inter_node.bytes_per_s
    )


def test_published_bandwidths_come_out() -> None:
    """Bus bandwidth of 4 GB, which nccl-tests print: bytes that a rank must send, over the seconds."""

    def bus_gb_s(name: str, group: GroupLayout) -> float:
        seconds = collective_seconds(preset(name), "all_gather", 4 * GB, group)
        return 4 * (group.size - 1) / group.size / seconds

    assert bus_gb_s("a100-80g", GroupLayout(8)) == pytest.approx(233, rel=0.05)  # NVIDIA/nccl#1048
    four_ports = replace(preset("a100-80g"), ports_per_rank=0.5)
    seconds = collective_seconds(four_ports, "all_gather", 4 * GB, GroupLayout(16, 2))
    assert 4 * 15 / 16 / seconds == pytest.approx(86, rel=0.15)  # the same place, of 96 that the ports carry
    assert bus_gb_s("h100-80g", GroupLayout(16, 2)) > 320  # NVIDIA/nccl-tests#267 has 46 to 49 a port


def test_replicas_on_whole_nodes_reduce_much_faster_than_through_one_port() -> None:
    """Two nodes of eight ranks that all hold the same parameters have eight ports between them."""
    whole = collective_seconds(H100, "reduce_scatter", 6 * GB, GroupLayout.strided(16, 1, 8))
    through_one_port = collective_seconds(H100, "reduce_scatter", 6 * GB, GroupLayout.strided(2, 8, 8))
    assert whole < through_one_port / 3.5


def test_an_all_reduce_over_many_nodes_takes_logarithmically_many_steps() -> None:
    small = 4
    seconds = {
        nodes: collective_seconds(H100, "all_reduce", small, GroupLayout(nodes, nodes)) for nodes in (2, 64, 128)
    }
    assert seconds[128] - seconds[64] == pytest.approx(2 * H100.inter_node.step_s)
    assert seconds[64] < 10 * seconds[2]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_layouts_of_strided_groups_are_those_of_their_ranks(size: int, stride: int, per_node: int, first: int) -> None:
    ranks = [first + k * stride for k in range(size)]
    on_node = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // per_node)]
    layout = GroupLayout.strided(size, stride, per_node, first)
    assert (layout.size, layout.nodes, layout.fewest_per_node) == (size, len(on_node), min(on_node))


def test_more_bytes_more_nodes_and_fewer_ports_never_make_it_faster() -> None:
    for kind, nodes in itertools.product(("all_reduce", "all_gather", "reduce_scatter", "broadcast"), (1, 2, 4, 8)):
        group = GroupLayout(8, nodes)
        seconds = [collective_seconds(H100, kind, nbytes, group) for nbytes in (0, 1000, 10**6, GB)]
        assert seconds == sorted(seconds)
        assert collective_seconds(replace(H100, ports_per_rank=0.5), kind, GB, group) >= seconds[-1]
        if nodes > 1:
            assert collective_seconds(H100, kind, GB, GroupLayout(8, nodes // 2)) <= seconds[-1]
