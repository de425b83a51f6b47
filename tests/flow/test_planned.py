"""What the planner chooses trains as one process does: colocated programs with encoders in the LLM's bubbles."""

from typing import Any

import pytest

from tests.flow.cases import AUDIO, FINE, NUM_PLANNED, lengths, recipe
from tests.flow.equality import assert_equals_one_process
from tests.plans import plan_recipe

TWO_RANKS = {"parallel__llm__pp": 2, "parallel__vision__pp": 1}
SLOW = "each replica of an encoder owns one of two microbatches"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "an encoder's layers in parts, on two ranks": (
        2,
        TWO_RANKS | {"train__global_batch": 8, "parallel__vision__num_microbatches": 8},
    ),
    SLOW: (2, TWO_RANKS | {"train__global_batch": 8, "parallel__vision__num_microbatches": 4}),
    "an encoder of which the projector alone trains": (2, TWO_RANKS | {"model__vision__freeze": True}),
    "two encoders, one of them over both ranks": (
        2,
        {
            "model__audio": AUDIO,
            "parallel__llm__pp": 2,
            "parallel__vision": {"pp": 2, "num_microbatches": 4},
            "parallel__audio": {"pp": 1, "num_microbatches": 4},
        },
    ),
    "two image encoders": (
        2,
        TWO_RANKS | {"model__encoders": {"fine": FINE}, "parallel__encoders": {"fine": {"pp": 2}}},
    ),
    "two replicas of the llm": (4, {"parallel__llm__pp": 2, "train__global_batch": 8}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case, marks=pytest.mark.slow if case == SLOW else ()) for case in CASES]
)
def test_a_planned_colocated_program_trains_as_one_process_does(case: str) -> None:
    world_size, changes = CASES[case]
    settings = recipe(parallel__placement="colocated", **changes)
    samples = lengths(settings.model.all_encoders, NUM_PLANNED)
    chosen = plan_recipe(settings, samples, world_size=world_size, hardware="cpu-core", recipe_sha256="")
    assert (chosen.placement, chosen.schedule.kind) == ("colocated", "explicit")
    assert 0 < (chosen.predicted.scheduling_efficiency or 0) < 1
    assert_equals_one_process(settings, chosen)


IN_CHUNKS: dict[str, tuple[int, dict[str, Any]]] = {
    "an encoder of its own in two chunks a rank": (
        3,
        {
            "parallel__placement": "disaggregated",
            "model__vision__layers": 4,
            "parallel__vision": {"pp": 2, "vpp": 2},
            "parallel__llm": {"dp": 1, "tp": 1},
        },
    ),
    "two encoders and an llm in one interleaved line": (
        2,
        {"parallel__placement": "unified", "model__audio": AUDIO, "parallel__llm": {"dp": 1, "tp": 1, "vpp": 3}},
    ),
    "an llm behind its encoder, divided by hand in two rounds": (
        2,
        {
            "parallel__placement": "unified",
            "model__llm__layers": 5,
            "parallel__vision__layers_per_chunk": (2, 0, 0, 0),
            "parallel__llm": {"dp": 1, "tp": 1, "layers_per_chunk": (1, 2, 1, 1)},
        },
    ),
}


BY_HAND: dict[str, tuple[int, dict[str, Any]]] = {
    "two units on ranks of their own": (
        3,
        {
            "parallel__placement": "disaggregated",
            "parallel__llm": {"pp": 2, "dp": 1, "layers_per_chunk": (2, 1)},
        },
    ),
    "an encoder on the LLM's ranks": (
        2,
        {
            "parallel__placement": "colocated",
            "parallel__vision": {"pp": 2, "layers_per_chunk": (2, 0)},
            "parallel__llm": {"pp": 2, "dp": 1, "layers_per_chunk": (1, 2)},
        },
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_units_that_the_recipe_divides_train_as_one_process_does(case: str) -> None:
    world_size, changes = BY_HAND[case]
    settings = recipe(**changes)
    samples = lengths(settings.model.all_encoders, NUM_PLANNED)
    chosen = plan_recipe(settings, samples, world_size=world_size, hardware="cpu-core", recipe_sha256="")
    blocks = [set(range(1, 4)) & set(range(*stage.layers)) for stage in chosen.units["llm"].stages]
    assert tuple(map(len, blocks)) == changes["parallel__llm"]["layers_per_chunk"]
    assert_equals_one_process(settings, chosen)


def test_selective_recomputation_is_planned_and_trains_as_one_process_does() -> None:
    settings = recipe(parallel__vision__recompute="selective", parallel__llm={"recompute": "selective", "pp": 2})
    samples = lengths(settings.model.all_encoders, NUM_PLANNED)
    chosen = plan_recipe(settings, samples, world_size=2, hardware="cpu-core", recipe_sha256="")
    assert all(unit.recompute_activation_function and not unit.num_recomputed for unit in chosen.units.values())
    assert_equals_one_process(settings, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_CHUNKS)
def test_interleaved_units_train_as_one_process_does(case: str) -> None:
    world_size, changes = IN_CHUNKS[case]
    settings = recipe(**changes)
    samples = lengths(settings.model.all_encoders, NUM_PLANNED)
    chosen = plan_recipe(settings, samples, world_size=world_size, hardware="cpu-core", recipe_sha256="")
    assert sum(unit.vpp > 1 for unit in chosen.units.values()) >= 1
    assert_equals_one_process(settings, chosen)
