"""Layers of a small model are measured in separate processes, and the planner uses the table."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mmtrain.costs import AnalyticCosts, CostTable, MeasuredCosts, TokenLoad, preset
from mmtrain.costs.cost_table import LayerSample, TimedPass
from mmtrain.errors import PlanError, UserError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.planning.space.constraints import sizes_to_measure
from mmtrain.recipe import Recipe
from mmtrain.runtime.profiling.cut_profiler import ProfiledUnit, _Passes, seconds_of_a_stop
from mmtrain.runtime.profiling.layer_profiler import build_layer_profiler, median_without_outliers, relative_deviation
from mmtrain.runtime.profiling.probes import make_probes
from mmtrain.runtime.profiling.profile import (
    ProfileRequest,
    _measure_cut,
    _measures_chunks,
    _relative_rank_times,
    _time_spread,
    empty_cost_table,
    profile,
)
from mmtrain.runtime.world import World
from tests.distributed import fork_ranks
from tests.planning import factory
from tests.plans import plan_recipe

AUDIO = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64, "mel_bins": 16, "max_frames": 80, "downsample": 2}


VISION = {**factory.VISION, "layers": 1, "hidden": 32, "ffn": 64}
LLM = {"layers": 1, "hidden": 64, "ffn": 96}
# Of two blocks one has windows; the LLM rotates by time, row and column.
WINDOWED_VISION = {**VISION, "layers": 2, "positions": "rotary", "window": 4, "full_attention_blocks": (1,)}
WINDOWED_LLM = {**LLM, "layers": 2, "window": 16, "full_attention_blocks": (1,), "rope_sections": (2, 3, 3)}


def _recipe(vision: dict[str, Any] = VISION, llm: dict[str, Any] = LLM, **changes: Any) -> Recipe:
    return factory.recipe(vision=vision, llm=llm, seq_len=128, **changes)


def _measure(_rank: int, _size: int, folder: Path, settings: Recipe, tp: tuple[int, ...]) -> str:
    layer_profile = profile(
        ProfileRequest(settings, "cpu-core", 2, {"vision": (1,), "llm": tp}, factory.lengths(), repeats=(1, 1))
    )
    layer_profile.table.save(folder / "costs.json")
    assert set(layer_profile.errors) == {"vision tp1", *(f"llm tp{n}" for n in tp)}
    assert all(error >= 0 for errors in layer_profile.errors.values() for error in errors)
    return layer_profile.table.model_dump_json()


@pytest.fixture(scope="module")
def table() -> CostTable:
    """Measure in a separate process, because one that has run a backward, as pytest's may have, cannot fork.

    Each group of ranks that is measured starts Python anew, which takes most of the time.
    """
    [text] = fork_ranks(1, _measure, _recipe(parallel={"llm": {"tp_overlap": True}}), (1, 2))
    return CostTable.model_validate_json(text)


@pytest.mark.parametrize(
    ("hardware", "setting", "expected"),
    [("cpu-core", "auto", False), ("cpu-core", True, True), ("h100-80g", "auto", True), ("h100-80g", False, False)],
)
def test_chunks_are_measured_where_a_plan_may_have_them(hardware: str, setting: Any, expected: bool) -> None:
    settings = _recipe(parallel={"llm": {"tp_overlap": setting}})
    request = ProfileRequest(settings, hardware, 2, {"llm": (1, 2)})
    llm = build_model_shape(settings).unit("llm")
    assert [_measures_chunks(request, llm, tp) for tp in (1, 2)] == [False, expected]


@pytest.mark.slow
def test_every_kind_of_layer_is_in_the_table(table: CostTable) -> None:
    assert table.core_speed is not None
    assert table.cut_s is not None
    assert table.time_spread is not None
    assert table.time_spread.ranks is not None
    kinds = [(entry.layer["kind"], entry.tp) for entry in table.layers]
    llm = ["embedding", "decoder_block", "head"]
    vision = ["patch_embed", "vit_block", "projector"]
    in_chunks = [entry for entry in table.layers if entry.tp_chunks > 1]
    assert [(entry.layer["kind"], entry.tp) for entry in in_chunks] == [("decoder_block", 2)]
    assert sorted(kinds) == sorted(
        [(k, 1) for k in vision] + [(k, tp) for k in llm for tp in (1, 2)] + [("decoder_block", 2)]
    )
    for entry in table.layers:
        assert len({s.tokens for s in entry.samples}) >= 4
        for sample in entry.samples:
            assert sample.seconds["forward"] > 0
            assert sample.seconds["backward"] > 0
    assert {(m.kind, m.size) for m in table.messages} == {
        (kind, 2) for kind in ("p2p", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    }
    assert all(seconds > 0 for message in table.messages for seconds in message.seconds)
    overlapped = {message.kind for message in table.messages if len(message.overlap_slowdown) == len(message.nbytes)}
    assert overlapped == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_saved_bytes_are_near_the_memory_model(table: CostTable) -> None:
    model, costs = (
        AnalyticCosts(preset("cpu-core"), "fp32"),
        MeasuredCosts(table, AnalyticCosts(preset("cpu-core"), "fp32")),
    )
    for unit in build_model_shape(_recipe()).units:
        load = TokenLoad.of(np.array([36, 28] if unit.name == "vision" else [64]))
        counted, modelled = (sum(c.activation_bytes(x, 1, load, False) for x in unit.layers) for c in (costs, model))
        assert 0.95 * counted <= modelled <= 1.35 * counted, unit.name  # an index or two is not modelled


@pytest.mark.slow
def test_the_planner_uses_a_measured_table_and_names_it_as_its_source(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table.save(path)
    settings = _recipe(cluster={"costs": path})
    chosen = plan_recipe(settings, factory.lengths(), world_size=2, hardware="cpu-core", recipe_sha256="x")
    assert chosen.predicted.cost_source.startswith("measured: ")
    with pytest.raises(PlanError, match=r"cluster\.costs: .* was made for hardware cpu-core, but .* h100-80g"):
        plan_recipe(settings, factory.lengths(), world_size=8, hardware="h100-80g", recipe_sha256="x")


@pytest.mark.slow
def test_blocks_with_windows_are_measured_apart_from_others_and_planned_by_it(tmp_path: Path) -> None:
    whole = {"tp": 1}
    settings = _recipe(WINDOWED_VISION, WINDOWED_LLM, parallel={"vision": whole, "llm": whole})
    [text] = fork_ranks(1, _measure, settings, (1,))
    table = CostTable.model_validate_json(text)
    shapes = [entry.shape for entry in table.layers]
    assert {shape.attention.window for shape in shapes if shape.kind == "decoder_block"} == {0, 16}
    assert {shape.attention.window_side for shape in shapes if shape.kind == "vit_block"} == {0, 4}
    path = tmp_path / "costs.json"
    table.save(path)
    settings = _recipe(WINDOWED_VISION, WINDOWED_LLM, parallel={"vision": whole, "llm": whole}, cluster={"costs": path})
    chosen = plan_recipe(settings, factory.lengths(), world_size=2, hardware="cpu-core", recipe_sha256="x")
    assert chosen.predicted.cost_source.startswith("measured: ")
    assert "modelled" not in chosen.predicted.cost_source


def test_probes_fill_the_recipes_sequences() -> None:
    settings = _recipe()
    for unit in build_model_shape(settings).units:
        fitted, held_out = make_probes(settings, unit)
        largest = max(p.load.tokens for p in fitted)
        assert 0.7 <= largest / (128 * unit.layers[-1].projector.joins) <= 1.3
        assert held_out
        assert not set(held_out) & set(fitted)
        assert len({p.load.num_sequences for p in fitted}) > 1


def test_probes_of_a_resampler_have_the_items_whose_features_fill_a_sequence() -> None:
    resampler = {"merge": 1, "downsample": "identity", "projector": {"kind": "resampler", "queries": 8}}
    settings = _recipe(VISION | resampler)
    fitted, _ = make_probes(settings, build_model_shape(settings).unit("vision"))
    assert 0.7 <= max(probe.load.num_sequences for probe in fitted) / (128 / 8) <= 1.3


def test_probes_consist_of_sizes_that_occur_in_the_data() -> None:
    lengths = factory.lengths()
    settings = _recipe()
    vision, llm = build_model_shape(settings).units
    images = lengths.items["vision"]
    held = set(zip(images.rows.tolist(), images.cols.tolist(), strict=True))
    for probe in [p for probes in make_probes(settings, vision, lengths) for p in probes]:
        assert set(probe.sizes) <= held
    share = images.features.sum() / lengths.tokens.sum()
    for probe in [p for probes in make_probes(settings, llm, lengths) for p in probes]:
        assert set(probe.sizes[:-1]) <= set(lengths.tokens.tolist())  # the last is cut, or alone
        assert probe.load.tokens <= settings.data.seq_len
        assert probe.features == (("vision", int(share * probe.load.tokens)),)
        again = probe.shuffled(np.random.default_rng(1))
        assert sorted(again.sizes) == sorted(probe.sizes)
        assert again.load == probe.load


def _with_generator() -> Recipe:
    plain = _recipe().model_dump()
    plain["model"]["generator"] = {
        "kind": "dit", "widths": (8,), "heads": (2,), "layers": 1, "channels": 3, "patch": 4, "context_width": 8,
        "context_tokens": 3, "image_size": 8,
    }  # fmt: skip
    return Recipe.model_validate(plain)


def test_probes_of_an_llm_with_a_generator_hold_the_queries_of_whole_images() -> None:
    settings = _with_generator()
    llm = build_model_shape(settings).unit("llm")
    plain = factory.lengths()
    images = plain.items["vision"]
    queries = replace(images, features=np.full_like(images.features, 3))
    lengths = replace(plain, items={"vision": images, "generator": queries})
    counts = set()
    for probe in [p for probes in make_probes(settings, llm, lengths) for p in probes]:
        inputs = probe.inputs(settings, torch.device("cpu"), torch.float32)
        assert isinstance(inputs, TextInput)
        assert set(inputs.feature_positions) == {"vision"}
        assert inputs.query_positions is not None
        assert len(inputs.query_positions) % 3 == 0
        assert not set(inputs.query_positions.tolist()) & set(inputs.feature_positions["vision"].tolist())
        counts.add(len(inputs.query_positions))
    assert max(counts) > 0
    without_data = make_probes(settings, llm)[0][0].inputs(settings, torch.device("cpu"), torch.float32)
    assert isinstance(without_data, TextInput)
    assert without_data.query_positions is not None
    assert len(without_data.query_positions) == 0


def test_probes_of_stated_lengths_are_images_that_the_encoder_accepts() -> None:
    lengths = factory.lengths()
    settings = _recipe()
    images = lengths.items["vision"]
    column = replace(images, rows=images.rows * images.cols, cols=np.ones_like(images.cols))
    stated = replace(lengths, items={"vision": column})
    vision = settings.model.vision
    assert vision is not None
    for probe in [
        p for probes in make_probes(settings, build_model_shape(settings).unit("vision"), stated) for p in probes
    ]:
        for rows, cols in probe.sizes:  # type: ignore[misc]
            assert rows % vision.merge == cols % vision.merge == 0 < min(rows, cols) <= vision.max_side
            assert min(abs(rows * cols - n) for n in set(column.rows.tolist())) <= 4


def test_only_tp_sizes_that_the_recipe_allows_are_profiled() -> None:
    settings = _recipe()
    assert sizes_to_measure(settings, 2) == {"vision": (1, 2), "llm": (1, 2)}
    assert sizes_to_measure(settings, 4, ["llm"], "1,4") == {"llm": (1, 4)}
    with pytest.raises(UserError, match="--only lmm: no such unit; allowed: vision, llm"):
        sizes_to_measure(settings, 2, ["lmm"])
    with pytest.raises(UserError, match="--tp 3: not possible on 4 ranks; allowed: vision: 1, 2, 4"):
        sizes_to_measure(settings, 4, (), "3")
    with pytest.raises(UserError, match="whole numbers"):
        sizes_to_measure(settings, 4, (), "two")


def test_a_measured_stop_takes_the_place_of_the_modelled_one_also_after_another_profile() -> None:
    model = AnalyticCosts(preset("cpu-core"), "fp32")
    empty = empty_cost_table(ProfileRequest(_recipe(), "cpu-core", 2, {}))
    measured = empty.model_copy(update={"cut_s": 3e-4})
    assert MeasuredCosts(empty, model).cut() == model.cut() > 0
    assert MeasuredCosts(measured.merged(empty), model).cut() == MeasuredCosts(measured, model).cut() == 3e-4
    with pytest.raises(ValidationError, match="cut_s"):
        CostTable.model_validate({**empty.model_dump(), "cut_s": -1e-4})


def test_passes_stop_where_the_tensor_parallel_group_communicates() -> None:
    """An encoder's part of about equal size runs at each stop, and the weights of all layers train again afterwards."""
    recipe = _recipe(vision={**VISION, "layers": 2}, llm={**LLM, "layers": 2})
    model, groups, world = build_model_shape(recipe), ParallelGroups.single(), World(0, 1, torch.device("cpu"))
    units = []
    for name in ("llm", "vision"):
        probe = make_probes(recipe, model.unit(name), factory.lengths())[0][0]
        profiler = build_layer_profiler(recipe, model, model.unit(name), groups, world, torch.float32)
        units.append(ProfiledUnit(profiler, groups, probe))
    llm, encoder = map(_Passes, units)
    first_blocks = 1  # segments before: the embedding
    stops = {"forward": ("projection", "down"), "backward": ("qkv", "up")}
    for direction, pieces in stops.items():
        inner = llm.bounds_at_collectives(direction)[1:-1]  # type: ignore[arg-type]
        offset = direction == "forward"
        expected = [
            first_blocks + 8 * block + BLOCK_PIECES.index(piece) + offset for block in (0, 1) for piece in pieces
        ]
        assert inner == expected
    assert encoder.even_bounds(5) == [0, 3, 7, 10, 14, 18], "two blocks of eight pieces, embedding and projector"
    assert seconds_of_a_stop(*units, recipe, rounds=1) >= 0
    assert all(param.requires_grad for unit in units for param in unit.profiler.stage.parameters())
    assert all(
        param.grad is None or not param.grad.any() for unit in units for param in unit.profiler.stage.parameters()
    )


