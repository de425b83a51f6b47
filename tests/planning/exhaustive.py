"""Plan by exhaustive search: the oracle of the search, and random instances small enough for it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import (
    LayerChain,
    all_chain_partitions,
    layout_graph,
    partitioned_layout,
)
from mmtrain.planning.search.best_first_search import AllocatedCandidates
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate, LayerPartition
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.factory import evaluator_for, recipe, with_memory
from tests.plans import best_first_search, mesh_assignments

MAX_PIPELINE = 4  # ranks of a pipeline in an instance
MAX_EXHAUSTIVE = DEFAULT_BUDGET.partitions.max_partitions_to_try_all
LARGER = range(MAX_EXHAUSTIVE + 1, 20_001)  # partitions of instances that the search does not enumerate


@dataclass(frozen=True)
class Instance:
    """The input of the search."""

    evaluator: Evaluator
    candidates: Sequence[Candidate]

    @property
    def num_partitions(self) -> int:
        """Count the ways to place the model and to divide its layers."""
        return _num_partitions(self.evaluator, self.candidates)


def random_instance(seed: int, max_partitions: int = MAX_EXHAUSTIVE) -> Instance:
    """Make a small model on up to 16 ranks, with fewer ways to place and divide it than `max_partitions`."""
    return _random_instance(seed, range(max_partitions), (3, 4))


def larger_instance(seed: int) -> Instance:
    """Make a deeper model on up to 16 ranks, with more ways to place and divide it than the search tries in full."""
    return _random_instance(seed, LARGER, (6, 8))


def _random_instance(seed: int, num_partitions: range, max_blocks: tuple[int, int]) -> Instance:
    """Make a model of at most `max_blocks` encoder and LLM blocks; both have two more layers."""
    rng = np.random.default_rng(seed)
    while True:
        vision_width, llm_width = (int(rng.choice([32, 64, 128])) for _ in range(2))
        vision_blocks = int(rng.integers(1, max_blocks[0] + 1))
        vision = {"layers": vision_blocks, "hidden": vision_width, "heads": 4, "ffn": 2 * vision_width}
        vision["freeze"] = bool(rng.random() < 0.3)
        llm_blocks = int(rng.integers(1, max_blocks[1] + 1))
        llm = {"layers": llm_blocks, "hidden": llm_width, "heads": 4, "ffn": 3 * llm_width, "vocab": 256}
        settings = recipe(vision=vision, llm=llm, global_batch=int(rng.choice([4, 8])))
        evaluator = evaluator_for(settings, str(rng.choice(["cpu-core", "h100-80g"])))
        num_ranks = int(rng.choice([2, 3, 4, 6, 8, 12, 16]))
        candidates = [c for c in all_candidates(evaluator, num_ranks) if _is_short(c)]
        if candidates and _num_partitions(evaluator, candidates) in num_partitions:
            return Instance(evaluator, candidates)


def all_candidates(evaluator: Evaluator, num_ranks: int) -> list[Candidate]:
    """Return every mesh assignment on `num_ranks` ranks, without bounds."""
    assignments = mesh_assignments(evaluator.problem.choices, num_ranks)
    return [evaluator.enumerated(assignment).bounded(0.0) for assignment in assignments]


def by_placement(instance: Instance) -> Iterator[Instance]:
    """Yield the instance with each of its placements alone."""
    for placement in dict.fromkeys(candidate.placement for candidate in instance.candidates):
        yield replace(instance, candidates=[c for c in instance.candidates if c.placement == placement])


def everything(instance: Instance) -> Iterator[Candidate]:
    """Simulate everything that fits."""
    for fitted in _all_that_fit(instance):
        yield instance.evaluator.simulate(fitted)


def least_step(instance: Instance) -> float:
    """Return the seconds of the fastest step of everything that fits, or infinity.

    No step is shorter than what its busiest rank computes. So in the order of that work, all that follow the first one
    whose work alone exceeds the fastest step are slower, and are not simulated.
    """
    by_work = sorted(
        ((_busiest_rank_s(fitted, instance.evaluator), fitted) for fitted in _all_that_fit(instance)),
        key=lambda entry: entry[0],
    )
    fastest_s = math.inf
    for work_s, fitted in by_work:
        if work_s > fastest_s:
            break
        fastest_s = min(fastest_s, instance.evaluator.simulate(fitted).step_time_s)
    return fastest_s


def fastest_found(instance: Instance) -> float:
    """Return the seconds of the step that the search finds, or infinity."""
    return best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1).fastest_s


def _all_that_fit(instance: Instance) -> Iterator[Candidate]:
    """Yield every partition of every mesh assignment, recomputing as little as memory demands."""
    evaluator = instance.evaluator
    for candidate in instance.candidates:
        if candidate.assignment.tp_group_across_nodes(evaluator.problem.hardware.ranks_per_node):
            continue
        for partition in all_partitions(evaluator.layer_chains(candidate)):
            layout = partitioned_layout(candidate.assignment, evaluator.layer_costs, partition)
            num_in_flight = in_flight_microbatches(layout_graph(layout, evaluator.layer_costs))
            fitted = evaluator.fit(candidate.partitioned(partition), num_in_flight)
            if isinstance(fitted, Candidate):
                yield fitted


def _busiest_rank_s(fitted: Candidate, evaluator: Evaluator) -> float:
    """Return the seconds that the busiest rank computes, mean over the batches."""
    work: dict[int, np.ndarray] = {}
    assert fitted.fit is not None
    seconds = evaluator.layer_costs.stage_seconds(fitted.fit.graph)
    for stage in fitted.fit.graph.stages:
        of_replicas = (seconds[stage.id].forward + seconds[stage.id].backward).sum(axis=2)
        for replica, tp_group in enumerate(stage.tp_groups):
            before = work.get(tp_group[0], np.zeros(len(of_replicas)))
            work[tp_group[0]] = before + of_replicas[:, replica]
    return float(np.max(list(work.values()), axis=0).mean())


def all_partitions(chains: tuple[LayerChain, ...]) -> Iterator[LayerPartition]:
    yield from product(*map(all_chain_partitions, chains))


def squeezed(instance: Instance, share: float) -> Instance:
    """Give ranks only a share of the memory that the largest of all plans needs."""
    peak_bytes = max(candidate.peak_bytes for candidate in everything(instance))
    return replace(instance, evaluator=with_memory(instance.evaluator, share * peak_bytes))


def _is_short(candidate: Candidate) -> bool:
    return max(mesh.pp for mesh in candidate.assignment.meshes.values()) <= MAX_PIPELINE


def _num_partitions(evaluator: Evaluator, candidates: Sequence[Candidate]) -> int:
    layers = {unit.name: len(unit.layers) for unit in evaluator.problem.shape.units}
    total = 0
    for assignment in (candidate.assignment for candidate in candidates):
        if assignment.placement == "unified":
            mesh = assignment.meshes["llm"]
            total += math.comb(sum(layers.values()) - 1, mesh.pp * mesh.vpp - 1)
        else:
            meshes = assignment.meshes.items()
            total += math.prod(math.comb(layers[unit] - 1, mesh.pp * mesh.vpp - 1) for unit, mesh in meshes)
    return total
