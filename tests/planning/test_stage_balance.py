"""The balance over pipeline ranks that a plan states follows from its layers, its costs and its data."""

import math

import numpy as np
import pytest

from mmtrain.costs.hardware import GIB
from mmtrain.planning.advise.finish import stage_balance
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import StageBalance
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import partitioned_layout
from mmtrain.planning.planner import plan
from mmtrain.planning.space.candidate import Candidate, MeshAssignment
from tests.planning.factory import evaluator_for, problem_for, recipe, simulated

FP32_BYTES = 4
HIDDEN = 128  # of the factory's LLM


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return evaluator_for(recipe())


def candidate(evaluator: Evaluator, placement: str, pp: int, partition: tuple[tuple[int, ...], ...]) -> Candidate:
    mesh = MeshSize(1, pp, 1)
    num_microbatches = {"vision": 8, "llm": 8}
    assignment = MeshAssignment(placement, {"vision": mesh, "llm": mesh}, num_microbatches)  # type: ignore[arg-type]
    return simulated(partitioned_layout(assignment, evaluator.layer_costs, partition), evaluator)


def test_variances_are_those_of_what_each_pipeline_rank_holds(evaluator: Evaluator) -> None:
    """Five vision layers and two of the LLM on one rank, four on the other; all parameters train."""
    uneven = candidate(evaluator, "unified", 2, ((0, 7, 11),))
    balance = stage_balance(uneven, evaluator)
    split = uneven.assignment.batch_split
    costs = {unit: evaluator.layer_costs.unit_costs(unit, 1, split) for unit in ("vision", "llm")}
    forward = {unit: evaluator.layer_costs.unit_times(unit, 1, split).mean[:, 0] for unit in ("vision", "llm")}
    for expected, actual, scale in (
        ({unit: costs[unit].parameters for unit in costs}, balance.parameter_variance, 1e-9),
        (forward, balance.forward_variance, 1e3),
    ):
        layers = np.concatenate([expected["vision"], expected["llm"]])
        sums = np.array([layers[:7].sum(), layers[7:].sum()]) * scale
        assert actual == pytest.approx(sums.var(), rel=1e-4)
    assert balance.layer_variance == np.var([7, 4])


def test_what_is_sent_is_the_data_that_crosses_ranks(evaluator: Evaluator) -> None:
    batches = evaluator.problem.batches
    tokens = [sum(batches.lengths.tokens[group].sum() for group in groups) for groups in batches.groups]
    one_cut = stage_balance(candidate(evaluator, "unified", 2, ((0, 7, 11),)), evaluator)
    assert one_cut.sent_gib == pytest.approx(np.mean(tokens) * HIDDEN * FP32_BYTES / GIB, abs=1e-6)
    items = batches.lengths.items["vision"]
    rows = [
        sum(items.features[items.first[i] : items.first[i + 1]].sum() for group in groups for i in group)
        for groups in batches.groups
    ]
    apart = stage_balance(candidate(evaluator, "disaggregated", 1, ((0, 5), (0, 6))), evaluator)
    assert apart.sent_gib == pytest.approx(np.mean(rows) * HIDDEN * FP32_BYTES / GIB, abs=1e-6)


def test_memory_that_is_left_and_gpu_days(evaluator: Evaluator) -> None:
    uneven = candidate(evaluator, "unified", 2, ((0, 7, 11),))
    balance = stage_balance(uneven, evaluator)
    left = [(evaluator.memory_bytes - held.total) / GIB for held in uneven.memory.values()]
    assert balance.memory_left_gib == pytest.approx(dict(zip(["vision.0 llm.0", "llm.1"], left, strict=True)), abs=1e-3)
    batches = evaluator.problem.batches
    samples_per_step = np.mean([sum(map(len, groups)) for groups in batches.groups])
    assert samples_per_step > 8  # a group holds several, and a step has eight groups
    days_of_samples = uneven.step_time_s * 2 / samples_per_step * 1e6 / 86_400
    assert balance.gpu_days_per_million_samples == pytest.approx(days_of_samples, abs=1e-3)


def test_every_simulated_line_of_a_ranking_has_its_balance() -> None:
    chosen = plan(problem_for(recipe(), world_size=2))
    assert isinstance(chosen.predicted.balance, StageBalance)
    assert math.isfinite(chosen.predicted.balance.forward_variance)
    assert any(other.balance for other in chosen.alternatives)
    assert all((other.balance is None) == (other.step_time_s is None) for other in chosen.alternatives)
