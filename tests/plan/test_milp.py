"""Partition and recompute together: never noticeably slower than what a mixed-integer program finds."""

from dataclasses import replace

import pytest

from mmtrain.plan.cut import alive_of, graph_for, laid_out, tracks_of
from mmtrain.plan.fit import Fitted, fitted
from mmtrain.plan.judge import judge
from mmtrain.plan.search import search
from mmtrain.plan.sizes import sizings
from mmtrain.plan.story import machine_for
from mmtrain.program.builder import in_flight
from tests.plan.factory import pricing_for, recipe
from tests.plan.milp import best_cuts


@pytest.mark.parametrize("share", [0.9, 0.75, 0.65])
@pytest.mark.parametrize(("layers", "pp"), [(4, 2), (5, 3), (9, 4)])
def test_a_milp_finds_nothing_noticeably_better(layers: int, pp: int, share: float) -> None:
    settings = recipe(llm={"layers": layers}, global_batch=8)
    pricing, choices = pricing_for(settings)
    machine = machine_for(settings, "cpu-core")
    sizing = next(s for s in sizings(choices, pp) if str(s) == f"unified: tp1 pp{pp} dp1")
    (track,) = tracks_of(sizing, pricing, choices)
    assert track.anchor is not None
    graph = graph_for(laid_out(sizing, pricing, (track.anchor,)), pricing)
    alive = in_flight(graph)
    small = replace(machine, memory_bytes=share * max(m.total for m in pricing.memory(graph).values()))

    solved = best_cuts(track, alive_of(track, alive), small.memory_bytes)
    ours = search([(0.0, sizing)], pricing, choices, small, at_least=1).judged
    if solved is None:
        return
    assert solved.is_proven
    reference = fitted(
        sizing, pricing, (solved.cuts,), small, in_flight(graph_for(laid_out(sizing, pricing, (solved.cuts,)), pricing))
    )
    assert isinstance(reference, Fitted)
    assert ours[0].step_time_s <= 1.005 * judge(reference.layout, pricing, machine).step_time_s