def test_stops_are_not_measured_where_the_encoder_has_no_group_on_every_rank() -> None:
    recipe, world = _recipe(), World(0, 3, torch.device("cpu"))
    request = ProfileRequest(recipe, "cpu-core", 3, {"vision": (2,), "llm": (3,)})
    assert _measure_cut(request, build_model_shape(recipe), 3, world, torch.float32) is None


def test_outliers_do_not_change_the_typical_value() -> None:
    assert median_without_outliers([1.0, 1.1, 0.9, 1.0, 50.0, 60.0]) == 1.0
    assert median_without_outliers([2.0, 2.0, 2.0, 9.0]) == 2.0


def test_ranks_differ_by_what_all_their_passes_say() -> None:
    """Rank 1 takes a tenth longer than rank 0 on average, less in one layer and more in the other."""

    def sample(forward: float, backward: float) -> LayerSample:
        seconds: dict[TimedPass, float] = {"forward": forward, "backward": backward, "recompute": 0.0}
        return LayerSample(tokens=8, sum_sq=64, max_len=8, num_sequences=1, seconds=seconds, activation_bytes=0)

    small = _relative_rank_times([{"a": sample(1.0, 2.0)}, {"a": sample(1.05, 2.1)}])
    large = _relative_rank_times([{"a": sample(2.0, 4.0)}, {"a": sample(2.3, 4.6)}])
    assert small == pytest.approx([1 / 1.025, 1.05 / 1.025])
    spread = _time_spread([small, large], [0.02, 0.04])
    means = [statistics.fmean(of_rank) for of_rank in zip(small, large, strict=True)]
    assert spread.ranks == pytest.approx(statistics.stdev(means) / statistics.fmean(means))
    assert spread.layers == pytest.approx(0.03)
    assert _time_spread([[1.0]], [0.02]).ranks is None


def test_the_deviation_of_repeats_leaves_out_outliers() -> None:
    assert relative_deviation([1.0, 1.1, 0.9, 9.0]) == pytest.approx(statistics.pstdev([1.0, 1.1, 0.9]))
    assert relative_deviation([0.0, 0.0]) == 0.0
