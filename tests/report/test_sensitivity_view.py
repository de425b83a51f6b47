"""A fragile choice is named in a plan's text, and the steps under changed costs are shown on request."""

import pytest

from mmtrain.plan.artifact.choice_sensitivity import ComparedPlan, PerturbedRanking, PerturbedStep, Sensitivity
from mmtrain.report import plan_table
from mmtrain.report.sensitivity_view import fragile_sentences
from tests.report.test_plan_view import plan

RIVAL = "unified: vision tp1 pp2 dp5, llm tp1 pp2 dp5"


def _ranking(constant: str, ratio: float, chosen_s: float, rival_s: float, is_scaled: bool = False) -> PerturbedRanking:
    steps = tuple(PerturbedStep(step_time_s=s, from_first_batch=is_scaled) for s in (chosen_s, rival_s))
    return PerturbedRanking(constant=constant, ratio=ratio, steps=steps)  # type: ignore[arg-type]


def _sensitivity(*rankings: PerturbedRanking) -> Sensitivity:
    chosen = ComparedPlan(summary="disaggregated: ...", placement="disaggregated", step_time_s=0.25)
    rival = ComparedPlan(summary=RIVAL, placement="unified", step_time_s=0.256)
    return Sensitivity(plans=(chosen, rival), rankings=rankings)


WINS = _ranking("link speeds", 0.8, 0.30, 0.27)
LOSES = _ranking("GEMM efficiency", 0.8, 0.30, 0.31, is_scaled=True)


def test_a_rival_that_wins_somewhere_is_named_with_the_constants() -> None:
    also = _ranking("GEMM efficiency", 1.25, 0.25, 0.24)
    [sentence] = fragile_sentences(_sensitivity(WINS, LOSES, also))
    assert sentence == (
        f"Fragile: within 3% of `{RIVAL}`; it wins where link speeds are 0.8x or GEMM efficiency is 1.25x: "
        "measure both."
    )


@pytest.mark.parametrize("rival_s", [0.2990, 0.2975])
def test_a_rival_that_is_never_over_one_percent_faster_is_not_named(rival_s: float) -> None:
    assert list(fragile_sentences(_sensitivity(LOSES, _ranking("launch time", 0.8, 0.30, rival_s)))) == []


def test_the_text_of_a_plan_has_the_line_and_on_request_the_table() -> None:
    fragile = plan().model_copy(update={"sensitivity": _sensitivity(WINS, LOSES)})
    text, details = plan_table(fragile, 120), plan_table(fragile, 120, with_details=True)
    assert "Fragile: within 3% of" in text
    assert "Sensitivity of the choice" not in text
    rows = details.partition("Sensitivity of the choice")[2].splitlines()
    for cells in (
        ("as stated", "250 ms", "1.024x"),
        ("link speeds 0.8x", "300 ms", "0.900x"),
        ("GEMM efficiency 0.8x", "~300 ms", "~1.033x"),
    ):
        assert any(all(cell in row for cell in cells) for row in rows), (cells, rows)
    robust = plan().model_copy(update={"sensitivity": _sensitivity(LOSES)})
    assert "Fragile" not in plan_table(robust)
    unrivalled = plan().model_copy(update={"sensitivity": Sensitivity(plans=_sensitivity().plans[:1], rankings=())})
    assert "Sensitivity of the choice" not in plan_table(unrivalled, with_details=True)
