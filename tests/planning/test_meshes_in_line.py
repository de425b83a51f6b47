"""The line of mesh assignments that wait to join a search."""

import math
from collections.abc import Iterator

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.search.meshes_in_line import EstimatedCandidate, MeshesInLine
from mmtrain.planning.space.candidate import Candidate, MeshAssignment
from mmtrain.program.ir.graph import LLM


def entry(number: int, seconds: float, pp: int) -> EstimatedCandidate:
    return seconds, Candidate(number, MeshAssignment("disaggregated", {LLM: MeshSize(1, pp, 4)}, {LLM: 8}))


def taken(line: MeshesInLine, limit_s: float) -> list[int]:
    """Return the ids of the candidates that may take at most so many seconds, in their order."""
    ids = []
    while (first := line.first_within(limit_s)) is not None:
        line.take(first)
        ids.append(first[1].id)
    return ids


def test_candidates_come_in_the_order_of_their_estimates_and_no_further_than_needed() -> None:
    asked: list[int] = []

    def further() -> Iterator[EstimatedCandidate]:
        for number in range(100):
            asked.append(number)
            yield entry(number, 1.0 + number, pp=2)

    line = MeshesInLine(further())
    assert line.first_within(math.inf) is not None
    assert len(asked) <= 3
    assert taken(line, 4.5) == [0, 1, 2, 3]
    assert len(asked) <= 6


def test_what_long_pipelines_lose_is_not_expected_of_shorter_ones() -> None:
    entries = [entry(0, 1.0, pp=4), entry(1, 1.1, pp=8), entry(2, 1.15, pp=1), entry(3, 1.2, pp=4), entry(4, 1.4, pp=2)]
    line = MeshesInLine(iter(entries))
    first = line.first_within(math.inf)
    assert first is entries[0]
    line.take(first)
    line.learn(first[1], 1.2)
    assert taken(line, 1.3) == [2], "pipelines of 4 and 8 take 1.2 times their estimates, those of 1 and 2 may not"
    line.learn(entries[2][1], 1.05)
    assert taken(line, 1.3) == [1, 3], "as much as without a pipeline is what all may take"


def test_others_may_replace_those_that_wait() -> None:
    line = MeshesInLine(iter([entry(0, 1.0, pp=1), entry(1, 2.0, pp=1)]))
    assert line.first_within(5.0) is not None
    line.go_on_with(iter([entry(2, 1.5, pp=1)]))
    assert taken(line, 5.0) == [2]


def test_estimates_that_are_too_high_are_corrected_before_the_limit_is_compared() -> None:
    entries = [entry(0, 1.0, pp=2), entry(1, 1.2, pp=4), entry(2, 1.25, pp=1)]
    line = MeshesInLine(iter(entries))
    line.learn(entries[0][1], 0.8)
    assert taken(line, 1.0) == [0, 1], "1.2 s are 0.96 s; without a pipeline no ratio is known"
