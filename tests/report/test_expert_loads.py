"""The report says how uneven experts were loaded, and names those that never had a token."""

from typing import Any

from mmtrain.report.expert_loads import ExpertLoads
from mmtrain.report.metrics_record import ExpertMetrics
from mmtrain.report.scalars import step_scalars
from mmtrain.report.step_text import router_losses_text


def logged(spread: float, *dead: int) -> dict[str, Any]:
    ratios = {"llm.layers.1": 1.5, "llm.layers.2": 1 + spread}
    return {"step": 1, "experts": ExpertMetrics(ratios, spread, 1.25, {"llm.layers.2": dead}).to_json()}


def test_experts_without_a_token_in_any_step_are_named() -> None:
    loads = ExpertLoads.of_logged([logged(1.0, 3, 5, 6), logged(3.0, 5, 6), logged(2.0, 6, 5, 4)])
    assert loads is not None
    assert loads.dead == {"llm.layers.2": [5, 6]}
    uneven, dead = loads.sentences()
    assert "200% of the mean in a pass (parallel.llm.expert_spread 2)" in uneven
    assert "computed 1.25x the mean" in uneven
    assert "fullest expert of llm.layers.2 had 3.0x" in uneven
    assert dead == "2 experts had no token in any step: llm.layers.2: 5, 6."


def test_losses_of_routers_are_in_lines_curves_and_reports() -> None:
    steps = [
        ExpertMetrics({"llm.layers.1": 1.5}, 0.5, 1.0, {}, balance_loss=balance, z_loss=8.0)
        for balance in (1.25, 1.125, 1.0625)
    ]
    entries = [{"step": number + 1, "experts": step.to_json()} for number, step in enumerate(steps)]
    assert step_scalars(entries[0])["experts/balance_loss"] == 1.25
    assert router_losses_text(steps[0]) == "  balance 1.2500  router z 8.0000"
    loads = ExpertLoads.of_logged(entries)
    assert loads is not None
    assert "balancing loss (1: even in each sample) from 1.25 to 1.062, z-loss from 8 to 8." in loads.sentences()[1]
    off = ExpertMetrics({"llm.layers.1": 1.5}, 0.5, 1.0, {})
    assert not {"balance_loss", "z_loss"} & off.to_json().keys()
    assert router_losses_text(off) == router_losses_text(None) == ""


def test_runs_without_experts_say_nothing_of_them() -> None:
    assert ExpertLoads.of_logged([{"step": 1}]) is None
    assert ExpertLoads.of_logged(None) is None


def test_curves_hold_the_fullest_layer_and_the_number_of_dead_experts() -> None:
    assert step_scalars(logged(1.0, 3, 5)) == {
        "experts/spread": 1.0, "experts/fullest_rank": 1.25, "experts/max_over_mean": 2.0, "experts/dead": 2,
    }  # fmt: skip
