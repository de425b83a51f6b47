"""A rehearsed step takes as long as the simulator predicts, on every placement; faults are reported by name."""

import math
import re
from dataclasses import replace

import pytest

from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe import Recipe
from mmtrain.runtime.rehearsal import rehearse as rehearsal
from mmtrain.runtime.rehearsal.checkpoint_traffic import CheckpointTraffic, checkpoint_bytes
from mmtrain.runtime.rehearsal.consequences import describe_checkpoint, describe_consequences
from mmtrain.runtime.rehearsal.rehearse import RehearsalFault, RehearsalRequest, RehearsalResult
from tests.distributed import fork_ranks
from tests.faults import WATCHDOG_S
from tests.flow import cases
from tests.flow.cases import Mesh
from tests.flow.cells import CELLS, PLACEMENTS, Cell

# A cell of each placement with tensor parallelism.
QUICK = [next(c for c in CELLS if c.placement == p and any(s.tp > 1 for _, s in c.sizes)) for p in PLACEMENTS]


def _request(settings: Recipe, plan: Plan, **options: object) -> RehearsalRequest:
    dp = {name: unit.dp for name, unit in plan.units.items()}
    batch = cases.batch(0, cases.samples_of(0), dp, plan.schedule.num_microbatches, plan.dispatch)
    return RehearsalRequest(settings, plan, plan_timing(settings, plan, batch), **{"num_steps": 1} | options)  # type: ignore[arg-type]


def _rehearse(
    _rank: int, _size: int, _scratch: object, request: RehearsalRequest, min_hang_s: float
) -> RehearsalResult:
    rehearsal.MIN_HANG_S = min_hang_s
    return rehearsal.rehearse(request)


def rehearsed(request: RehearsalRequest, min_hang_s: float = 60.0) -> RehearsalResult:
    """Rehearse in a process of its own, which starts the ranks."""
    [result] = fork_ranks(1, _rehearse, request, min_hang_s)
    assert isinstance(result, RehearsalResult)
    return result


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize("kind", ["1f1b", "encoder_first"])
def test_replicas_that_dispatch_are_rehearsed_together(kind: ScheduleKind) -> None:
    settings = cases.recipe()
    mesh = Mesh((), (0, 1, 2, 3), dp=4)
    vision = mesh if kind == "1f1b" else replace(mesh, n=1)
    chosen = cases.plan(settings, kind, shard=2, dispatch="all", vision=vision, llm=mesh)
    result = rehearsed(_request(settings, chosen))
    assert result.ranks == (0, 1, 2, 3)
    assert result.predicted_bubbles["dispatch"] > 0
    assert sum(result.scheduled_s) / len(result.scheduled_s) == pytest.approx(result.predicted_s, rel=0.1)


def cell_groups(cell: Cell) -> int:
    """Return the number of replica groups."""
    return math.gcd(*(size.dp for _, size in cell.sizes))


@pytest.mark.parametrize(
    "cell",
    [*(pytest.param(c, id=str(c)) for c in QUICK)]
    + [pytest.param(c, id=str(c), marks=pytest.mark.long) for c in CELLS if c not in QUICK],
)
def test_a_rehearsed_step_is_scheduled_as_simulated(cell: Cell) -> None:
    """Of these tiny steps this machine's share is large, so only the schedule without it is compared.

    They are little but messages, and a sender of the rehearsal does not know when its peer posts the receive, for which
    the simulator keeps the communication stream waiting. Hence the tolerance; plans of real models differ by under 1%.
    """
    result = rehearsed(_request(cell.recipe(), cell.plan(), stretch=1.0))
    assert len(result.ranks) * cell_groups(cell) == cell.num_ranks
    assert result.scheduled_s == pytest.approx([result.predicted_s], rel=0.08)
    assert result.steps_s[0] >= result.scheduled_s[0]


def _apart() -> tuple[Recipe, Plan]:
    """Return a plan of two replica groups: an encoder on ranks 0 and 1, the LLM on ranks 2 and 3."""
    settings = cases.recipe()
    meshes = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3), dp=2)}
    return settings, cases.plan(settings, **meshes)


