"""Random programs: the simulator is exact, equivalent ranks do the same, and the critical path makes the step."""

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
    Span,
    StageGraph,
    Timeline,
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


class RandomTiming:
    """Random quarters of seconds by action, with `by_rank` also by rank; some messages have no rows."""

    def __init__(self, seed: int, by_rank: bool, min_quarters: int = 1) -> None:
        self.seed, self.by_rank, self.min_quarters = seed, by_rank, min_quarters

    def compute(self, action: Compute) -> float:
        return self._quarters("", action) + 0.5

    def left_under_way(self, action: Partial) -> float:
        return self._quarters("under way", action)

    def tp_wait(self, action: Compute) -> float:
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        known = action if self.by_rank else replace(action, peer=0)
        seconds = self._quarters(sender if self.by_rank else "", known)
        return TransferCost(0.0, 0) if seconds == 1.25 else TransferCost(seconds, 8)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(self._quarters(group if self.by_rank else len(group), action), 8)

    def link_class(self, ranks: tuple[int, ...]) -> object:
        return ranks if self.by_rank else len(ranks)

    def activation_bytes(self, stage: object, mb: object) -> int:
        return crc32(f"{self.seed} {stage} {mb}".encode()) % 5

    def _quarters(self, ranks: object, action: object) -> float:
        return (self.min_quarters + crc32(f"{self.seed} {ranks} {action}".encode()) % 6) / 4


programs = st.one_of(graphs(max_n=3).map(build_program), cut_programs(), cut_programs(inside_layers=True))
seeds = st.integers(0, 2**32)


@given(programs, seeds, st.booleans())
def test_everything_starts_as_early_as_it_can(program: Program, seed: int, by_rank: bool) -> None:
    timing = RandomTiming(seed, by_rank)
    timeline = simulate(program, timing, program.graph.num_groups)
    expected = precedences(program, timing)
    simulated, streams = nodes_of(timeline, expected)
    start = expected.solve(streams)
    assert simulated == {node: start[node] for node in simulated}
    ends = [start_s + expected.seconds[node] for node, start_s in start.items() if node[0] == "work"]
    assert timeline.step_time_s == max(ends)
    left_out = {node for node in start if node not in simulated}
    assert all(node[0] == "under way" or (node[0] == "message" and expected.seconds[node] == 0) for node in left_out)
    for stream in streams:
        ready = [expected.ready(start, node) for node in stream]
        assert ready == sorted(ready), "what is ready first moves first"


@given(programs, seeds, st.booleans())
def test_the_critical_path_is_the_step(program: Program, seed: int, by_rank: bool) -> None:
    timing = RandomTiming(seed, by_rank)
    timeline = simulate(program, timing, program.graph.num_groups)
    path = timeline.critical_path
    assert path[0].start_s == 0
    assert path[-1].start_s + path[-1].duration_s == timeline.step_time_s == sum(s.duration_s for s in path)
    assert all(span.start_s + span.duration_s == after.start_s for span, after in pairwise(path))
    spans = {(s.rank, s.action): s for s in timeline.spans}
    for s in path:
        span = spans[s.rank, s.action]
        waited = 0.0
        if isinstance(s.action, Partial) and s.duration_s > span.duration_s:
            waited = timing.left_under_way(s.action)
        assert s == span._replace(duration_s=span.duration_s + waited)


@given(programs, seeds)
def test_idle_time_by_kind_adds_up(program: Program, seed: int) -> None:
    timeline = simulate(program, RandomTiming(seed, by_rank=False), program.graph.num_groups)
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
        # All ranks of a TP group exchange with the encoder's replicas, or with ranks that do.
        chain(Unit("vision", dp=4, ranks=tuple(range(4))), Unit("llm", 2, 2, tp=2, ranks=tuple(range(8))), n=3),
        chain(Unit("vision", tp=3), Unit("audio", tp=2), Unit("llm", 2, tp=4), Unit("generator", tp=2), n=3),
        chain(Unit("vision", tp=4, n=6), Unit("llm", 2, 2, tp=4), n=3),
    ]
)


