"""An image generator after the LLM: from stated lengths to a checked and simulated plan."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import assign
from mmtrain.data import GroupStream
from mmtrain.data import build_index as index
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import model_timing, simulate_first_batch
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import Backward, Forward, build_program, simulate, step_loads
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import UNET, recipe, with_generator
from tests.plans import plan_recipe

DIT: dict[str, Any] = {
    "kind": "dit", "widths": (64,), "heads": (4,), "layers": 4, "patch": 2, "context_width": 24, "context_tokens": 8,
}  # fmt: skip


@pytest.fixture
def unet_recipe(tmp_path: Path) -> Recipe:
    """Make a recipe that generates some images by a U-Net."""
    return with_generator(recipe(), tmp_path / "lengths.csv", UNET)


@pytest.fixture
def dit_recipe(unet_recipe: Recipe) -> Recipe:
    """Make the same recipe with a diffusion transformer."""
    plain = unet_recipe.model_dump()
    plain["model"]["generator"] = DIT
    return Recipe.model_validate(plain)


def planned(settings: Recipe, world_size: int, **parallel: Any) -> Plan:
    sizes = settings.parallel.model_copy(update=parallel)
    settings = settings.model_copy(update={"parallel": sizes})
    lengths = index(settings).lengths
    return plan_recipe(
        settings,
        lengths,
        world_size=world_size,
        hardware="cpu-core",
        recipe_sha256="f" * 64,
        request=PlanRequest(explain=True),
    )


def test_the_baseline_with_stages_gives_the_generator_a_replica_on_each_rank_of_a_tp_group(tmp_path: Path) -> None:
    """Plan MMScale's Megatron-LM for 32 ranks: a stage for each of encoder and generator, and two for the LLM."""
    parallel = {"placement": "disaggregated", "llm": {"dp": 1}}
    settings = recipe(llm={"heads": 8, "kv_heads": 8}, global_batch=16, parallel=parallel)
    settings = with_generator(settings, tmp_path / "lengths.csv", UNET)
    baseline = plan_recipe(
        settings,
        index(settings).lengths,
        world_size=32,
        hardware="a100-80g",
        recipe_sha256="f" * 64,
        request=PlanRequest(baseline="megatron-stages"),
    )
    sizes = {name: (unit.tp, unit.pp, unit.dp) for name, unit in baseline.units.items()}
    assert sizes == {"vision": (1, 1, 8), "llm": (8, 2, 1), "generator": (1, 1, 8)}
    assert baseline.schedule.num_microbatches == dict.fromkeys(sizes, 16)
    build_program(stage_graph(baseline, build_model_shape(settings)))


@pytest.mark.parametrize("placement", ["unified", "disaggregated"])
def test_a_generator_is_placed_and_its_program_checked(unet_recipe: Recipe, placement: str) -> None:
    chosen = planned(unet_recipe, 4, placement=placement)
    assert chosen.placement == placement
    unit = chosen.units["generator"]
    assert (unit.tp, unit.pp, len(unit.stages)) == (1, 1, 1)
    graph = stage_graph(chosen, build_model_shape(unet_recipe))
    assert any((e.src.unit, e.dst.unit) == ("llm", "generator") for e in graph.edges)
    build_program(graph)
    assert 0 < chosen.predicted.mfu < 1


def test_every_step_waits_for_the_generator(unet_recipe: Recipe) -> None:
    """Show that a step with ten times its layers takes longer, since the LLM's backward waits for them."""
    model = unet_recipe.model
    assert model.generator is not None
    larger = model.generator.model_copy(update={"layers": 10})
    slower = unet_recipe.model_copy(update={"model": model.model_copy(update={"generator": larger})})
    assert planned(slower, 3).predicted.step_time_s > planned(unet_recipe, 3).predicted.step_time_s


