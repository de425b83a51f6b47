"""Encoder kernels in the gaps of the LLM's collectives, wherever the cost table says that these leave the core free."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmtrain.costs import AnalyticCosts, CostTable, TokenLoad, preset
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import LayerEntry, LayerSample, MessageEntry, TimedPass, layer_fields, layer_key
from mmtrain.models.shapes.model_shape import LayerShape, build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import Fill, build_program
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, lengths, recipe
from tests.plans import plan_recipe

COLLECTIVE_S = 5e-3  # of a link so slow that gaps are longer than an encoder's pieces
SETTINGS = recipe(
    vision={**VISION, "layers": 6, "hidden": 384, "ffn": 1536},
    parallel={"placement": "colocated", "llm": {"tp": 2, "pp": 1}, "vision": {"tp": 1, "pp": 1}},
)


def cost_table(settings: Recipe, slowdown: float) -> CostTable:
    """Return a table of a CPU whose collectives take `COLLECTIVE_S`, of which compute beside them loses a share."""
    core = AnalyticCosts(preset("cpu-core"), "fp32")
    layers = {
        (layer_key(layer_fields(layer)), tp): LayerEntry(
            layer=layer_fields(layer), tp=tp, samples=tuple(sample(core, layer, tp, n) for n in (16, 128, 512))
        )
        for unit in build_model_shape(settings).units
        for layer in unit.layers
        for tp in (1, 2)
    }
    collectives = tuple(
        MessageEntry(
            kind=kind,
            size=2,
            nbytes=(1, 2**24),
            seconds=(COLLECTIVE_S, COLLECTIVE_S),
            overlap_slowdown=(slowdown, slowdown),
        )
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )
    return CostTable(
        hardware="cpu-core",
        device="one core of a test",
        precision="fp32",
        software={},
        date="2026-11-23",
        layers=tuple(layers.values()),
        messages=collectives,
    )


def sample(core: AnalyticCosts, layer: LayerShape, tp: int, num_tokens: int) -> LayerSample:
    load = TokenLoad.of(np.array([num_tokens]))
    is_block = layer.kind in ("vit_block", "decoder_block")
    waiting_s = 2 * COLLECTIVE_S if is_block and tp > 1 else 0.0
    trained = replace(layer, trainable=True)
    seconds: dict[TimedPass, float] = {
        "forward": core.seconds(LayerWork(trained, tp, load, "forward")) + waiting_s,
        "recompute": core.seconds(LayerWork(trained, tp, load, "forward")) + waiting_s,
        "backward": core.seconds(LayerWork(trained, tp, load, "backward")) + waiting_s,
    }
    return LayerSample(
        tokens=num_tokens,
        sum_sq=load.sum_sq,
        max_len=load.max_len,
        num_sequences=1,
        seconds=seconds,
        activation_bytes=1000 * num_tokens,
    )


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, Plan]:
    """Plans by the share of a collective's time that compute beside it loses."""
    folder = tmp_path_factory.mktemp("tables")
    return {slowdown: plan_with_table(folder / f"{slowdown}.json", slowdown) for slowdown in (0.1, 1.0)}


def plan_with_table(path: Path, slowdown: float) -> Plan:
    cost_table(SETTINGS, slowdown).save(path)
    settings = SETTINGS.model_copy(update={"cluster": SETTINGS.cluster.model_copy(update={"costs": path})})
    return plan_recipe(settings, lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f")


def test_plans_fill_collectives_that_leave_the_core_free(plans: Mapping[float, Plan]) -> None:
    free, taken = plans[0.1], plans[1.0]
    assert free.schedule.pieces
    assert free.predicted.step_time_s < 0.95 * taken.predicted.step_time_s
    efficiency = {slowdown: plan.predicted.scheduling_efficiency or 0.0 for slowdown, plan in plans.items()}
    assert efficiency[0.1] > 0.5 > efficiency[1.0]
    graph = stage_graph(free, build_model_shape(SETTINGS))
    program = build_program(graph, kind=free.schedule.kind, order=free.schedule.order)
    fills = [action for action in program.actions[0] if isinstance(action, Fill)]
    assert fills
    assert all(fill.host.stage.unit == LLM and fill.partials[0].stage.unit == "vision" for fill in fills)


def test_plans_leave_layers_whole_where_collectives_take_the_core(plans: Mapping[float, Plan]) -> None:
    assert not plans[1.0].schedule.pieces
