"""The search against simulating everything; its bounds against the simulator."""

from typing import Any

import pytest

from mmtrain.plan.bounds import schedule_bound, work_bound
from mmtrain.plan.cut import arrange, graph_for
from mmtrain.plan.judge import judge, tight_bound
from mmtrain.plan.search import SAME, search, sizings
from mmtrain.plan.story import machine_for
from tests.plan.factory import pricing_for, recipe

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({}, "cpu-core"),
    "frozen": ({"vision": {"layers": 3, "hidden": 96, "heads": 4, "ffn": 256, "freeze": True}}, "cpu-core"),
    "gpu_nodes_of_two": ({"cluster": {"ranks_per_node": 2}}, "h100-80g"),
    "merged": ({"parallel": {"vision": {"num_microbatches": 2}}}, "cpu-core"),
    "split": ({"parallel": {"vision": {"num_microbatches": 16}}}, "h100-80g"),
    "recomputed": ({"parallel": {"llm": {"recompute": "all"}}}, "cpu-core"),
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_best_of_all_is_found(case: str, world_size: int) -> None:
    settings, hardware = recipe(**CASES[case][0]), CASES[case][1]
    pricing, choices = pricing_for(settings, hardware)
    machine = machine_for(settings, hardware)
    candidates = list(sizings(choices, world_size))
    layouts = [layout for s in candidates if (layout := arrange(s, pricing, choices))]
    everything = [judge(layout, pricing, machine).step_time_s for layout in layouts]

    outcome = search(candidates, pricing, choices, machine, at_least=1)
    assert outcome.judged[0].step_time_s <= min(everything) * SAME
    assert len(outcome.judged) + len(outcome.losers) == len(candidates)
    times = [j.step_time_s for j in outcome.judged[1:]]
    assert times == sorted(times)


@pytest.mark.parametrize("case", CASES)
def test_bounds_hold_and_the_tighter_one_is_tighter(case: str) -> None:
    settings, hardware = recipe(**CASES[case][0]), CASES[case][1]
    pricing, choices = pricing_for(settings, hardware)
    machine = machine_for(settings, hardware)
    for sizing in sizings(choices, 4):
        layout = arrange(sizing, pricing, choices)
        assert layout is not None
        graph = graph_for(layout, pricing)
        seconds = pricing.stage_seconds(graph)
        by_work, _ = work_bound(graph, seconds)
        by_schedule = schedule_bound(graph, seconds, lambda _: 0.0)
        tight = tight_bound(graph, pricing, machine)
        simulated = judge(layout, pricing, machine).step_time_s
        slack = 1 + 1e-9
        assert 0 < by_work <= by_schedule * slack
        assert by_schedule <= tight <= simulated * slack, sizing


def test_memory_decides_where_time_would_not() -> None:
    """A limit between the need of the fastest layout and that of others: another one, that fits, is chosen."""
    pricing, choices = pricing_for(recipe())
    candidates = list(sizings(choices, 4))
    fastest = search(candidates, pricing, choices, machine_for(recipe(), "cpu-core"), at_least=1).judged[0]
    limit = fastest.peak_bytes * 0.9
    small = machine_for(recipe(cluster={"memory_gib": limit / 2**30}), "cpu-core")
    outcome = search(candidates, pricing, choices, small, at_least=1)
    assert outcome.judged[0].peak_bytes <= limit
    assert outcome.judged[0].step_time_s > fastest.step_time_s
    assert any("does not fit" in loser.reason for loser in outcome.losers)


def test_stages_are_cut_anew_to_fit_memory() -> None:
    """The first stage holds most microbatches: under a tight limit it gets fewer layers than time alone would give."""
    settings = recipe(vision=None, llm={"layers": 12})
    pricing, choices = pricing_for(settings)
    sizing = next(s for s in sizings(choices, 3) if str(s) == "unified: tp1 pp3 dp1")
    by_time = arrange(sizing, pricing, choices)
    assert by_time is not None
    memory = pricing.memory(graph_for(by_time, pricing))
    limit = max(m.total for m in memory.values()) * 0.93
    tight = arrange(sizing, pricing, choices, limit)
    assert tight is not None
    assert all(m.total <= limit for m in pricing.memory(graph_for(tight, pricing)).values())
    assert tight.units["llm"].stages[0].layers[1] < by_time.units["llm"].stages[0].layers[1]