def test_a_u_net_is_not_divided(unet_recipe: Recipe) -> None:
    """Every rank of a TP group computes it whole, which helps nothing on ranks of its own."""
    generator, llm = unet_recipe.parallel.generator, unet_recipe.parallel.llm
    with pytest.raises(PlanError, match=r"parallel.generator.pp: 2 stages for a U-Net.*; allowed: 1$"):
        planned(unet_recipe, 4, generator=generator.model_copy(update={"pp": 2}))
    with pytest.raises(PlanError, match=r"parallel.generator.tp: 3 is not a power of two.*; allowed: 1, 2, 4"):
        planned(unet_recipe, 4, generator=generator.model_copy(update={"tp": 3}))
    unified = planned(unet_recipe, 4, placement="unified", llm=llm.model_copy(update={"tp": 2}))
    assert {name: unit.tp for name, unit in unified.units.items()} == {"vision": 2, "llm": 2, "generator": 2}
    apart = planned(unet_recipe, 4, placement="disaggregated", llm=llm.model_copy(update={"tp": 2}))
    assert apart.units["generator"].tp == 1
    for chosen in (unified, apart):
        build_program(stage_graph(chosen, build_model_shape(unet_recipe)))


@pytest.mark.parametrize("placement", ["unified", "disaggregated"])
@pytest.mark.parametrize("size", [{"pp": 2}, {"tp": 2}])
def test_a_transformer_is_divided_by_pp_and_tp_like_other_units(
    dit_recipe: Recipe, placement: str, size: dict[str, int]
) -> None:
    fixed = dit_recipe.parallel.generator.model_copy(update=size)
    chosen = planned(dit_recipe, 4, placement=placement, generator=fixed)
    unit = chosen.units["generator"]
    assert {key: getattr(unit, key) for key in size} == size
    assert len(unit.stages) == unit.pp
    assert not unit.sp
    if placement == "unified":
        assert len({u.tp for u in chosen.units.values()}) == 1
    build_program(stage_graph(chosen, build_model_shape(dit_recipe)))


def test_stages_of_a_transformer_hold_a_share_of_its_memory(dit_recipe: Recipe) -> None:
    peaks = []
    for pp in (1, 4):
        parallel = dit_recipe.parallel.generator.model_copy(update={"tp": 1, "dp": 1, "pp": pp})
        model = dit_recipe.model.model_copy(update={"generator": GeneratorSettings(**{**DIT, "layers": 24})})
        deeper = dit_recipe.model_copy(update={"model": model})
        peaks.append(
            max(
                planned(
                    deeper, 2 + pp, placement="disaggregated", generator=parallel
                ).predicted.peak_memory_gib.values()
            )
        )
    assert peaks[1] < 0.6 * peaks[0]


def test_settings_that_contradict_a_generator_are_named(dit_recipe: Recipe) -> None:
    """Three heads leave a transformer tp 1, and a generator has the LLM's tp in `unified`."""
    generator = GeneratorSettings(**{**DIT, "widths": (60,), "heads": (3,)})
    settings = dit_recipe.model_copy(update={"model": dit_recipe.model.model_copy(update={"generator": generator})})
    llm = dit_recipe.parallel.llm.model_copy(update={"tp": 2})
    named = (
        r"unified: parallel\.llm\.tp 2 cannot be met: .*generator\.tp \(1\) do not go together.*of a generator the LLM"
    )
    with pytest.raises(PlanError, match=named):
        planned(settings, 2, placement="unified", llm=llm)


def _num_chunks(plan: Plan) -> int:
    """Return how often the stages of all units, along the data flow, go round ranks that each hold tp 1 and dp 1."""
    ranks = [unit.ranks[stage.stage % unit.pp] for unit in plan.units.values() for stage in unit.stages]
    return 1 + sum(behind < before for before, behind in itertools.pairwise(ranks))


