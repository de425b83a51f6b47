"""The table of a choice's sensitivity has a row for every placement, and its cells are those of changed hardware."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts
from mmtrain.costs.perturbed_costs import Perturbation
from scripts.bench_sensitivity import rows, search, searched_anew
from tests.plan.factory import problem_for, recipe, simulated

SLOWER = Perturbation("link speeds", 0.5)


def test_every_placement_has_a_row_of_steps_beside_the_chosen_one() -> None:
    problem = problem_for(recipe(global_batch=4), "h100-80g", 2)
    candidates, evaluator = search(problem)
    chosen = candidates[0]
    table = list(rows(candidates, evaluator, [SLOWER]))
    placements = [row.name.partition(":")[0] for row in table]
    others = {c.placement for c in candidates} - {chosen.placement}
    assert "replicated" in others | {chosen.placement}
    assert set(placements) == others | ({chosen.placement} & set(placements))
    h = problem.hardware
    links = [replace(k, bytes_per_s=k.bytes_per_s / 2, latency_s=2 * k.latency_s, step_s=2 * k.step_s)
             for k in (h.intra_node, h.inter_node)]  # fmt: skip
    slow = replace(h, intra_node=links[0], inter_node=links[1], collective_start_s=2 * h.collective_start_s)
    cluster = replace(problem.cluster, hardware=slow)
    on_slow = replace(problem, cluster=cluster, costs=AnalyticCosts(slow, "bf16"))
    first = next(row for row in table if row.name != chosen.layout.summary)
    rival = next(c for c in candidates if c.layout.summary == first.name)
    again = [simulated(c.layout, type(evaluator)(on_slow), c.schedule).step_time_s for c in (rival, chosen)]
    assert first.changed[0] == pytest.approx(again[0] / again[1], rel=0.01)
    assert searched_anew(problem, SLOWER).startswith(search(on_slow)[0][0].layout.summary)
