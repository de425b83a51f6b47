"""Stage graphs with context parallelism: ranks, replica groups, joint passes, and plans that say so."""

import pytest
from pydantic import ValidationError

from mmtrain.errors import ProgramError
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.program import build_program
from mmtrain.program.ir.actions import Forward
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.ir.graph import Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.program import Program
from mmtrain.program.verify.check import check_program


def _graph(tp: int = 2, cp: int = 2, dp: int = 2, pp: int = 2) -> StageGraph:
    """Return vision on one replica for every one of the LLM, both on the same ranks."""
    num_ranks = tp * cp * dp
    llm = UnitMesh("llm", tp, pp, dp, tuple(range(pp * num_ranks)), 3, cp=cp)
    vision = UnitMesh("vision", tp, 1, dp * cp, tuple(range(num_ranks)), 3)
    stages = [
        Stage(StageId(m.unit, k), (k, k + 1), tuple(m.tp_group(k, r) for r in range(m.num_replicas)), trainable=True)
        for m in (vision, llm)
        for k in range(m.pp)
    ]
    edges = [Edge(StageId("llm", k), StageId("llm", k + 1)) for k in range(pp - 1)]
    return StageGraph((vision, llm), tuple(stages), (Edge(StageId("vision", 0), StageId("llm", 0)), *edges))


def test_tp_is_fastest_then_cp_then_dp_then_pp() -> None:
    mesh = _graph().mesh("llm")
    assert [mesh.tp_group(0, replica) for replica in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.tp_group(1, 0) == (8, 9)
    assert [list(mesh.cp_replicas(replica)) for replica in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_replicas_that_share_sequences_are_in_one_replica_group() -> None:
    graph = _graph()
    assert graph.num_groups == 2
    sources = graph.sources(graph.edges[0], Microbatch("llm", 3, 1))
    assert sources == (Microbatch("vision", 2, 1), Microbatch("vision", 3, 1))
    first = Forward(StageId("llm", 1), Microbatch("llm", 3, 0))
    assert participants(graph, 15, first) == (12, 13, 14, 15)


def test_the_checker_accepts_built_programs_and_finds_other_orders() -> None:
    program = build_program(_graph())
    check_program(program)
    actions = dict(program.actions)
    passes = [i for i, action in enumerate(actions[10]) if isinstance(action, Forward)]
    swapped = list(actions[10])
    swapped[passes[0]], swapped[passes[1]] = swapped[passes[1]], swapped[passes[0]]
    with pytest.raises(ProgramError, match="share the group"):
        check_program(Program(program.graph, {**actions, 10: tuple(swapped)}))


def test_a_plan_without_context_parallelism_does_not_mention_it() -> None:
    stages = (StagePlan(stage=0, layers=(0, 4)),)
    unit = UnitPlan(tp=1, pp=1, dp=2, ranks=(0, 1), stages=stages)
    assert not {name for name in unit.model_dump() if name.startswith("cp")}
    shared = UnitPlan(tp=1, pp=1, dp=1, cp=2, cp_method="ring", cp_split="auto", ranks=(0, 1), stages=stages)
    assert UnitPlan.model_validate_json(shared.model_dump_json()) == shared
    assert "cp2" in shared.mesh_text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 1, "dp": 2, "cp_method": "ring"}, "cp is 1 with"),
        ({"cp_split": None}, "has a method and a split"),
        ({"ranks": (1, 0)}, "ascend"),
    ],
)
def test_half_described_context_parallelism_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"tp": 1, "pp": 1, "dp": 1, "cp": 2, "cp_method": "ulysses", "cp_split": "even", "ranks": (0, 1)}
    with pytest.raises(ValidationError, match=message):
        UnitPlan.model_validate({**fields, "stages": (StagePlan(stage=0, layers=(0, 4)),), **changes})


def test_a_unit_with_as_many_replicas_mirrors_group_zero() -> None:
    program = build_program(_graph(dp=3))
    assert program.for_rank(4)[0] == program.translate(program.for_rank(0)[0], 1)
