"""Plans for two encoders, of one or of two modalities, and for an audio encoder alone: every placement."""

from typing import Any

import numpy as np
import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import build_program
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, heard, lengths, recipe, speech
from tests.plans import plan_recipe


def planned(settings: Recipe, world_size: int) -> Plan:
    return plan_recipe(
        settings,
        heard(settings),
        world_size=world_size,
        hardware="cpu-core",
        recipe_sha256="f" * 64,
        request=PlanRequest(num_alternatives=99),
    )


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
@pytest.mark.parametrize("vision", [VISION, None], ids=["vision+audio+llm", "audio+llm"])
def test_every_placement_is_planned(vision: dict[str, Any] | None, world_size: int) -> None:
    settings = speech(vision)
    chosen = planned(settings, world_size)
    units = {"audio", "llm"} | ({"vision"} if vision else set())
    assert set(chosen.units) == units
    assert {r for u in chosen.units.values() for r in u.ranks} == set(range(world_size))
    placements = {chosen.placement, *(a.placement for a in chosen.alternatives)} - {"replicated"}
    with_separate_ranks = {"disaggregated"} if world_size >= len(units) else set()
    assert placements == {"unified"} | with_separate_ranks | ({"colocated"} if world_size > 1 else set())
    build_program(stage_graph(chosen, build_model_shape(settings)))


@pytest.mark.parametrize("audio_pp", [1, 2, 3])
def test_a_fixed_pp_holds_for_the_middle_unit_of_a_pipeline(audio_pp: int) -> None:
    chosen = planned(speech(parallel={"placement": "unified", "audio": {"pp": audio_pp}}), 3)
    pipelines = [u.pp for u in (chosen.units[name] for name in ("vision", "audio", "llm"))]
    tp, dp = chosen.units["llm"].tp, chosen.units["llm"].dp
    assert chosen.units["audio"].pp == audio_pp <= 3 // (tp * dp)
    assert all(pp >= 1 for pp in pipelines)


def test_mesh_sizes_of_a_missing_unit_are_rejected() -> None:
    settings = recipe(parallel={"audio": {"tp": 2}})
    with pytest.raises(PlanError, match=r"parallel\.audio\.tp is set, but model\.audio is not: remove it"):
        plan_recipe(settings, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)


@pytest.mark.parametrize("placement", ["unified", "disaggregated", "colocated"])
def test_two_encoders_of_one_modality_are_units_with_settings_of_their_own(placement: str) -> None:
    degrees = {"tp": 1, "num_microbatches": 4, "recompute": "all"}
    parallel = {"placement": placement, "llm": {"dp": 1, "tp": 1}, "encoders": {"fine": degrees}}
    if placement == "unified":
        del degrees["num_microbatches"]
    plain = recipe(parallel=parallel).model_dump()
    plain["model"]["encoders"] = {
        "fine": VISION | {"modality": "vision", "layers": 2, "merge": 1, "downsample": "identity"}
    }
    settings = Recipe.model_validate(plain)
    samples = lengths()
    images = samples.items["vision"]
    fine = ItemLengths(images.first, images.rows, images.cols, images.tokens, images.tokens)
    more = np.diff(np.concatenate([[0], np.cumsum(fine.features)])[images.first])
    samples = SampleLengths(samples.tokens + more, samples.targets, {"vision": images, "fine": fine})
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"seq_len": 1024})})
    chosen = plan_recipe(settings, samples, world_size=3, hardware="cpu-core", recipe_sha256="f" * 64)
    assert chosen.placement == placement
    assert list(chosen.units) == ["vision", "fine", "llm"]
    stages = chosen.units["fine"].stages
    assert sum(hi - lo for lo, hi in (stage.layers for stage in stages)) == 4
    assert {layer for stage in stages for layer in stage.recompute} >= {1, 2}
    assert not {layer for stage in chosen.units["vision"].stages for layer in stage.recompute}
    assert chosen.schedule.num_microbatches["fine"] == degrees.get("num_microbatches", 8)
    build_program(stage_graph(chosen, build_model_shape(settings)))
