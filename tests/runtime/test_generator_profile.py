"""Layers of an image generator are measured like others, and plans use what was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.balance import ItemLengths
from mmtrain.costs.cost_table import CostTable, LayerEntry, layer_fields, layer_key
from mmtrain.data import build_index
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.space.constraints import sizes_to_measure
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.profiling.layer_profiler import (
    LayerProfiler,
    backward_by_layer,
    build_layer_profiler,
    forward_by_layer,
)
from mmtrain.runtime.profiling.probes import Probe, make_probes
from mmtrain.runtime.profiling.profile import ProfileRequest, profile
from mmtrain.runtime.world import World
from tests.distributed import fork_ranks, run_ranks
from tests.planning.factory import UNET, recipe, with_generator
from tests.plans import plan_recipe

DIT: dict[str, Any] = {
    "kind": "dit", "widths": (16,), "heads": (2,), "layers": 2, "patch": 2, "context_width": 24, "context_tokens": 8,
}  # fmt: skip
KINDS = {"dit": DIT, "unet": UNET}
TWO_SIZES = ((8, 8), (4, 8), (8, 8))  # of images that a microbatch may hold


def drawing(tmp_path: Path, kind: str, **changes: Any) -> Recipe:
    vision = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64, "patch": 14, "max_side": 32}
    settings = recipe(vision=vision, llm={"layers": 1, "hidden": 64, "ffn": 96}, seq_len=256, **changes)
    return with_generator(settings, tmp_path / "lengths.csv", {**KINDS[kind], "context_dropout": 0.5})


def profiler_of(settings: Recipe) -> LayerProfiler:
    alone = torch.distributed.new_group([0])
    groups = ParallelGroups(tp=alone, dp=alone, pp=alone)
    model = build_model_shape(settings)
    world = World(0, 1, torch.device("cpu"))
    return build_layer_profiler(settings, model, model.unit(GENERATOR), groups, world, torch.float32)


def measured_table(settings: Recipe) -> str:
    """Measure the generator's layers on one rank; return a table of them."""
    profiler = profiler_of(settings)
    fitted, held_out = make_probes(settings, build_model_shape(settings).unit(GENERATOR), build_index(settings).lengths)
    assert held_out
    ends = sorted(fitted, key=lambda probe: probe.load.tokens)[:: len(fitted) - 1]
    samples = [profiler.sample(probe, settings, repeats=(1, 1)) for probe in ends]
    layers = {layer_key(layer_fields(layer)): layer for layer in build_model_shape(settings).unit(GENERATOR).layers}
    entries = tuple(
        LayerEntry(layer=layer_fields(layer), tp=1, samples=tuple(by_layer[key] for by_layer in samples))
        for key, layer in layers.items()
    )
    table = CostTable(
        hardware="cpu-core", device="cpu: one core", precision="fp32", software={}, date="2026-11-26", layers=entries
    )
    return table.model_dump_json()


@pytest.mark.parametrize("kind", KINDS)
def test_plans_ask_for_no_layer_of_a_generator_that_was_not_measured(kind: str, tmp_path: Path) -> None:
    whole = {"tp": 1, "pp": 1, "dp": 1}
    parallel = {"placement": "disaggregated", "vision": whole, "llm": whole, "generator": whole}
    settings = drawing(tmp_path, kind, parallel=parallel)
    [text] = run_ranks(1, measured_table, settings)
    path = tmp_path / "costs.json"
    path.write_text(text)
    plain = settings.model_dump()
    plain["cluster"]["costs"] = path
    chosen = plan_recipe(
        Recipe.model_validate(plain),
        build_index(settings).lengths,
        world_size=3,
        hardware="cpu-core",
        recipe_sha256="f" * 64,
    )
    modelled = chosen.predicted.cost_source.partition("modelled")[2].partition("extrapolated")[0]
    assert "decoder_block" in modelled  # which was not measured here
    assert not [layer.kind for layer in build_model_shape(settings).unit(GENERATOR).layers if layer.kind in modelled]


