"""On random programs the simulator is exact, its ranks that do the same do, and its critical path is the step."""

from dataclasses import replace
from itertools import pairwise
from math import fsum
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.program import (
    Collective,
    Compute,
    Partial,
    Program,
    Send,
    StageGraph,
    TransferCost,
    build_1f1b,
    build_program,
    lower,
    simulate,
)
from mmtrain.program.simulation.rank_equivalence import representative_ranks
from tests.program.graphs import Unit, chain, graphs
from tests.program.oracle import nodes_of, precedences
from tests.program.parts import cut_programs


class Drawn:
    """Quarters of seconds for everything, by what it is and, `by_rank`, by who does it; some messages have no rows."""

    def __init__(self, seed: int, by_rank: bool, least: int = 1) -> None:
        self.seed, self.by_rank, self.least = seed, by_rank, least

    def compute(self, action: Compute) -> float:
        return self._quarters("", action) + 0.5

    def left_under_way(self, action: Partial) -> float:
        return self._quarters("under way", action)

    def message(self, sender: int, action: Send) -> TransferCost:
        what = replace(action, peer=0) if not self.by_rank else action
        quarters = self._quarters(sender if self.by_rank else "", what)
        return TransferCost(quarters, 0 if quarters == 1.25 else 8) if quarters != 1.25 else TransferCost(0.0, 0)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(self._quarters(group if self.by_rank else len(group), action), 8)

    def link_class(self, ranks: tuple[int, ...]) -> object:
        return ranks if self.by_rank else len(ranks)

    def activation_bytes(self, stage: object, mb: object) -> int:
        return crc32(f"{self.seed} {stage} {mb}".encode()) % 5

    def _quarters(self, who: object, what: object) -> float:
        return (self.least + crc32(f"{self.seed} {who} {what}".encode()) % 6) / 4


programs = st.one_of(graphs(max_n=3).map(build_program), cut_programs(), cut_programs(inside_layers=True))
seeds = st.integers(0, 2**32)


@given(programs, seeds, st.booleans())
def test_everything_begins_as_early_as_it_can(program: Program, seed: int, by_rank: bool) -> None:
    timing = Drawn(seed, by_rank)
    timeline = simulate(program, timing, program.graph.num_groups)
    found = precedences(program, timing)
    told, streams = nodes_of(timeline, found)
    begin = found.solve(streams)
    assert told == {node: begin[node] for node in told}
    assert timeline.step_time_s == max(at + found.seconds[node] for node, at in begin.items() if node[0] == "work")
    left_out = {node for node in begin if node not in told}
    assert all(node[0] == "under way" or (node[0] == "message" and found.seconds[node] == 0) for node in left_out)
    for stream in streams:
        ready = [found.ready(begin, node) for node in stream]
        assert ready == sorted(ready), "what is ready first moves first"


@given(programs, seeds, st.booleans())
def test_the_critical_path_is_the_step(program: Program, seed: int, by_rank: bool) -> None:
    timing = Drawn(seed, by_rank)
    timeline = simulate(program, timing, program.graph.num_groups)
    path = timeline.critical_path
    assert path[0].start_s == 0
    assert path[-1].start_s + path[-1].duration_s == timeline.step_time_s == sum(s.duration_s for s in path)
    assert all(one.start_s + one.duration_s == two.start_s for one, two in pairwise(path))
    drawn = {(s.rank, s.action): s for s in timeline.spans}
    for s in path:
        span, waited = drawn[s.rank, s.action], 0.0
        if isinstance(s.action, Partial) and s.duration_s > span.duration_s:
            waited = timing.left_under_way(s.action)
        assert s == span._replace(duration_s=span.duration_s + waited)