def test_a_slow_rank_slows_the_step_as_predicted() -> None:
    request = _request(*_apart(), stretch=1.0)
    plain = rehearsed(request)
    slow = rehearsed(replace(request, fault=RehearsalFault("slow", 2, 3.0)))
    assert plain.ranks == slow.ranks == (0, 2)
    assert slow.scheduled_s == pytest.approx([slow.predicted_s], rel=0.05)
    assert slow.predicted_s > 1.5 * plain.predicted_s
    assert slow.unbroken_s == pytest.approx(plain.predicted_s)
    request = replace(request, fault=RehearsalFault("slow", 2, 3.0))
    assert f"({slow.predicted_s / plain.predicted_s - 1:+.0%})" in describe_consequences(request, slow)


def test_a_rank_that_dies_is_named() -> None:
    request = _request(*_apart(), num_steps=2, stretch=1.0, fault=RehearsalFault("dead", 2))
    result = rehearsed(request)
    assert result.failure is not None
    assert result.failure.startswith("rank 1 was killed by SIGKILL")
    assert result.steps_s == ()
    assert "from the newest checkpoint: up to 100 steps" in describe_consequences(request, result)


@pytest.mark.slow
def test_a_node_that_dies_takes_its_ranks_with_it() -> None:
    settings, plan = _apart()
    request = _request(settings, plan, num_steps=2, stretch=1.0, fault=RehearsalFault("dead_node", 0))
    request = replace(request, timing=replace(request.timing, ranks_per_node=2))
    result = rehearsed(request)
    assert result.failure is not None
    assert result.failure.startswith("rank 0 was killed by SIGKILL"), "rank 0 of the group, of ranks 0 and 2"
    assert "without a node in the place of node 0" in describe_consequences(request, result)


@pytest.mark.slow
def test_a_checkpoint_is_saved_beside_steps_in_the_time_of_its_whole_bytes() -> None:
    settings, plan = _apart()
    request = _request(settings, plan, num_steps=2, stretch=1.0, disk_bytes_per_s=1e6)
    traffic = rehearsed(request).checkpoint
    assert traffic is not None
    rank_bytes = [checkpoint_bytes(request.timing, rank) for rank in range(4)]
    assert traffic.total_bytes == sum(rank_bytes)
    assert traffic.save_s >= max(rank_bytes) / 1e6
    assert traffic.step_beside_save_s is not None, "the second step ran while the first was being saved"
    assert "A kill costs at most" in describe_checkpoint(traffic, 1e6)


@pytest.mark.parametrize(
    ("every", "is_async", "wait_s", "worst_loss_s"),
    [(100, True, 1.0, 231.0), (5, True, 20.0, 60.0), (100, False, 30.0, 260.0), (0, True, 1.0, None)],
)
def test_a_save_that_outlasts_the_steps_between_two_delays_training(
    every: int, is_async: bool, wait_s: float, worst_loss_s: float | None
) -> None:
    traffic = CheckpointTraffic(
        total_bytes=1, largest_bytes=1, every=every, is_async=is_async, copy_s=1.0, save_s=30.0, step_s=2.0,
        step_beside_save_s=None,
    )  # fmt: skip
    assert traffic.wait_s == wait_s
    assert traffic.worst_loss_s == worst_loss_s


@pytest.mark.slow  # 6 s
def test_a_lost_message_is_named_with_both_its_ends() -> None:
    request = _request(*_apart(), num_steps=2, stretch=1.0, fault=RehearsalFault("lost", 0))
    result = rehearsed(request, min_hang_s=WATCHDOG_S)
    assert result.failure is not None
    # The other rank waits as long, for the gradient of the features that never came; either may report first.
    [of_receiver] = [line for line in result.failure.splitlines() if "rank 1, step 2, in `F llm.0 llm:0." in line]
    assert "for `SA vision.0>llm.0 vision:0." in of_receiver
    assert of_receiver.endswith("on rank 0, which never ran")
    assert "stands still for 300 s (train.watchdog_s)" in describe_consequences(request, result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_processes": 1}, "a replica group of this plan has 2 ranks, and --ranks-here allows 1 processes"),
        (
            {"fault": RehearsalFault("dead", 1)},
            "--fault: rank 1 found; allowed: a rank of the first replica group, 0, 2",
        ),
        (
            {"fault": RehearsalFault("dead_node", 7)},
            "--fault: node 7 found; allowed: a node of the first replica group, 0",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        rehearsal.rehearse(_request(*_apart(), **options))
