"""Planning by trying everything: the oracle of the search, and random instances small enough for it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mmtrain.costs import Hardware, machine_for
from mmtrain.plan.estimate.evaluate import Candidate, evaluate_layout
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.estimate.memory_fit import FittedLayout, fit_memory
from mmtrain.plan.search.best_first_search import MAX_PARTITIONS_TO_TRY_ALL, best_first_search
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import (
    LayerChain,
    LayerPartition,
    all_chain_partitions,
    layer_chains,
    layout_graph,
    partitioned_layout,
)
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, bounded_mesh_assignments, split_tp_group_of
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.plan.factory import layer_costs_for, recipe

MOST_PIPELINE = 4
LARGER = range(MAX_PARTITIONS_TO_TRY_ALL + 1, 20_001)  # cuts of instances that the search does not enumerate


@dataclass(frozen=True)
class Instance:
    """What the search is asked."""

    layer_costs: LayerCosts
    choices: Mapping[str, UnitChoices]
    machine: Hardware
    assignments: list[tuple[float, MeshAssignment]]

    @property
    def num_cuts(self) -> int:
        """Ways to place and cut the model."""
        return _num_cuts(self.layer_costs, self.assignments)


def random_instance(seed: int, most_cuts: int = MAX_PARTITIONS_TO_TRY_ALL) -> Instance:
    """A small model on up to 16 ranks, with fewer ways to place and cut it than `most_cuts`."""
    return _random_instance(seed, range(most_cuts), (3, 4))


def larger_instance(seed: int) -> Instance:
    """A deeper model on up to 16 ranks, with more ways to place and cut it than the search tries in full."""
    return _random_instance(seed, LARGER, (6, 8))


def _random_instance(seed: int, num_cuts: range, deepest: tuple[int, int]) -> Instance:
    """A model of up to so many encoder and LLM blocks; beside them both have two layers."""
    rng = np.random.default_rng(seed)
    while True:
        width, wide = (int(rng.choice([32, 64, 128])) for _ in range(2))
        vision = {"layers": int(rng.integers(1, deepest[0] + 1)), "hidden": width, "heads": 4, "ffn": 2 * width}
        vision["freeze"] = bool(rng.random() < 0.3)
        blocks = int(rng.integers(1, deepest[1] + 1))
        llm = {"layers": blocks, "hidden": wide, "heads": 4, "ffn": 3 * wide, "vocab": 256}
        settings = recipe(vision=vision, llm=llm, global_batch=int(rng.choice([4, 8])))
        hardware = str(rng.choice(["cpu-core", "h100-80g"]))
        layer_costs, choices = layer_costs_for(settings, hardware)
        machine = machine_for(settings, hardware)
        world_size = int(rng.choice([2, 3, 4, 6, 8, 12, 16]))
        found = [(b, s) for b, s in bounded_mesh_assignments(choices, world_size) if _is_short(s)]
        if found and _num_cuts(layer_costs, found) in num_cuts:
            return Instance(layer_costs, choices, machine, found)


def placed(given: Instance) -> Iterator[Instance]:
    """The instance with each of its placements alone."""
    for placement in dict.fromkeys(assignment.placement for _, assignment in given.assignments):
        yield replace(given, assignments=[(b, s) for b, s in given.assignments if s.placement == placement])


def everything(given: Instance) -> Iterator[Candidate]:
    """Simulate all that fits."""
    for found in _all_that_fit(given):
        yield evaluate_layout(found.layout, given.layer_costs, given.machine)


def least_step(given: Instance) -> float:
    """Seconds of the fastest step of all that fit, or infinity. What the work of one rank rules out is not simulated.

    No step is shorter than what its busiest rank computes, so in that order all that follow the first one whose work
    alone is more than the fastest step are slower.
    """
    worked = sorted(
        ((_least_work(found, given.layer_costs), found) for found in _all_that_fit(given)), key=lambda one: one[0]
    )
    least = math.inf
    for work, found in worked:
        if work > least:
            break
        least = min(least, evaluate_layout(found.layout, given.layer_costs, given.machine).step_time_s)
    return least


def fastest_found(given: Instance) -> float:
    """Seconds of the step that the search finds, or infinity."""
    judged = best_first_search(
        given.assignments, given.layer_costs, given.choices, given.machine, at_least=1
    ).candidates
    return judged[0].step_time_s if judged else math.inf


def _all_that_fit(given: Instance) -> Iterator[FittedLayout]:
    """Every assignment, every cut, recomputing as little as memory demands."""
    for _, assignment in given.assignments:
        if split_tp_group_of(assignment, given.machine.ranks_per_node):
            continue
        for cuts in all_cuts(layer_chains(assignment, given.layer_costs, given.choices)):
            alive = in_flight_microbatches(
                layout_graph(partitioned_layout(assignment, given.layer_costs, cuts), given.layer_costs)
            )
            found = fit_memory(assignment, given.layer_costs, cuts, given.machine, alive)
            if isinstance(found, FittedLayout):
                yield found


def _least_work(found: FittedLayout, layer_costs: LayerCosts) -> float:
    """Seconds that the busiest rank computes, mean over the batches."""
    work: dict[int, np.ndarray] = {}
    seconds = layer_costs.stage_seconds(found.graph)
    for stage in found.graph.stages:
        own = (seconds[stage.id].forward + seconds[stage.id].backward).sum(axis=2)
        for replica, tp_group in enumerate(stage.tp_groups):
            work[tp_group[0]] = work.get(tp_group[0], np.zeros(len(own))) + own[:, replica]
    return float(np.max(list(work.values()), axis=0).mean())


def all_cuts(chains: tuple[LayerChain, ...]) -> Iterator[LayerPartition]:
    yield from product(*map(all_chain_partitions, chains))


def squeezed(given: Instance, share: float) -> Instance:
    """The same where ranks have only so much of the memory that the hungriest of all plans needs."""
    most = max(judged.peak_bytes for judged in everything(given))
    return replace(given, machine=replace(given.machine, memory_bytes=share * most))


def _is_short(assignment: MeshAssignment) -> bool:
    return max(size.pp for size in assignment.meshes.values()) <= MOST_PIPELINE


def _num_cuts(layer_costs: LayerCosts, found: list[tuple[float, MeshAssignment]]) -> int:
    layers = {unit.name: len(unit.layers) for unit in layer_costs.shape.units}
    total = 0
    for _, assignment in found:
        if assignment.placement == "unified":
            size = assignment.meshes["llm"]
            total += math.comb(sum(layers.values()) - 1, size.pp * size.vpp - 1)
        else:
            total += math.prod(math.comb(layers[n] - 1, s.pp * s.vpp - 1) for n, s in assignment.meshes.items())
    return total