def gradients(settings: Recipe, by_layer: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the generator's weights and of the LLM's outputs that it reads."""
    stage = profiler_of(settings).stage
    torch.manual_seed(0)
    inputs = Probe(GENERATOR, TWO_SIZES).inputs(settings, torch.device("cpu"), torch.float32)
    assert settings.model.generator is not None
    num_rows = len(TWO_SIZES) * settings.model.generator.context_tokens
    outputs = torch.randn(num_rows, settings.model.llm.hidden, requires_grad=True)
    for param in stage.parameters():
        param.grad = None
    if by_layer:
        passes, spans = forward_by_layer(stage, inputs, {LLM: outputs}, True, lambda: None)
        assert len(spans) == len(backward_by_layer(passes, lambda: None)) == len(stage.indices)
    else:
        stage(None, inputs, {LLM: outputs}).backward()
    assert outputs.grad is not None
    weights = {name: _gradient(param) for name, param in stage.named_parameters()}
    return weights, outputs.grad


def _gradient(param: torch.nn.Parameter) -> Tensor:
    gradient = param.main_grad if hasattr(param, "main_grad") and param.grad is None else param.grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_timed_apart_compute_the_gradients_of_all_together(kind: str, tmp_path: Path) -> None:
    settings = drawing(tmp_path, kind)
    [(apart, of_outputs)], [(together, expected)] = (run_ranks(1, gradients, settings, flag) for flag in (True, False))
    torch.testing.assert_close(of_outputs, expected)
    assert apart.keys() == together.keys()
    for name, gradient in apart.items():
        assert together[name].abs().sum() > 0, name
        torch.testing.assert_close(gradient, together[name])


def test_probes_hold_the_images_of_the_data_and_those_of_the_densest_group(tmp_path: Path) -> None:
    settings = drawing(tmp_path, "unet")
    unit = build_model_shape(settings).unit(GENERATOR)
    lengths = build_index(settings).lengths
    fitted, _ = make_probes(settings, unit, lengths)
    densest = 2 * 64 * (256 // (30 + 2 * 8))  # of samples with 30 tokens of text that draw two images
    assert max(probe.load.tokens for probe in fitted) == densest
    assert {size for probe in fitted for size in probe.sizes} == {(8, 8)}  # stated as 64 positions
    sides = np.array([(4, 8), (8, 8)] * 10)
    counts = np.arange(len(lengths) + 1).clip(max=len(sides))
    items = ItemLengths(counts, sides[:, 0], sides[:, 1], sides.prod(axis=1), np.full(len(sides), 8))
    several = replace(lengths, items=lengths.items | {GENERATOR: items})
    assert {size for probe in make_probes(settings, unit, several)[0] for size in probe.sizes} == {(4, 8), (8, 8)}
    assert make_probes(settings, unit)[0][-1].sizes[0] == (64, 64)  # without data: the default sample_size


def measure(_rank: int, _size: int, folder: Path, settings: Recipe) -> str:
    sizes = sizes_to_measure(settings, 2)
    assert sizes == {"vision": (1,), "llm": (1,), "generator": (1, 2)}
    request = ProfileRequest(settings, "cpu-core", 2, sizes, build_index(settings).lengths, repeats=(1, 1))
    measured = profile(request)
    assert {"generator tp1", "generator tp2"} <= set(measured.errors)
    return measured.table.model_dump_json()


@pytest.mark.slow
def test_a_profile_holds_every_layer_that_planning_asks_for(tmp_path: Path) -> None:
    """Show it for a transformer under tensor parallelism, too."""
    parallel = {"placement": "disaggregated", "vision": {"tp": 1}, "llm": {"tp": 1}}
    settings = drawing(tmp_path, "dit", parallel=parallel)
    [text] = fork_ranks(1, measure, settings)
    path = tmp_path / "costs.json"
    path.write_text(text)
    plain = settings.model_dump()
    plain["cluster"]["costs"] = path
    measured = Recipe.model_validate(plain)
    for tp in (1, 2):
        fixed = measured.parallel.generator.model_copy(update={"tp": tp})
        parallel_settings = measured.parallel.model_copy(update={"generator": fixed})
        chosen = plan_recipe(
            measured.model_copy(update={"parallel": parallel_settings}),
            build_index(settings).lengths,
            world_size=4,
            hardware="cpu-core",
            recipe_sha256="f" * 64,
        )
        assert chosen.units[GENERATOR].tp == tp
        assert chosen.predicted.cost_source.startswith("measured: ")
        assert "modelled" not in chosen.predicted.cost_source
