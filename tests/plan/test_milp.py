"""Partition and recompute together: never noticeably slower than what a mixed-integer program finds."""

import pytest

from tests.plan.milp import pipeline, solve


@pytest.mark.parametrize("share", [0.9, 0.75, 0.65])
@pytest.mark.parametrize(("layers", "pp"), [(4, 2), (5, 3), (9, 4)])
def test_a_milp_finds_nothing_noticeably_better(layers: int, pp: int, share: float) -> None:
    given = pipeline(vision=3, llm=layers, pp=pp, batch=8, share=share)
    solved = solve(given.chain, given.num_in_flight, given.memory_bytes)
    if solved is None:
        return
    assert solved.is_proven
    reference = given.simulated(solved.partition)
    assert reference is not None
    assert given.planned() <= 1.005 * reference
