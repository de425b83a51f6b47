"""The seconds of a mesh whose memory makes it recompute layers, by which the allocation orders meshes."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.mesh_time_estimate import balanced_seconds
from tests.planning.factory import evaluator_for, recipe, with_memory
from tests.plans import mesh_assignments

MIB = 2**20


def seconds_of_all_meshes(evaluator: Evaluator, seconds: Callable[[str, MeshSize, int], float]) -> list[float]:
    """Return the seconds of each unit of every assignment with ranks of its own, on four ranks."""
    return [
        seconds(unit, mesh, assignment.num_microbatches[unit])
        for assignment in mesh_assignments(evaluator.problem.choices, 4)
        if assignment.placement == "disaggregated"
        for unit, mesh in assignment.meshes.items()
    ]


def test_a_mesh_takes_as_long_as_without_memory_where_memory_is_ample_and_longer_the_less_there_is() -> None:
    ample = evaluator_for(recipe(llm={"layers": 4}))
    before = seconds_of_all_meshes(ample, ample.mesh_time_estimate_within(1.0))
    assert before == seconds_of_all_meshes(ample, ample.mesh_times.filled_seconds)
    num_longer = []
    for memory_mib in (32, 24, 16, 8):
        tight = with_memory(ample, memory_mib * MIB)
        after = seconds_of_all_meshes(tight, tight.mesh_time_estimate_within(1.0))
        assert all(new >= old for new, old in zip(after, before, strict=True))
        num_longer.append(sum(math.inf > new > old for new, old in zip(after, before, strict=True)))
        assert after == seconds_of_all_meshes(
            ample, with_memory(ample, 64 * MIB).mesh_time_estimate_within(memory_mib / 64)
        )
        before = after
    assert max(num_longer) > 0
    assert before.count(math.inf) > 0


def test_where_all_layers_are_recomputed_anyway_the_estimate_knows_of_no_more_or_is_infinite() -> None:
    parallel = {unit: {"recompute": "all"} for unit in ("vision", "llm")}
    evaluator = with_memory(evaluator_for(recipe(llm={"layers": 4}, parallel=parallel)), 12 * MIB)
    estimates = seconds_of_all_meshes(evaluator, evaluator.mesh_time_estimate_within(1.0))
    bounds = seconds_of_all_meshes(evaluator, evaluator.mesh_times.filled_seconds)
    finite = [(new, old) for new, old in zip(estimates, bounds, strict=True) if new < math.inf]
    assert 0 < len(finite) < len(estimates)
    assert all(new >= old for new, old in finite)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_share_a_unit_as_well_as_by_bisection(seed: int) -> None:
    """Solve the same problem by two nested bisections: over the time, and in it over the share of each rank."""
    rng = np.random.default_rng(seed)
    work_s, recompute_s = rng.uniform(1, 3), rng.uniform(0.1, 1)
    state, kept = rng.uniform(5, 20), rng.uniform(5, 20)
    in_flight = np.arange(int(rng.integers(2, 9)), 0, -1)
    held, saved = state + in_flight * kept, in_flight * kept * rng.uniform(0.5, 0.95)
    least_room = 1 / np.sum(1 / (held - saved))
    room = least_room * rng.uniform(1.01, 3)

    def finishes(share: float, rank: int, step_s: float) -> bool:
        excess = max(0.0, share * held[rank] - room)
        is_room = excess <= share * saved[rank]
        return is_room and share * work_s + recompute_s * excess / saved[rank] <= step_s

    low_s, high_s = 0.0, work_s + recompute_s
    for _ in range(40):
        step_s = (low_s + high_s) / 2
        total = 0.0
        for rank in range(len(held)):
            low, high = 0.0, 1.0
            for _ in range(40):
                share = (low + high) / 2
                low, high = (share, high) if finishes(share, rank, step_s) else (low, share)
            total += low
        low_s, high_s = (low_s, step_s) if total >= 1 else (step_s, high_s)
    assert balanced_seconds(work_s, recompute_s, held, saved, room) == pytest.approx(high_s, rel=1e-4)