class SeparateRanks(RandomTiming):
    """The same durations, but no two ranks are taken to be equivalent."""

    def link_class(self, ranks: tuple[int, ...]) -> object:
        return ranks


@given(wide | graphs(max_n=3), seeds)
def test_simulating_one_of_the_equivalent_ranks_changes_nothing(graph: StageGraph, seed: int) -> None:
    def with_distinct_times(timing: RandomTiming) -> RandomTiming:
        """Make every duration different, so that no two things happen at the same time by chance."""
        timing._quarters = lambda ranks, action: crc32(f"{seed} {ranks} {action}".encode()) / 2**32  # type: ignore[method-assign]
        return timing

    groups = graph.num_groups

    def without_messages(timeline: Timeline) -> list[Span]:
        """Return all spans but messages: those of ranks that are not followed may leave sooner."""
        return [span for span in timeline.spans if not isinstance(span.action, Send)]

    separate = simulate(build_program(graph), with_distinct_times(SeparateRanks(seed, by_rank=False)), groups)
    of_representatives = lower(build_1f1b(graph, representative_ranks(graph, len)))
    for program in (build_program(graph), of_representatives):
        joint = simulate(program, with_distinct_times(RandomTiming(seed, by_rank=False)), groups)
        assert (joint.step_time_s, joint.bubbles) == (separate.step_time_s, separate.bubbles)
        assert joint.peak_memory_bytes == separate.peak_memory_bytes
        if program is of_representatives:
            assert without_messages(joint) == without_messages(separate)
            assert len(joint.spans) == len(separate.spans)
        else:
            assert tuple(joint.spans) == tuple(separate.spans)


@pytest.mark.parametrize(
    ("units", "num_representatives"),
    [
        ([Unit("llm", 4, 3, tp=8)], 4),  # one of each TP group of a replica group
        # The first of each of the four TP groups: it sends to the other unit, so the rest never waits for longer.
        ([Unit("vision", 2, 2, tp=4), Unit("llm", 2, 2, tp=8)], 4),
        ([Unit("vision", 2, 2, tp=4), Unit("llm", 2, 2, tp=8, num_stages=2)], 4),
        ([Unit("vision", 1, 4, tp=1, ranks=(0, 1, 2, 3)), Unit("llm", tp=4, ranks=(0, 1, 2, 3))], 4),  # all differ
        ([Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", 2, tp=2, ranks=(0, 1, 2, 3))], 4),
    ],
)
def test_how_many_ranks_are_simulated(units: list[Unit], num_representatives: int) -> None:
    assert len(representative_ranks(chain(*units, n=2), len)) == num_representatives


def test_all_positions_are_simulated_where_embeddings_are_tied() -> None:
    """Their reduction occupies the streams of its ranks, and ends later on first ranks, which also send to a unit."""
    units = Unit("vision", tp=4), Unit("llm", 2, tp=4)
    assert [len(representative_ranks(chain(*units, tied=tied), len)) for tied in (False, True)] == [3, 6]


def test_ranks_on_slower_links_are_simulated_too() -> None:
    """On nodes of six ranks, positions 0 and 1 of TP groups 0-3 and 4-7 are on one node, positions 2 and 3 on two."""
    graph = chain(Unit("llm", 2, tp=4), n=2)
    on_a_node = lambda ranks: len({rank // 6 for rank in ranks}) == 1  # noqa: E731
    assert representative_ranks(graph, len) == (0, 4)
    assert representative_ranks(graph, on_a_node) == (0, 2, 4, 6)


def test_ranks_with_another_order_are_not_equivalent() -> None:
    graph = chain(Unit("llm", tp=4, trainable=(False,)), n=2)
    program = build_1f1b(graph)
    assert len(program.actions[0]) == 2
    other = Program(graph, {**program.actions, 3: program.actions[3][::-1]})
    assert program.same_actions(0, 3)
    assert not other.same_actions(0, 3)
