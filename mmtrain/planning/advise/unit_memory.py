"""Estimate what activations of each unit take, from runs of one layer partition under two recompute settings.

These are steps 1 to 3 of OmniBal's adaptive recomputation (arXiv 2407.20761, appendix): what a pipeline rank holds
changes by the layers of each unit that it no longer recomputes, so ranks with other shares of encoder and LLM tell the
two apart.
"""

from collections.abc import Mapping

import numpy as np

from mmtrain.costs import RankMemory
from mmtrain.costs.recorded_costs import with_activation_ratios
from mmtrain.planning.artifact.graph_memory import ROUNDING_BYTES, schedule_in_flight
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import FloatArray
from mmtrain.planning.space.candidate import Candidate

MAX_CONDITION = 30.0  # of the shares of units in what ranks hold; beyond, small errors of runs decide. By hand
# Buffers are as large as the layer that needs most, so counts are no straight lines. Few corrections settle them.
NUM_CORRECTIONS = 4


def activation_ratios(first: Candidate, second: Candidate, evaluator: Evaluator) -> Mapping[str, float] | None:
    """Return how many times the counted bytes the recomputed layers of each unit save, from two runs of a partition.

    A unit whose layers both runs recompute alike is left out. None where the runs cannot tell the units apart, or
    contradict the count altogether (nothing is saved).
    """
    held = held_bytes(first), held_bytes(second)
    if not held[0] or not held[1]:
        return None
    ranks = sorted(first.memory)
    grown = np.array([held[1][rank] - held[0][rank] for rank in ranks])

    def counted_growth(ratios: Mapping[str, float]) -> FloatArray:
        corrected = corrected_evaluator(evaluator, ratios)
        before, after = counted_memory_of(first, corrected), counted_memory_of(second, corrected)
        return np.array([after[rank].total - before[rank].total for rank in ranks])

    ratios = dict.fromkeys(second.layout.units, 1.0)
    for _ in range(NUM_CORRECTIONS):
        counted = counted_growth(ratios)
        gradients = {u: (counted_growth(ratios | {u: 2 * ratio}) - counted) / ratio for u, ratio in ratios.items()}
        gradients = {unit: gradient for unit, gradient in gradients.items() if abs(gradient).max() > ROUNDING_BYTES}
        changes = _solved(gradients, grown - counted)
        if changes is None:
            return None
        ratios = {unit: ratios[unit] + change for unit, change in changes.items()}
        if min(ratios.values()) <= 0:
            return None
    return ratios


def _solved(gradients: Mapping[str, FloatArray], missing: FloatArray) -> dict[str, float] | None:
    """Return by unit the change that explains what is missing on each rank; None where the ranks do not tell."""
    if not gradients:
        return None
    matrix = np.stack([*gradients.values()], axis=1)  # (ranks, units)
    scale = np.linalg.norm(matrix, axis=0)
    solution, _, rank, singular = np.linalg.lstsq(matrix / scale, missing, rcond=None)
    if rank < len(gradients) or singular[0] > MAX_CONDITION * singular[-1]:
        return None
    return dict(zip(gradients, (solution / scale).tolist(), strict=True))


def held_bytes(candidate: Candidate) -> dict[int, float]:
    """Return what each rank of the first replica group held when it was run; empty if that is not known."""
    return {rank: ratio * candidate.memory[rank].total for rank, ratio in candidate.ratio_by_rank.items()}


def corrected_evaluator(evaluator: Evaluator, ratios: Mapping[str, float]) -> Evaluator:
    """Return an evaluator that counts so many times the activations of each unit; seconds stay as they are."""
    problem = evaluator.problem
    costs = with_activation_ratios(problem.costs, problem.hardware, problem.precision, problem.shape, ratios)
    return Evaluator(problem, evaluator.budget, evaluator.layer_costs.with_settings(costs=costs))


def counted_memory_of(candidate: Candidate, evaluator: Evaluator) -> Mapping[int, RankMemory]:
    """Return what an evaluator counts for each rank of a candidate's first replica group."""
    graph = candidate.fitted_graph
    return evaluator.layer_costs.memory(graph, schedule_in_flight(graph, candidate.schedule))