@given(programs, seeds)
def test_idle_time_by_kind_adds_up(program: Program, seed: int) -> None:
    timeline = simulate(program, Drawn(seed, by_rank=False), program.graph.num_groups)
    assert sorted(timeline.bubbles) == sorted(program.symmetry.location)
    for rank, bubbles in timeline.bubbles.items():
        busy = fsum(s.duration_s for s in timeline.spans if s.rank == rank and isinstance(s.action, Compute))
        assert sum(bubbles.values()) == timeline.step_time_s - busy
        assert min(bubbles.values()) >= 0


wide = st.sampled_from(
    [
        chain(Unit("llm", 2, 2, tp=4, num_stages=4), n=3, tied=True),
        chain(Unit("vision", 2, 2, tp=2), Unit("llm", 2, 3, tp=4), n=2),
        chain(Unit("vision", dp=4, ranks=tuple(range(4))), Unit("llm", tp=4, ranks=tuple(range(4))), n=2),
        chain(Unit("vision", 1, 2, tp=2, ranks=tuple(range(4))), Unit("llm", tp=4, ranks=tuple(range(4))), n=2),
        chain(Unit("vision", tp=3), Unit("audio", tp=2), Unit("llm", 2, tp=4), Unit("generator", tp=2), n=3),
        chain(Unit("vision", tp=4, n=6), Unit("llm", 2, 2, tp=4), n=3),
    ]
)


class Apart(Drawn):
    """As long as with `Drawn`, but no rank is taken to do as another does; nothing happens at the same time twice."""

    def link_class(self, ranks: tuple[int, ...]) -> object:
        return ranks


class Together(Drawn):
    """The same, and ranks may be taken together."""


@given(wide | graphs(max_n=3), seeds)
def test_following_one_of_those_that_do_the_same_changes_nothing(graph: StageGraph, seed: int) -> None:
    def uneven(timing: Drawn) -> Drawn:
        timing._quarters = lambda who, what: crc32(f"{seed} {who} {what}".encode()) / 2**32  # type: ignore[method-assign]
        return timing

    groups = graph.num_groups
    apart = simulate(build_program(graph), uneven(Apart(seed, by_rank=False)), groups)
    for program in (build_program(graph), lower(build_1f1b(graph, representative_ranks(graph, len)))):
        found = simulate(program, uneven(Together(seed, by_rank=False)), groups)
        assert (found.step_time_s, found.bubbles) == (apart.step_time_s, apart.bubbles)
        assert found.peak_memory_bytes == apart.peak_memory_bytes
        assert tuple(found.spans) == tuple(apart.spans)


@pytest.mark.parametrize(
    ("units", "num_leaders"),
    [
        ([Unit("llm", 4, 3, tp=8)], 4),  # one of each TP group of a replica group
        (
            [Unit("vision", 2, 2, tp=4), Unit("llm", 2, 2, tp=8)],
            8,
        ),  # TP groups talk to TP groups: their first rank, and another
        ([Unit("vision", 1, 4, tp=1, ranks=(0, 1, 2, 3)), Unit("llm", tp=4, ranks=(0, 1, 2, 3))], 4),  # all differ
    ],
)
def test_how_many_ranks_are_followed(units: list[Unit], num_leaders: int) -> None:
    assert len(representative_ranks(chain(*units, n=2), len)) == num_leaders


def test_ranks_on_slower_links_are_followed_too() -> None:
    """TP groups of four on nodes of six ranks: between TP groups 0-3 and 4-7 positions 0 and 1 stay on a node."""
    graph = chain(Unit("llm", 2, tp=4), n=2)
    on_a_node = lambda ranks: len({rank // 6 for rank in ranks}) == 1  # noqa: E731
    assert representative_ranks(graph, len) == (0, 4)
    assert representative_ranks(graph, on_a_node) == (0, 2, 4, 6)


def test_ranks_given_another_order_are_followed_too() -> None:
    graph = chain(Unit("llm", tp=4, trainable=(False,)), n=2)
    program = build_1f1b(graph)
    assert len(program.actions[0]) == 2
    other = Program(graph, {**program.actions, 3: program.actions[3][::-1]})
    assert program.same_actions(0, 3)
    assert not other.same_actions(0, 3)