@pytest.mark.parametrize("dispatch", ["all", "llm", "none"])
def test_every_rank_draws_images_in_a_phase_of_each_mini_batch(dit_recipe: Recipe, dispatch: str) -> None:
    chosen = planned(dit_recipe, 2, placement="replicated", dispatch=dispatch)
    assert {unit.dispatch for unit in chosen.units.values()} == {dispatch}
    assert {unit.ranks for unit in chosen.units.values()} == {(0, 1)}
    numbers = chosen.schedule.num_microbatches
    assert numbers["generator"] == numbers["llm"]  # a phase behind each forward of the LLM
    build_program(stage_graph(chosen, build_model_shape(dit_recipe)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_u_net_is_in_one_chunk_of_an_interleaved_pipeline(unet_recipe: Recipe, world_size: int) -> None:
    """One chunk holds all of it; left free, the plan is as fast as the better of one and two chunks."""
    steps = {}
    for vpp in (1, 2):
        llm = unet_recipe.parallel.llm.model_copy(update={"tp": 1, "dp": 1, "vpp": vpp})
        chosen = planned(unet_recipe, world_size, placement="unified", llm=llm)
        assert _num_chunks(chosen) == vpp
        assert [s.layers for s in chosen.units["generator"].stages] == [
            (0, len(build_model_shape(unet_recipe).unit("generator").layers))
        ]
        build_program(stage_graph(chosen, build_model_shape(unet_recipe)))
        steps[vpp] = chosen.predicted.step_time_s
    llm = unet_recipe.parallel.llm.model_copy(update={"tp": 1, "dp": 1})
    free = planned(unet_recipe, world_size, placement="unified", llm=llm).predicted.step_time_s
    assert free <= min(steps.values()) * 1.001


def with_degrees(settings: Recipe, **degrees: dict[str, int]) -> Recipe:
    """Return the recipe with other degrees of units: `llm={"pp": 2}`."""
    changed = {unit: settings.parallel.of(unit).model_copy(update=of_unit) for unit, of_unit in degrees.items()}
    return settings.model_copy(update={"parallel": settings.parallel.model_copy(update=changed)})


ONE_RANK = {"tp": 1, "pp": 1, "dp": 1}
# MMScale (arXiv 2408.04275), section 7.3: which units are frozen. Queries and projectors train in all cases.
FROZEN = {
    "complete": (),
    "encoder only": ("llm", "generator"),
    "llm only": ("vision", "generator"),
    "generator only": ("vision", "llm"),
    "projectors only": ("vision", "llm", "generator"),
}


def test_frozen_units_take_the_time_of_what_is_left_to_compute(dit_recipe: Recipe) -> None:
    """Compare the simulated seconds of each unit's rank with those of the complete case."""
    busy: dict[str, dict[str, float]] = {}
    steps = {}
    for case, frozen in FROZEN.items():
        plain = dit_recipe.model_dump()
        for unit in frozen:
            plain["model"][unit]["freeze"] = True
        settings = Recipe.model_validate(plain)
        settings = with_degrees(settings, vision=ONE_RANK, llm=ONE_RANK, generator=ONE_RANK)
        problem = formulate_problem(
            settings, index(settings).lengths, world_size=3, hardware="cpu-core", recipe_sha256="f" * 64
        )
        chosen = planned(settings, 3, placement="disaggregated")
        steps[case] = chosen.predicted.step_time_s
        graph = stage_graph(chosen, problem.shape)
        timeline = simulate_first_batch(graph, chosen.schedule, Evaluator(problem).layer_costs, problem.hardware)
        busy[case] = dict.fromkeys(("vision", "llm", "generator"), 0.0)
        for span in timeline.spans:
            if isinstance(span.action, Forward | Backward):
                busy[case][span.action.stage.unit] += span.duration_s
    for case, frozen in FROZEN.items():
        for unit, seconds in busy[case].items():
            ratio = seconds / busy["complete"][unit]
            assert ratio < 0.85 if unit in frozen else ratio == pytest.approx(1.0, rel=0.02), (case, unit)
    assert max(steps, key=lambda case: steps[case]) == "complete"
    assert min(steps, key=lambda case: steps[case]) == "projectors only"
    assert busy["projectors only"]["vision"] < 0.6 * busy["complete"]["vision"]  # no gradient passes its layers
    assert busy["generator only"]["llm"] > 0.5 * busy["complete"]["llm"]  # gradients pass the LLM, to the queries


@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_a_generator_shares_the_llms_ranks(unet_recipe: Recipe, dit_recipe: Recipe, kind: str) -> None:
    settings = unet_recipe if kind == "unet" else dit_recipe
    llm = settings.parallel.llm.model_copy(update={"tp": 1, "pp": 2, "vpp": 1})
    generator = settings.parallel.generator.model_copy(update={"pp": 1})
    chosen = planned(settings, 2, placement="colocated", llm=llm, generator=generator)
    unit = chosen.units["generator"]
    assert (unit.tp, unit.pp, unit.dp, set(unit.ranks)) == (1, 1, 2, {0, 1})
    shape = build_model_shape(settings)
    build_program(stage_graph(chosen, shape), kind=chosen.schedule.kind, order=chosen.schedule.order)
    with pytest.raises(PlanError, match=r"no mesh of vision and generator whose tp and pp divide the LLM's"):
        planned(settings, 1, placement="colocated")


def test_a_generator_without_encoders_shares_the_llms_ranks(dit_recipe: Recipe) -> None:
    plain = dit_recipe.model_dump()
    plain["model"]["vision"] = None
    file = plain["data"]["sources"][0]["path"]
    file.write_text("count,text,generator\n40,60,64\n20,30,2x64\n", encoding="utf-8")
    settings = Recipe.model_validate(plain)
    chosen = planned(settings, 2, placement="colocated")
    assert set(chosen.units) == {"llm", "generator"}
    assert chosen.predicted.scheduling_efficiency is None
    build_program(
        stage_graph(chosen, build_model_shape(settings)), kind=chosen.schedule.kind, order=chosen.schedule.order
    )


def test_a_budget_of_the_generator_bounds_what_a_group_draws(dit_recipe: Recipe, tmp_path: Path) -> None:
    """Draw several images of several sizes: groups keep the budget, and the generator's rank needs less memory."""
    budget, file = 400, tmp_path / "drawn.csv"
    file.write_text("count,text,generator\n16,60,\n16,60,64\n16,60,256\n16,60,2x64 256\n", encoding="utf-8")
    plain = dit_recipe.model_dump()
    plain["model"]["vision"] = None
    plain["data"] |= {"sources": [{"path": file}], "seq_len": 512}
    plain["train"]["global_batch"] = 4
    largest, peaks = [], []
    for budgets in ({}, {"generator": budget}):
        plain["data"]["budgets"] = budgets
        settings = with_degrees(Recipe.model_validate(plain), llm=ONE_RANK, generator=ONE_RANK)
        data = index(settings)
        images = data.lengths.items["generator"]
        drawn = np.add.reduceat(np.append(images.tokens, 0), images.first[:-1]) * (np.diff(images.first) > 0)
        stream = GroupStream.of(settings, data)
        largest.append(max(int(drawn[group].sum()) for group in stream.groups(0, 2 * stream.groups_per_epoch)))
        chosen = planned(settings, 2, placement="disaggregated")
        peaks.append(chosen.predicted.peak_memory_gib[str(chosen.units["generator"].ranks[0])])
    assert largest[1] <= budget < largest[0]
    assert peaks[1] < 0.9 * peaks[0]


def test_microbatches_are_ordered_by_what_a_generator_costs(dit_recipe: Recipe, tmp_path: Path) -> None:
    """Give samples of equal text images to draw of several numbers and sizes: orders by their costs are faster."""
    plain = dit_recipe.model_dump()
    file = tmp_path / "drawn.csv"
    file.write_text("count,text,generator\n16,60,\n16,60,64\n16,60,256\n16,60,2x64 256\n", encoding="utf-8")
    plain["model"]["vision"] = None
    plain["data"] |= {"sources": [{"path": file}], "seq_len": 128}
    plain["train"]["global_batch"] = 16
    settings = with_degrees(Recipe.model_validate(plain), llm=ONE_RANK | {"pp": 2}, generator=ONE_RANK)
    lengths = index(settings).lengths
    chosen = planned(settings, 3, placement="disaggregated")
    shape = build_model_shape(settings)
    graph = stage_graph(chosen, shape)
    program = build_program(graph)
    targets = derive_step_targets(settings, chosen, lengths)
    assert "generator" in targets.item_costs
    problem = formulate_problem(settings, lengths, world_size=3, hardware="cpu-core", recipe_sha256="f" * 64)
    costs = Evaluator(problem).layer_costs
    counts = chosen.schedule.num_microbatches

    def step_seconds(samples: Any, reorder: bool) -> float:
        groups = [np.array([sample]) for sample in samples]
        meta = assign(0, 0, groups, lengths, dict.fromkeys(counts, 1), counts, replace(targets, reorder=reorder))
        timing = model_timing(graph, costs, step_loads(graph, meta), problem.hardware)
        return simulate(program, timing).step_time_s

    ratios = []
    for seed in range(4):
        samples = np.random.default_rng(seed).permutation(len(lengths))[:16]
        ratios.append(step_seconds(samples, True) / step_seconds(samples, False))
    assert max(ratios) < 1.005
    assert min(ratios) < 0.99
