"""Baselines: each cut is what its name says, and none beats what was planned."""

import numpy as np
import pytest

from mmtrain.plan.baselines import BASELINES, baselines
from mmtrain.plan.cut import Track, part_seconds, tracks_of
from mmtrain.plan.search import SAME, search
from mmtrain.plan.sizes import bounded_sizings, sizings
from mmtrain.plan.story import machine_for
from tests.plan.factory import pricing_for, recipe


def track(pp: int) -> Track:
    pricing, choices = pricing_for(recipe(llm={"layers": 6}))
    sizing = next(s for s in sizings(choices, pp) if str(s) == f"unified: tp1 pp{pp} dp1")
    return tracks_of(sizing, pricing, choices)[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("megatron", (0, 7, 9, 11, 13)), ("megatron-extra", (0, 5, 8, 10, 13)), ("equal layers", (0, 3, 6, 9, 13))],
)
def test_layers_lie_where_the_rule_says(name: str, expected: tuple[int, ...]) -> None:
    found = BASELINES[name](track(4))
    assert found is not None
    assert sorted(np.diff(found)) == sorted(np.diff(expected))
    assert (found[0], found[-1]) == (0, 13)


def test_balanced_is_the_evenest_by_time() -> None:
    one = track(3)
    cuts = [rule(one) for rule in BASELINES.values()]
    longest = [float(part_seconds(one, np.asarray([c])).max()) for c in cuts if c is not None]
    found = BASELINES["balanced"](one)
    assert found is not None
    assert float(part_seconds(one, np.asarray([found])).max()) == min(longest)


def test_no_baseline_beats_the_plan() -> None:
    settings = recipe(llm={"layers": 2}, vision={"layers": 1, "hidden": 96, "heads": 4, "ffn": 256})
    pricing, choices = pricing_for(settings)
    machine = machine_for(settings, "cpu-core")
    found = list(bounded_sizings(choices, 3))
    fastest = search(found, pricing, choices, machine, at_least=1).judged[0].step_time_s
    told = baselines(found, pricing, choices, machine, fastest)
    assert {"megatron", "equal layers"} <= {a.summary.split(" baseline")[0] for a in told} <= set(BASELINES)
    assert all(a.step_time_s is not None and a.step_time_s > fastest * SAME for a in told)
