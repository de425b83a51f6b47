"""Which plans `plan --measure` runs: the fastest sizes, and of these the layer partitions that are estimated fastest.

OmniBal (arXiv 2407.20761) runs 10 to 15 partitions of one size for a few steps and takes the fastest, because no cost
model ranks cuts that differ by a layer. Here the partitions of several sizes compete for the same number of runs.
"""

from collections.abc import Sequence
from itertools import product

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import (
    in_flight_by_chunk,
    jittered_partitions,
    recompute_to_fit,
    whole_root,
)
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.space.candidate import Candidate, LayerPartition, SearchResults, rank_candidates


def cuts_to_measure(results: SearchResults, evaluator: Evaluator, num_sizes: int, num_cuts: int) -> list[Candidate]:
    """Return at most `num_cuts` simulated candidates, predicted fastest first: the best `num_sizes` sizes with others.

    The others are partitions of these sizes with the next best estimates that fit into memory. A `colocated` size has
    one partition, which its schedule was made for, and in `replicated` there is nothing to divide. Where the sizes have
    too few partitions, the next sizes of the ranking follow, each with its own partitions.
    """
    sizes = results.candidates[: min(num_sizes, num_cuts)]
    chosen = list(sizes)
    _add_neighbours(chosen, sizes, evaluator, num_cuts)
    for size in results.candidates[len(sizes) :]:
        if len(chosen) >= num_cuts:
            break
        if _is_new(size, chosen):
            chosen.append(size)
        _add_neighbours(chosen, [size], evaluator, num_cuts)
    return list(rank_candidates(chosen))


def _add_neighbours(chosen: list[Candidate], sizes: Sequence[Candidate], evaluator: Evaluator, num_cuts: int) -> None:
    """Append other partitions of these sizes that fit, simulated, the best estimates first, up to `num_cuts` in all."""
    if len(chosen) >= num_cuts:
        return
    neighbours = [
        cut
        for size in sizes
        if size.placement not in ("colocated", "replicated")
        for cut in _estimated_neighbours(size, evaluator)
    ]
    neighbours.sort(key=lambda cut: cut.estimated_step_s or 0.0)
    for cut in neighbours:
        if len(chosen) >= num_cuts:
            return
        assert cut.partition is not None
        in_flight = evaluator.estimator(None).in_flight(cut.assignment, cut.partition)
        fitted = evaluator.fit(cut, in_flight)
        if isinstance(fitted, Candidate) and _is_new(fitted, chosen):
            chosen.append(evaluator.simulate(fitted))


def _is_new(candidate: Candidate, chosen: Sequence[Candidate]) -> bool:
    """Return whether no chosen candidate has the same layout; the search may hold two partitions of one size."""
    return all(candidate.layout != other.layout for other in chosen)


def _estimated_neighbours(size: Candidate, evaluator: Evaluator) -> list[Candidate]:
    """Return the partitions whose stage boundaries lie near those of a candidate, with estimates of their steps."""
    assert size.partition is not None
    budget = evaluator.budget.partitions
    estimator = evaluator.estimator(budget.num_estimated_replica_groups)
    chains = evaluator.layer_chains(size)
    recompute: list[SpanRecompute | None] = [None] * len(chains)
    if any(stage.recompute for stage in size.graph.stages):
        in_flight = estimator.in_flight(size.assignment, size.partition)
        recompute = [
            recompute_to_fit(chain, in_flight_by_chunk(chain, in_flight), evaluator.memory_bytes) for chain in chains
        ]
    num_of_chain = max(2, whole_root(budget.max_jitters_per_assignment, len(chains)))
    options = [
        jittered_partitions(chain, around, of_chain, budget)[:num_of_chain]
        for chain, around, of_chain in zip(chains, size.partition, recompute, strict=True)
    ]
    partitions: list[LayerPartition] = [cut for cut in product(*options) if cut != size.partition]
    if not partitions:
        return []
    start = Candidate(size.id, size.assignment, time_lower_bound_s=size.time_lower_bound_s)
    estimates = estimator.estimate(size.assignment, chains, partitions, recompute).tolist()
    return [start.partitioned(cut).estimated(seconds) for cut, seconds in zip(partitions, estimates, strict=True)]
