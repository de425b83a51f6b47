"""A rehearsed step takes as long as the simulator predicts, on every placement."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.api.simulated_steps import index_and_plan, step_batches
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe import load_recipe
from tests.distributed import fork_ranks
from tests.flow import cases
from tests.flow.cases import Mesh
from tests.flow.cells import CELLS, PLACEMENTS, Cell
from tests.rehearsal.rehearse import RehearsalRequest, RehearsalResult, rehearse

WHATIF = Path(__file__).parents[2] / "recipes" / "whatif"
# A cell of each placement with tensor parallelism.
QUICK = [next(c for c in CELLS if c.placement == p and any(s.tp > 1 for _, s in c.sizes)) for p in PLACEMENTS]


def _request(settings: cases.Recipe, plan: cases.Plan) -> RehearsalRequest:
    dp = {name: unit.dp for name, unit in plan.units.items()}
    batch = cases.batch(0, cases.samples_of(0), dp, plan.schedule.num_microbatches, plan.dispatch)
    return RehearsalRequest(plan, plan_timing(settings, plan, batch), num_steps=1, stretch=1.0)


def _rehearse(_rank: int, _size: int, _scratch: object, request: RehearsalRequest) -> RehearsalResult:
    return rehearse(request)


def rehearsed(request: RehearsalRequest) -> RehearsalResult:
    """Rehearse in a process of its own, which starts the ranks."""
    [result] = fork_ranks(1, _rehearse, request)
    assert isinstance(result, RehearsalResult)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["unified", "colocated"])  # of the others, a replica group has 32 ranks or more
def test_a_plan_of_a_large_model_takes_as_long_as_simulated(placement: str) -> None:
    recipe = load_recipe(WHATIF / "mmscale_7b.yaml", [f"parallel.placement={placement}"]).recipe
    index, plan = index_and_plan(recipe, None)
    [batch] = step_batches(recipe, index, plan)
    result = rehearsed(RehearsalRequest(plan, plan_timing(recipe, plan, batch), num_steps=1))
    assert result.scheduled_s == pytest.approx([result.predicted_s], rel=0.02)


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize(
    ("kind", "tp", "cp"), [("1f1b", 1, 1), ("encoder_first", 1, 1), ("1f1b", 2, 1), ("1f1b", 1, 2)]
)
def test_replicas_that_dispatch_are_rehearsed_together(kind: ScheduleKind, tp: int, cp: int) -> None:
    settings = cases.recipe()
    mesh = Mesh((), (0, 1, 2, 3), dp=4 // tp, tp=tp)
    vision = mesh if kind == "1f1b" else replace(mesh, n=1)
    llm = replace(mesh, dp=mesh.dp // cp, cp=cp)
    chosen = cases.plan(settings, kind, shard=2, dispatch="all", vision=vision, llm=llm)
    result = rehearsed(replace(_request(settings, chosen), stretch=None))
    assert result.ranks == (0, 1, 2, 3)
    assert result.predicted.bubble_shares()["dispatch"] > 0
    assert result.scheduled_s == pytest.approx([result.predicted_s], rel=0.1)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=str(c), marks=pytest.mark.slow if c in QUICK else pytest.mark.long) for c in CELLS],
)
def test_a_rehearsed_step_is_scheduled_as_simulated(cell: Cell) -> None:
    """Of these tiny steps this machine's share is large, so only the schedule without it is compared.

    They are little but messages, and a sender of the rehearsal does not know when its peer posts the receive, for which
    the simulator keeps the communication stream waiting. Hence the tolerance; plans of real models differ by under 1%.
    """
    result = rehearsed(_request(cell.recipe(), cell.plan()))
    num_groups = math.gcd(*(size.dp for _, size in cell.sizes))
    assert len(result.ranks) * num_groups == cell.num_ranks
    assert result.scheduled_s == pytest.approx([result.predicted_s], rel=0.08)
    assert result.steps_s[0] >= result.scheduled_s[0]
