"""A plan's memory is counted anew from its stages where a run starts, and equals what the search counted."""

import pytest
import torch

from mmtrain.costs.hardware import GIB
from mmtrain.costs.layer_arithmetic import feature_rows
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.artifact.plan_memory import DeviceMemory, plan_memory, prove_memory
from mmtrain.program.verify.deadlock import MIN_SEND_WINDOW
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.planning.factory import evaluator_for, lengths, recipe
from tests.plans import plan_recipe

PLACEMENTS = ("unified", "disaggregated", "colocated")


def planned(settings: Recipe, world_size: int = 4, hardware: str = "cpu-core") -> Plan:
    return plan_recipe(settings, lengths(), world_size=world_size, hardware=hardware, recipe_sha256="a" * 64)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("hardware", ["cpu-core", "h100-80g"])
def test_what_a_run_counts_is_what_the_search_counted(placement: str, hardware: str) -> None:
    settings = recipe(parallel={"placement": placement, "llm": {"recompute": "all"}})
    chosen = planned(settings, hardware=hardware)
    memory = plan_memory(settings, chosen, build_model_shape(settings))
    predicted = max(chosen.predicted.peak_memory_gib.values())
    assert max(rank.total for rank in memory.values()) / GIB == pytest.approx(predicted, abs=1e-4)


def test_messages_under_way_are_those_of_a_full_send_window_and_one_receive() -> None:
    one_rank = {"tp": 1, "pp": 1, "dp": 1}
    parallel = {"placement": "disaggregated", "vision": one_rank, "llm": {**one_rank, "pp": 2, "vpp": 1}}
    settings = recipe(parallel=parallel)
    shape = build_model_shape(settings)
    graph = stage_graph(planned(settings, 3), shape)
    memory = evaluator_for(settings).layer_costs.graph_memory(graph)
    held = {stage.id: memory.held_layers(graph, stage, 1) for stage in graph.stages}
    assert [str(stage_id) for stage_id in held] == ["vision.0", "llm.0", "llm.1"]
    llm_mesh, projector = graph.mesh("llm"), shape.unit("vision").layers[-1]
    assert llm_mesh.num_microbatches == graph.mesh("vision").num_microbatches > MIN_SEND_WINDOW
    states = 4 * memory.largest_load["llm"].tokens * shape.unit("llm").layers[1].hidden
    features = 4 * feature_rows(projector, memory.largest_load["vision"]) * projector.out
    encoder, first, last = held.values()
    assert encoder.under_way_bytes == MIN_SEND_WINDOW * features  # forward
    assert first.under_way_bytes == MIN_SEND_WINDOW * (states + features) + features  # forward, and gradients
    assert last.under_way_bytes == (MIN_SEND_WINDOW + 1) * states
    assert [stage.read_feature_bytes for stage in held.values()] == [0, features, 0]


def test_a_plan_that_fits_bounds_activations_and_a_changed_one_is_refused_with_what_binds() -> None:
    settings = recipe(parallel={"placement": "unified", "llm": {"recompute": "all"}}, seq_len=4096)
    chosen, shape = planned(settings, 1), build_model_shape(settings)
    device = DeviceMemory(max(chosen.predicted.peak_memory_gib.values()) * 1.01 * GIB, "the GPU of rank 0")
    limit = prove_memory(settings, chosen, shape, device)
    assert limit is not None
    assert 0 < limit.limit_bytes[0] < device.nbytes
    [stage] = chosen.units["llm"].stages
    keeping_all = stage.model_copy(update={"recompute": ()})
    unit = chosen.units["llm"].model_copy(update={"stages": (keeping_all,)})
    changed = chosen.model_copy(update={"units": {**chosen.units, "llm": unit}})
    with pytest.raises(PlanError, match=r"rank 0 needs .*most of it activations, and the GPU of rank 0 has"):
        prove_memory(settings, changed, shape, device)
    with pytest.raises(PlanError, match="does not fit this device"):
        build_rank_context(settings, changed, World(0, 1, torch.device("cpu")), device_memory=device)
