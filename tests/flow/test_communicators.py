"""The planner counts the communicators that a rank really connects."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.graph_memory import count_communicators
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import StageGraph
from mmtrain.runtime.execution.process_groups import build_groups
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe

TIED: dict[str, Any] = {"model__llm__tie_embeddings": True}
MOE: dict[str, Any] = {"model__llm__moe": {"experts": 4, "top_k": 1, "ffn": 16}}
EACH = Mesh((), (0, 1, 2, 3), dp=4)

# name -> recipe changes, and what `plan` takes beside the recipe.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "disaggregated 1:2, pp2 with tied embeddings": (
        TIED,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((2,), (2, 3, 4, 5), dp=2)},
    ),
    "colocated, tp2 beside pp2 vpp2": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((1, 2, 3), (0, 1), vpp=2)},
    ),
    "two replica groups": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4, 5), tp=2, dp=2)}),
    "two ranks share sequences": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), cp=2)}),
    "weights over all ranks": ({}, {"shard": 4, "dispatch": "all", "vision": EACH, "llm": EACH}),
    "two copies of the weights": ({}, {"shard": 2, "vision": EACH, "llm": EACH}),
    "two ranks hold experts together": (MOE, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), dp=4, ep=2)}),
    "weights over all ranks, experts over two": (MOE, {"shard": 4, "vision": EACH, "llm": replace(EACH, ep=2)}),
    "two copies of the weights, an expert on each rank": (
        MOE,
        {"shard": 2, "vision": EACH, "llm": replace(EACH, ep=4)},
    ),
    "whole weights on each rank": ({}, {"dispatch": "all", "vision": EACH, "llm": EACH}),
}


def _graph(name: str) -> StageGraph:
    changes, planned = LAYOUTS[name]
    settings = recipe(**changes)
    return stage_graph(plan(settings, **planned), build_model_shape(settings))


def _count_connected(name: str) -> tuple[int, int]:
    """Return how many groups this rank connects beside that of all ranks, and how many it leaves for later."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    groups = build_groups(_graph(name), world)
    return len(groups.connected), len(groups.later)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_communicators_are_counted_as_they_are_connected(name: str) -> None:
    graph = _graph(name)
    connected = run_ranks(graph.world_size, _count_connected, name)
    channels, collectives = count_communicators(graph)
    of_first_group = sorted(collectives)
    assert {rank: channels[rank] + collectives[rank] - 1 for rank in of_first_group} == {
        rank: connected[rank][0] for rank in of_first_group
    }
    pipelined = {rank for mesh in graph.meshes if mesh.pp > 1 for rank in mesh.ranks}
    assert {rank for rank, (_, later) in enumerate(connected) if later} == pipelined
