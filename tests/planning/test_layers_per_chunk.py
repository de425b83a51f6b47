"""Layers that the recipe divides into model chunks itself (`layers_per_chunk`)."""

import math
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan, load_plan
from mmtrain.planning.layer_costs.layer_partition import all_chain_partitions
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.exhaustive import Instance, all_candidates, everything, fastest_found
from tests.planning.factory import VISION, evaluator_for, lengths, recipe, text_lengths
from tests.plans import plan_recipe

UNEVEN = {"pp": 2, "vpp": 2, "dp": 1, "tp": 1, "layers_per_chunk": [1, 3, 1, 3]}


def settings_with(llm: dict[str, Any], vision: dict[str, Any] | None = None, **parallel: Any) -> Recipe:
    """Return a recipe of eight LLM blocks, and of an encoder of three where its part of `parallel` is given."""
    parallel |= {"llm": llm} | ({} if vision is None else {"vision": vision})
    return recipe(vision=None if vision is None else VISION, llm={"layers": 8}, parallel=parallel)


def planned(settings: Recipe, world_size: int) -> Plan:
    samples = lengths() if settings.model.vision else text_lengths()
    return plan_recipe(settings, samples, world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def num_blocks(chosen: Plan, unit: str) -> list[int]:
    """Count the unit's blocks in each of its stages: all of its layers but the first and the last."""
    spans = [stage.layers for stage in chosen.units[unit].stages]
    return [min(hi, spans[-1][1] - 1) - max(lo, 1) for lo, hi in spans]


@pytest.mark.parametrize(
    ("llm", "sizes"),
    [
        (UNEVEN, (2, 2)),
        ({"dp": 1, "tp": 1, "layers_per_chunk": [1, 3, 1, 3]}, (2, 2)),  # on two ranks the numbers make two rounds
        ({"pp": 2, "layers_per_chunk": [2, 6]}, (2, 1)),
        ({"layers_per_chunk": [1, 1, 1, 1, 1, 3], "tp": 1, "dp": 1, "pp": 2}, (2, 3)),
        ({"layers_per_chunk": [0, 1, 7, 0], "tp": 1, "dp": 1, "pp": 2}, (2, 2)),  # embedding and head alone
    ],
)
def test_a_text_model_is_divided_as_the_recipe_says(llm: dict[str, Any], sizes: tuple[int, int]) -> None:
    chosen = planned(settings_with(llm), 2)
    assert (chosen.units["llm"].pp, chosen.units["llm"].vpp) == sizes
    assert num_blocks(chosen, "llm") == llm["layers_per_chunk"]


@pytest.mark.parametrize(
    ("placement", "world_size", "llm", "vision"),
    [
        ("unified", 2, UNEVEN, {}),
        ("unified", 2, UNEVEN, {"layers_per_chunk": [3, 0, 0, 0]}),
        ("disaggregated", 3, UNEVEN, {}),
        ("disaggregated", 4, UNEVEN, {"pp": 2, "layers_per_chunk": [0, 3]}),
        ("colocated", 2, UNEVEN, {}),
        ("colocated", 2, {"pp": 2, "dp": 1, "layers_per_chunk": [3, 5]}, {"pp": 2, "layers_per_chunk": [1, 2]}),
    ],
)
def test_units_of_a_multimodal_model_are_divided_as_the_recipe_says(
    placement: str, world_size: int, llm: dict[str, Any], vision: dict[str, Any]
) -> None:
    chosen = planned(settings_with(llm, vision, placement=placement), world_size)
    assert chosen.placement == placement
    assert num_blocks(chosen, "llm") == llm["layers_per_chunk"]
    if "layers_per_chunk" in vision:
        stages = [number for number in vision["layers_per_chunk"] if number or placement != "unified"]
        assert num_blocks(chosen, "vision") == stages


def test_an_encoder_may_have_the_first_chunks_of_the_one_pipeline_to_itself() -> None:
    llm = {"dp": 1, "tp": 1, "layers_per_chunk": [0, 2, 6]}
    chosen = planned(settings_with(llm, {"layers_per_chunk": [3, 0, 0]}, placement="unified"), 3)
    assert [number for number in num_blocks(chosen, "llm") if number > 0] == [2, 6]
    assert num_blocks(chosen, "vision")[0] == 3


def test_a_plan_file_keeps_the_division(tmp_path: Path) -> None:
    chosen = planned(settings_with(UNEVEN), 2)
    chosen.save(tmp_path / "plan.json")
    assert num_blocks(load_plan(tmp_path / "plan.json"), "llm") == [1, 3, 1, 3]


def test_without_placement_only_those_that_can_be_divided_so_are_planned() -> None:
    """Four numbers are four chunks, so neither one rank after another nor every rank alone runs the model."""
    chosen = planned(settings_with({"layers_per_chunk": [1, 3, 1, 3]}), 4)
    assert chosen.units["llm"].pp * chosen.units["llm"].vpp == 4
    assert num_blocks(chosen, "llm") == [1, 3, 1, 3]


def test_the_chunks_are_all_those_with_the_blocks_that_the_recipe_says() -> None:
    """Compare with every way to cut the layers; what the encoder and the ends of the units may do stays open."""
    settings = settings_with({"layers_per_chunk": [0, 1, 4, 3]}, {}, placement="unified")
    evaluator = evaluator_for(settings)
    candidate = next(c for c in all_candidates(evaluator, 4) if c.assignment.meshes["llm"].pp == 4)
    (chain,) = evaluator.layer_chains(candidate)
    names = [(unit.name, i) for unit in evaluator.problem.shape.units for i in range(len(unit.layers))]
    blocks = {("llm", i) for i in range(1, 9)}
    expected = []
    for inner in combinations(range(1, len(names)), 3):
        bounds = (0, *inner, len(names))
        if [len(blocks & set(names[lo:hi])) for lo, hi in pairwise(bounds)] == [0, 1, 4, 3]:
            expected.append(bounds)
    assert len(expected) > 1
    assert sorted(all_chain_partitions(chain)) == expected


@pytest.mark.parametrize(("placement", "num_ranks"), [("unified", 2), ("disaggregated", 3)])
def test_the_search_finds_the_best_of_what_the_recipe_leaves_open(placement: str, num_ranks: int) -> None:
    llm = {"layers_per_chunk": [1, 2], "tp": 1}
    settings = recipe(llm={"layers": 3}, global_batch=4, parallel={"placement": placement, "llm": llm})
    evaluator = evaluator_for(settings)
    candidates = [c for c in all_candidates(evaluator, num_ranks) if c.placement == placement]
    instance = Instance(evaluator, candidates)
    simulated = list(everything(instance))
    assert simulated
    assert math.isclose(fastest_found(instance), min(c.step_time_s for c in simulated), rel_tol=1e-3)


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (settings_with({"layers_per_chunk": [1, 3, 4]}), 2, r"layers_per_chunk \[1, 3, 4\]"),
        (
            settings_with({"layers_per_chunk": [1, 3, 4], "pp": 3}, {"layers_per_chunk": [1, 2]}, placement="unified"),
            3,
            r"layers_per_chunk \[1, 2\]",
        ),
    ],
)
def test_a_division_without_a_mesh_is_named(settings: Recipe, world_size: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(settings, world_size)
