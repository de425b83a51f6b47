"""The fewest settings that contradict each other are named, and nothing is rejected for which there are meshes."""

import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.advise.infeasible import explain_infeasible, nearest_rank_counts
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.search.strategies import has_meshes
from mmtrain.planning.space.constraints import UnitChoices, unit_choices
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, lengths, recipe
from tests.plans import mesh_assignments, plan_recipe

PLACEMENTS: tuple[Placement, ...] = ("unified", "disaggregated", "colocated")


def choices_of(settings: Recipe) -> dict[str, UnitChoices]:
    return unit_choices(settings, build_model_shape(settings), 64)


def random_settings(seed: int) -> tuple[dict[str, dict[str, int]], Recipe]:
    """Make a recipe with a few random mesh sizes, each of them possible by itself."""
    rng = np.random.default_rng(seed)
    possible = {"tp": [1, 2, 4], "pp": [1, 2, 3, 4], "dp": [1, 2, 4], "vpp": [1, 2, 3], "num_microbatches": [2, 4]}
    fixed: dict[str, dict[str, int]] = {"vision": {}, "llm": {}}
    for _ in range(rng.integers(1, 6)):
        unit, key = str(rng.choice(list(fixed))), str(rng.choice(list(possible)))
        fixed[unit][key] = int(rng.choice(possible[key]))
    return fixed, recipe(parallel=fixed)


def consistent_choices(seeds: range) -> list[dict[str, UnitChoices]]:
    """Return the choices of the random recipes whose settings do not contradict each other."""
    consistent = []
    for seed in seeds:
        with suppress(PlanError):
            consistent.append(choices_of(random_settings(seed)[1]))
    return consistent


def test_has_meshes_agrees_with_enumeration() -> None:
    consistent = consistent_choices(range(40))
    assert len(consistent) >= 20
    for choices, ranks in product(consistent, (1, 2, 3, 4, 6, 7, 8, 12)):
        enumerated = {assignment.placement for assignment in mesh_assignments(choices, ranks)}
        assert {p for p in PLACEMENTS[:2] if has_meshes(choices, ranks, p)} == enumerated


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_fewest_contradicting_settings_are_named(placement: Placement) -> None:
    """Show that they alone exclude all meshes, and that there are meshes without any one of them."""
    num_named = 0
    for seed in range(60):
        fixed, settings = random_settings(seed)
        try:
            choices = choices_of(settings)
        except PlanError:
            continue
        ranks = int(np.random.default_rng(seed).choice([4, 6, 8]))
        if has_meshes(choices, ranks, placement):
            continue
        text = explain_infeasible(settings, choices, ranks, [placement], choices_of)
        named = re.search(rf"{placement}: (parallel.*?) (?:contradict each other|cannot be met)", text)
        paths = re.findall(r"parallel\.(\w+)\.(\w+) (\d+)", named[1]) if named else []
        for left_out in [None, *paths]:
            remaining: dict[str, dict[str, int]] = {"vision": {}, "llm": {}}
            for unit, key, value in paths:
                assert fixed[unit][key] == int(value)
                if (unit, key, value) != left_out:
                    remaining[unit][key] = int(value)
            assert has_meshes(choices_of(recipe(parallel=remaining)), ranks, placement) == (
                bool(paths) and left_out is not None
            )
        num_named += len(paths) > 1
    assert num_named > 2


def planned(world_size: int, **parallel: Any) -> Plan:
    return plan_recipe(
        recipe(parallel=parallel), lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256=""
    )


@pytest.mark.parametrize(
    ("world_size", "parallel", "message"),
    [
        (8, {"llm": {"pp": 4, "vpp": 4}}, r"parallel\.llm\.pp 4 and parallel\.llm\.vpp 4 contradict each other"),
        (4, {"placement": "colocated", "vision": {"tp": 4}, "llm": {"tp": 2}}, r"vision\.tp 4 and parallel\.llm\.tp 2"),
        (4, {"placement": "unified", "vision": {"dp": 4}, "llm": {"tp": 2}}, r"vision\.dp 4 and parallel\.llm\.tp 2"),
        (2, {"placement": "disaggregated", "llm": {"tp": 2}}, r"parallel\.llm\.tp 2 cannot be met: .*; possible: 3"),
        (4, {"placement": "disaggregated", "max_gpus": 1}, r"at most 1 rank \(parallel\.max_gpus 1\).*; possible: 2"),
        (
            8,
            {"placement": "unified", "max_gpus": 2, "vision": {"pp": 2}, "llm": {"tp": 2}},
            r"at most 2 ranks .*vision\.pp 2 and parallel\.llm\.tp 2 contradict each other.*; possible: 4",
        ),
        (
            20,
            {"placement": "unified", "vision": {"pp": 1}, "llm": {"tp": 2, "pp": 2}},
            r"vision\.pp and parallel\.llm\.pp: the ranks of the one pipeline that hold layers of the unit\)",
        ),
    ],
)
def test_both_settings_of_a_contradiction_are_named(world_size: int, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        planned(world_size, **parallel)


def test_a_number_of_ranks_on_which_replicas_cannot_hold_the_experts_names_their_degree() -> None:
    settings = recipe(
        llm={"moe": {"experts": 6, "top_k": 2, "ffn": 16}}, parallel={"placement": "unified", "llm": {"ep": 2}}
    )
    text = r"no plan uses exactly 3 ranks.*, of which ep 2 divides dp x cp\).*"
    with pytest.raises(PlanError, match=f"(?s){text}"):
        plan_recipe(settings, lengths(), world_size=3, hardware="cpu-core", recipe_sha256="")


def test_settings_of_a_named_encoder_are_named_by_their_path() -> None:
    plain = recipe(parallel={"placement": "unified", "encoders": {"fine": {"dp": 4}}, "llm": {"tp": 2}}).model_dump()
    plain["model"]["encoders"] = {"fine": VISION | {"modality": "vision"}}
    settings = Recipe.model_validate(plain)
    samples = lengths()
    samples = replace(samples, items=samples.items | {"fine": samples.items["vision"]})
    named = r"parallel\.encoders\.fine\.dp 4 and parallel\.llm\.tp 2 contradict each other"
    with pytest.raises(PlanError, match=f"(?s){named}"):
        plan_recipe(settings, samples, world_size=4, hardware="cpu-core", recipe_sha256="")


def test_fixed_meshes_are_found_far_below_max_gpus() -> None:
    """Numbers of ranks are tried in steps; where none of them is possible, the next possible one below is taken."""
    single_rank = {"tp": 1, "pp": 1, "dp": 1}
    assert planned(64, placement="disaggregated", max_gpus=64, vision=single_rank, llm=single_rank).world_size == 2


def test_the_nearest_numbers_of_ranks_can_be_used() -> None:
    choices = choices_of(recipe(parallel={unit: {"tp": 2, "dp": 4} for unit in ("vision", "llm")}))
    assert nearest_rank_counts(choices, 20, ["unified"]) == [16, 24]
    assert nearest_rank_counts(choices, 3, ["unified"]) == [8]
