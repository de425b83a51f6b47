"""Stage graphs of all layouts: every layer once in every replica, TP groups of the right size, one chain of stages."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.layout import (
    Layout,
    MeshSize,
    disaggregated_units,
    first_ranks,
    split_tp_group,
    unified_units,
)
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.planning.layer_costs.layer_partition import layer_chains, layout_graph, partitioned_layout
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.program import build_program, peak_in_flight_by_stage
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.factory import layer_costs_for, recipe
from tests.plans import mesh_assignments

LAYER_COSTS, CHOICES = layer_costs_for(recipe())
ASSIGNMENTS = [s for world_size in (1, 2, 3, 4, 5, 6, 8) for s in mesh_assignments(CHOICES, world_size)]


def lay_out(index: int) -> tuple[Layout, StageGraph]:
    cuts = [chain.anchor for chain in layer_chains(ASSIGNMENTS[index], LAYER_COSTS, CHOICES)]
    layout = partitioned_layout(ASSIGNMENTS[index], LAYER_COSTS, tuple(c for c in cuts if c is not None))
    return layout, layout_graph(layout, LAYER_COSTS)


@given(st.integers(0, len(ASSIGNMENTS) - 1))
def test_every_layout_keeps_the_invariants_of_stage_graphs(index: int) -> None:
    layout, graph = lay_out(index)
    for unit in LAYER_COSTS.shape.units:
        mesh = graph.mesh(unit.name)
        stages = [s for s in graph.stages if s.id.unit == unit.name]
        assert [s.id.index for s in stages] == list(range(len(stages)))
        assert -(-len(stages) // mesh.pp) == mesh.vpp
        assert [i for s in stages for i in range(*s.layers)] == list(range(len(unit.layers)))
        assert len(mesh.ranks) == mesh.tp * mesh.pp * mesh.dp
        ranks = Counter(r for s in stages for tp_group in s.tp_groups for r in tp_group)
        assert set(ranks.values()) <= {mesh.vpp, max(mesh.vpp - 1, 1)}, "a rank holds one stage of a unit and chunk"
        assert sorted(ranks) == sorted(mesh.ranks)
        assert all(
            len(s.tp_groups) == mesh.dp and {len(tp_group) for tp_group in s.tp_groups} == {mesh.tp} for s in stages
        )
        assert [s.trainable for s in stages] == [
            any(x.trainable for x in unit.layers[slice(*s.layers)]) for s in stages
        ]
    assert {r for m in graph.meshes for r in m.ranks} == set(range(graph.world_size))
    assert sum(len(m.ranks) for m in graph.meshes) >= graph.world_size
    crossing = [e for e in graph.edges if e.crosses_units]
    last = max(s.id for s in graph.stages if s.id.unit == "vision")
    assert [(e.src, e.dst) for e in crossing] == [(last, StageId("llm", 0))]
    assert len(graph.edges) == len(graph.stages) - 1
    llm = graph.mesh("llm")
    assert llm.num_microbatches * llm.dp == 8
    assert all(llm.num_microbatches % m.num_microbatches == 0 for m in graph.meshes)
    assert layout.placement == "unified" or len(layout.units) == 2


@given(st.integers(0, len(ASSIGNMENTS) - 1))
def test_every_layout_has_a_program_that_holds_the_expected_microbatches(index: int) -> None:
    _, graph = lay_out(index)
    program = build_program(graph)
    expected = in_flight_microbatches(graph)
    for stage in graph.stages:
        peak = peak_in_flight_by_stage(graph, program.actions[stage.tp_groups[0][0]])
        assert peak[stage.id] == expected[stage.id]


def test_one_rank_may_hold_the_end_of_a_unit_and_the_start_of_the_next() -> None:
    units = unified_units(build_model_shape(recipe()), MeshSize(2, 3, 2), (0, 3, 7, 11), {"llm": range(6)})
    vision, llm = units["vision"], units["llm"]
    assert [s.layers for s in vision.stages] == [(0, 3), (3, 5)]
    assert [s.layers for s in llm.stages] == [(0, 2), (2, 6)]
    assert vision.ranks == tuple(range(8))
    assert llm.ranks == tuple(range(4, 12))
    assert vision.stages[0].recompute == ()
    assert llm.stages[1].recompute == (2, 3, 4, 5)


def test_chunks_go_round_the_ranks_and_a_unit_starts_where_the_other_ends() -> None:
    cuts = (0, 3, 5, 6, 7, 9, 11)  # six chunks on three ranks: the vision unit has 5 layers, the LLM 6
    units = unified_units(build_model_shape(recipe()), MeshSize(1, 3, 2, 2), cuts)
    vision, llm = units["vision"], units["llm"]
    assert (vision.vpp, vision.pp, vision.ranks) == (1, 2, (0, 1, 2, 3))
    assert (llm.vpp, llm.pp, llm.ranks) == (2, 3, (4, 5, 0, 1, 2, 3))
    assert [(s.stage, s.chunk, s.layers) for s in llm.stages] == [
        (0, 0, (0, 1)),
        (1, 0, (1, 2)),
        (2, 0, (2, 4)),
        (3, 1, (4, 6)),
    ]
    graph = build_stage_graph(units, {"vision": 4, "llm": 4}, build_model_shape(recipe()))
    assert [s.tp_groups[0] for s in graph.stages] == [(0,), (2,), (4,), (0,), (2,), (4,)]
    assert [str(e) for e in graph.edges] == [
        "vision.0>vision.1",
        "llm.0>llm.1",
        "llm.1>llm.2",
        "llm.2>llm.3",
        "vision.1>llm.0",
    ]
    build_program(graph)


@pytest.mark.parametrize("stages", [((0, 0), (1, 0)), ((0, 0), (1, 1), (2, 1)), ((0, 0), (2, 0), (1, 1)), ()])
def test_a_plan_whose_stages_do_not_go_round_its_ranks_is_rejected(stages: tuple[tuple[int, int], ...]) -> None:
    parts = tuple(StagePlan(stage=s, chunk=c, layers=(s, s + 1)) for s, c in stages)
    with pytest.raises(ValueError, match=r"with pp 2 and vpp 2 .* 3 to 4 of them, and stage s is chunk s // pp"):
        UnitPlan(tp=1, pp=2, dp=1, vpp=2, ranks=(0, 1), stages=parts)


def test_a_tp_group_over_two_nodes_is_found() -> None:
    units = unified_units(build_model_shape(recipe()), MeshSize(4, 1, 2), (0, 11))
    assert split_tp_group(units, ranks_per_node=6) == (4, 5, 6, 7)
    assert split_tp_group(units, ranks_per_node=4) is None


@pytest.mark.parametrize(
    ("meshes", "expected"),
    [
        ({"vision": MeshSize(1, 1, 8), "llm": MeshSize(4, 2, 1)}, {"vision": 0, "llm": 8}),
        ({"vision": MeshSize(1, 1, 1), "llm": MeshSize(4, 2, 2)}, {"vision": 16, "llm": 0}),
        ({"vision": MeshSize(2, 1, 1), "llm": MeshSize(4, 1, 1), "generator": MeshSize(1, 1, 1)},
         {"vision": 4, "llm": 0, "generator": 6}),
        ({"vision": MeshSize(2, 1, 1), "audio": MeshSize(1, 1, 1), "llm": MeshSize(2, 1, 1)},
         {"vision": 0, "audio": 4, "llm": 2}),
    ],
)  # fmt: skip
def test_units_of_their_own_ranks_keep_tensor_parallel_groups_on_nodes(
    meshes: dict[str, MeshSize], expected: dict[str, int]
) -> None:
    assert first_ranks(meshes) == expected
    assert list(first_ranks(meshes)) == list(meshes)
    bounds = dict.fromkeys(meshes, (0, 1, 2)) | {name: (0, 1) for name, size in meshes.items() if size.pp == 1}
    units = disaggregated_units(meshes, bounds)
    assert sorted(rank for unit in units.values() for rank in unit.ranks) == list(
        range(sum(s.ranks for s in meshes.values()))
    )
    assert split_tp_group(units, ranks_per_node=8) is None
    assignment = MeshAssignment("disaggregated", meshes, dict.fromkeys(meshes, 1))
    assert assignment.tp_group_across_nodes(8) is None


@pytest.mark.parametrize(("world_size", "expected"), [(1, {"unified"}), (2, {"unified", "disaggregated"})])
def test_units_on_separate_ranks_need_a_rank_each(world_size: int, expected: set[str]) -> None:
    assert {s.placement for s in mesh_assignments(CHOICES, world_size)} == expected
