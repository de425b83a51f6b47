"""An image generator after the LLM, from lengths that are stated to a plan that is checked and simulated."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import build_index as index
from mmtrain.errors import PlanError
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan import Plan, stage_graph
from mmtrain.plan.planner import plan
from mmtrain.plan.search.profiled_sizes import sizes_to_measure
from mmtrain.program import build_program
from mmtrain.recipe.model_settings import GeneratorSettings
from mmtrain.recipe.schema import Recipe
from tests.plan.factory import recipe

UNET: dict[str, Any] = {
    "kind": "unet", "widths": (16, 32), "heads": (2, 4), "layers": 1, "context_width": 24, "context_tokens": 8,
}  # fmt: skip


DIT: dict[str, Any] = {
    "kind": "dit", "widths": (64,), "heads": (4,), "layers": 4, "patch": 2, "context_width": 24, "context_tokens": 8,
}  # fmt: skip


@pytest.fixture
def drawing(tmp_path: Path) -> Recipe:
    """A recipe whose samples ask for some pictures."""
    file = tmp_path / "lengths.csv"
    file.write_text("count,text,vision,generator\n40,60,16,64\n20,100,36,\n20,30,,2x64\n", encoding="utf-8")
    plain = recipe().model_dump()
    plain["model"]["generator"] = UNET
    plain["data"] |= {"sources": [{"path": file}], "tokenizer": None}
    return Recipe.model_validate(plain)


@pytest.fixture
def painting(drawing: Recipe) -> Recipe:
    """The same with a diffusion transformer."""
    plain = drawing.model_dump()
    plain["model"]["generator"] = DIT
    return Recipe.model_validate(plain)


def planned(settings: Recipe, world_size: int, **parallel: Any) -> Plan:
    sizes = settings.parallel.model_copy(update=parallel)
    settings = settings.model_copy(update={"parallel": sizes})
    lengths = index(settings).lengths
    return plan(settings, lengths, world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64, explain=True)


@pytest.mark.parametrize("placement", ["unified", "disaggregated"])
def test_a_generator_is_placed_and_its_program_checked(drawing: Recipe, placement: str) -> None:
    chosen = planned(drawing, 4, placement=placement)
    assert chosen.placement == placement
    unit = chosen.units["generator"]
    assert (unit.tp, unit.pp, len(unit.stages)) == (1, 1, 1)
    graph = stage_graph(chosen, build_model_shape(drawing))
    assert any((e.src.unit, e.dst.unit) == ("llm", "generator") for e in graph.edges)
    build_program(graph)
    assert 0 < chosen.predicted.mfu < 1


def test_every_step_waits_for_the_pictures(drawing: Recipe) -> None:
    """Ten times the layers, and the LLM's backward waits for all of them."""
    model = drawing.model
    assert model.generator is not None
    larger = model.generator.model_copy(update={"layers": 10})
    slower = drawing.model_copy(update={"model": model.model_copy(update={"generator": larger})})
    assert planned(slower, 3).predicted.step_time_s > planned(drawing, 3).predicted.step_time_s


def test_a_u_net_is_not_cut(drawing: Recipe) -> None:
    for size in ("tp", "pp"):
        with pytest.raises(PlanError, match=f"parallel.generator.{size}: 2 .*; allowed: 1$"):
            planned(drawing, 4, generator=drawing.parallel.generator.model_copy(update={size: 2}))


@pytest.mark.parametrize("placement", ["unified", "disaggregated"])
@pytest.mark.parametrize("size", [{"pp": 2}, {"tp": 2}])
def test_a_transformer_is_cut_and_split_as_other_units(painting: Recipe, placement: str, size: dict[str, int]) -> None:
    fixed = painting.parallel.generator.model_copy(update=size)
    chosen = planned(painting, 4, placement=placement, generator=fixed)
    unit = chosen.units["generator"]
    assert {key: getattr(unit, key) for key in size} == size
    assert len(unit.stages) == unit.pp
    assert not unit.sp
    if placement == "unified":
        assert len({u.tp for u in chosen.units.values()}) == 1
    build_program(stage_graph(chosen, build_model_shape(painting)))


def test_stages_of_a_transformer_take_a_share_of_its_memory(painting: Recipe) -> None:
    """Frozen around it, so that its layers alone decide."""
    peaks = []
    for pp in (1, 4):
        own = painting.parallel.generator.model_copy(update={"tp": 1, "dp": 1, "pp": pp})
        model = painting.model.model_copy(update={"generator": GeneratorSettings(**{**DIT, "layers": 24})})
        alone = painting.model_copy(update={"model": model})
        peaks.append(
            max(planned(alone, 2 + pp, placement="disaggregated", generator=own).predicted.peak_memory_gib.values())
        )
    assert peaks[1] < 0.6 * peaks[0]


def test_only_units_with_modules_are_measured(drawing: Recipe) -> None:
    assert set(sizes_to_measure(drawing, 2)) == {"vision", "llm"}


def test_what_clashes_with_a_generator_is_said(drawing: Recipe) -> None:
    """A U-Net is whole, and `unified` has one tp; no encoder's idle time is left to try."""
    llm = drawing.parallel.llm.model_copy(update={"tp": 2})
    with pytest.raises(PlanError, match=r"unified: parallel\.llm\.tp 2 cannot be met: .*generator\.tp \(1\).*common"):
        planned(drawing, 2, llm=llm)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_u_net_is_whole_in_an_interleaved_line(drawing: Recipe, world_size: int) -> None:
    """One part holds all of it, in the last round; without chunks the same ranks are no faster."""
    steps = {}
    for vpp in (1, 2):
        llm = drawing.parallel.llm.model_copy(update={"tp": 1, "dp": 1, "vpp": vpp})
        chosen = planned(drawing, world_size, placement="unified", llm=llm)
        assert max(unit.vpp for unit in chosen.units.values()) == vpp
        assert [s.layers for s in chosen.units["generator"].stages] == [
            (0, len(build_model_shape(drawing).unit("generator").layers))
        ]
        build_program(stage_graph(chosen, build_model_shape(drawing)))
        steps[vpp] = chosen.predicted.step_time_s
    llm = drawing.parallel.llm.model_copy(update={"tp": 1, "dp": 1})
    free = planned(drawing, world_size, placement="unified", llm=llm).predicted.step_time_s
    assert free <= min(steps.values()) * 1.001
