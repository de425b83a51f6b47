"""Search the `replicated` placement: every rank runs every unit, sharded over the ranks (FSDP, arXiv 2304.11277).

Candidates differ in the number of ranks that hold one copy of the state (fewer than all: hybrid sharding), in the units
whose items are balanced over the ranks (OrchMLLM, arXiv 2503.23830), and in when encoders run. Layers are recomputed
where memory demands it. In every layer all ranks wait for the slowest, so a pass is simulated for all of them together.
With `parallel.zero: 2` the weights are gathered once a step and stay whole, so that shards save gradients and optimizer
state alone, and gathers are few. With `parallel.zero: 1` every rank holds whole weights, as replicas in `unified` do,
and runs its passes by itself. With `placement: auto` both are tried in the place of the fastest plan of `zero: 3`
alone, since what they spare hardly depends on the rest.

With tensor parallelism inside (as torchtitan's 2D parallelism, arXiv 2410.06511) a TP group takes the place of a rank:
it runs every unit, and the ranks at one place of all groups share what that place holds. With context parallelism
groups also share sequences, and weights, gradients and optimizer state as before. Both are only tried where the compute
of layers alone may be faster than the best so far.

With expert parallelism (`with_expert_ranks` chooses the degree) a rank gathers only its experts' weights, from the
ranks that hold the same ones, and exchanges tokens with those that hold others.

Encoders that run before the LLM (`encoder_first`) may have fewer mini-batches than it. Each mini-batch gathers all
weights and waits for the slowest rank once. So we take the fewest that fit, unless more of them avoid recomputation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from mmtrain.errors import PlanError
from mmtrain.models.shapes.layer_shape import shard_holds_experts
from mmtrain.planning.artifact.graph_memory import schedule_in_flight
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import layout_graph, partitioned_layout
from mmtrain.planning.search.mesh_enumeration import has_split_tp_group, replicated_meshes
from mmtrain.planning.space.candidate import Candidate, DecidedSearch, MeshAssignment, Rejected, SearchResults
from mmtrain.planning.space.problem import PlanningProblem, Progress
from mmtrain.planning.space.sample_batches import num_microbatches_of
from mmtrain.program.ir.graph import LLM, DispatchMode
from mmtrain.recipe.settings.modalities import GENERATOR

FAR_BEHIND_RATIO = 1.15  # of a mesh's best step to the fastest so far, above which no further size of shards is tried
# Of the first sampled batch to that of the fastest so far, above which the others are not simulated: ratios of steps
# and of first batches differ by at most 2.1% (recipes/whatif).
MAX_FIRST_BATCH_RATIO = 1.05
MAX_SIZES_PUT_OFF = 3  # of shards of a mesh that were all so slow: then no further size is tried


class ReplicatedStrategy:
    """Simulates candidates for every size of shards, way to dispatch and schedule."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return 1: candidates of all kinds are decided together."""
        return 1

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> DecidedSearch:
        """Find simulated candidates, fastest first, and those that do not fit, the closest first.

        Raises:
            PlanError: the recipe asks for the placement with shards that do not divide the ranks.
        """
        problem = evaluator.problem
        simulated: list[Candidate] = []
        rejected: list[Rejected] = []
        alternatives = enumerate_replicated(problem, evaluator)
        if not alternatives and problem.recipe.parallel.placement == "replicated":
            raise PlanError(_shards_that_do_not_divide(problem))
        put_off: list[Candidate] = []
        fastest: Candidate | None = None
        for num_done, candidates in enumerate(alternatives, start=1):
            for candidate in candidates:
                assignment = candidate.assignment
                if fastest is not None and (
                    _is_slower(assignment, fastest.step_time_s, evaluator)
                    or _is_far_behind(assignment, simulated, put_off, fastest.step_time_s)
                ):
                    break
                fit = fit_replicated(candidate, evaluator)
                if isinstance(fit, Rejected):
                    rejected.append(fit)
                    continue
                max_first_batch_s = math.inf
                if fastest is not None and not problem.request.explain:
                    max_first_batch_s = MAX_FIRST_BATCH_RATIO * fastest.first_batch_step_s
                found = evaluator.simulate_unless_slow(fit, max_first_batch_s)
                if found is None:
                    put_off.append(fit)
                else:
                    simulated.append(found)
                    fastest = min(found, fastest or found, key=lambda of_two: of_two.step_time_s)
                if not _recomputes_encoders(fit):
                    break
            if progress is not None:
                progress(num_done, len(alternatives))
        simulated += _faster_less_sharded(simulated, evaluator)
        closest_first = sorted(rejected, key=lambda loser: loser.need_gib or math.inf)
        return DecidedSearch(SearchResults(tuple(simulated), tuple(closest_first)).merged())


def enumerate_replicated(problem: PlanningProblem, evaluator: Evaluator) -> list[list[Candidate]]:
    """Return candidates for every mesh, size of shards, way to dispatch and schedule that the recipe allows.

    Those in one list differ in the number of the encoders' mini-batches alone, which ascends.
    """
    meshes = (meshes for count in problem.cluster.rank_counts for meshes in replicated_meshes(problem.choices, count))
    return [alternative for of_units in meshes for alternative in _with_meshes(of_units, problem, evaluator)]


def _with_meshes(
    meshes: Mapping[str, MeshSize], problem: PlanningProblem, evaluator: Evaluator
) -> Iterator[list[Candidate]]:
    """Yield the candidates of some meshes; none of those whose TP groups lie on two nodes."""
    parallel, llm = problem.recipe.parallel, meshes[LLM]
    sizes = _allowed_sizes(llm, problem)
    numbers = num_microbatches_of(evaluator.layer_costs.batch_split({name: mesh.dp for name, mesh in meshes.items()}))
    modes = _dispatch_modes(problem, llm.num_replicas)
    # Sizes of shards follow each other, since they divide the batches alike.
    for dispatch, (encoder_first, to_try), shard in product(modes, _schedules(problem, numbers), sizes):
        exchange = parallel.exchange if dispatch == "all" else "all_to_all"
        assignments = [
            MeshAssignment(
                "replicated",
                meshes,
                numbers_of_units,
                shard,
                dispatch,
                exchange,
                encoder_first,
                keeps_weights=parallel.zero == 2,
            )
            for numbers_of_units in to_try
        ]
        if llm.tp == 1 or not has_split_tp_group(assignments[0], problem.hardware.ranks_per_node):
            yield [evaluator.enumerated(assignment) for assignment in assignments]


def _allowed_sizes(llm: MeshSize, problem: PlanningProblem) -> Sequence[int | None]:
    """Return the sizes of shards that the recipe allows; None: whole weights."""
    parallel, num_replicas = problem.recipe.parallel, llm.num_replicas
    if parallel.zero == 1:
        return [None]
    if parallel.shard == "auto":
        sizes = shard_sizes(num_replicas, max(problem.hardware.ranks_per_node // llm.tp, 1))
    else:
        sizes = [num_replicas if parallel.shard == "all" else parallel.shard]
    # One copy, or several, hold all experts.
    return [size for size in sizes if num_replicas % size == 0 and shard_holds_experts(size, llm.ep)]


def _faster_less_sharded(simulated: Sequence[Candidate], evaluator: Evaluator) -> list[Candidate]:
    """Simulate the fastest candidate with less that is sharded; return what is faster by more than plans count."""
    if not simulated:
        return []
    fastest = min(simulated, key=lambda candidate: candidate.step_time_s)
    less_sharded = _less_sharded(fastest.assignment, evaluator.problem)
    fits = (fit_replicated(evaluator.enumerated(assignment), evaluator) for assignment in less_sharded)
    others = (evaluator.simulate(fit) for fit in fits if isinstance(fit, Candidate))
    return [other for other in others if other.step_time_s * AS_FAST_RATIO < fastest.step_time_s]


def _less_sharded(fastest: MeshAssignment, problem: PlanningProblem) -> Iterator[MeshAssignment]:
    """Yield the fastest assignment with weights that stay gathered through a step, and with whole weights.

    There is neither where the recipe names the placement, which stands for sharded weights unless it says otherwise.
    """
    if problem.recipe.parallel.placement != "auto" or fastest.meshes[LLM].num_replicas == 1:
        return
    if fastest.shard is not None and fastest.shard > 1:
        yield replace(fastest, keeps_weights=True)
    yield replace(fastest, shard=None)


def _shards_that_do_not_divide(problem: PlanningProblem) -> str:
    """Say that the size of shards which the recipe fixes suits no mesh."""
    counts = " or ".join(map(str, problem.cluster.rank_counts))
    tp = problem.recipe.parallel.llm.tp or 1
    divided = f"{counts} ranks" if tp == 1 else f"the {counts} ranks by parallel.llm.tp {tp}"
    shard, ep = problem.recipe.parallel.shard, problem.choices[LLM].ep
    experts = f", or neither divides nor is a multiple of ep {ep}" if ep > 1 else ""
    return f"parallel.shard {shard} does not divide {divided}{experts}; use a divisor of them, or `all`"


def _is_slower(assignment: MeshAssignment, fastest_s: float, evaluator: Evaluator) -> bool:
    """Return whether, with tensor or context parallelism, layers alone take longer than the fastest simulated step."""
    llm = assignment.meshes[LLM]
    if llm.tp == llm.cp == 1:
        return False
    numbers, seconds = assignment.num_microbatches, evaluator.mesh_times.seconds
    bound_s = sum(seconds(unit, mesh, numbers[unit]) for unit, mesh in assignment.meshes.items())
    return bound_s > fastest_s * AS_FAST_RATIO


def _schedules(
    problem: PlanningProblem, num_microbatches: Mapping[str, int]
) -> list[tuple[bool, list[Mapping[str, int]]]]:
    """Return whether encoders run first, with the numbers of mini-batches to try, by unit, for each schedule allowed.

    num_microbatches: the LLM's, and for encoders those that the recipe fixes, else as many.
    """
    fixed = problem.recipe.parallel.schedule
    schedules: list[tuple[bool, list[Mapping[str, int]]]] = []
    if fixed != "encoder_first":
        schedules.append((False, [num_microbatches]))
    encoders = [unit.name for unit in problem.shape.units if unit.kind == "encoder"]
    if fixed != "1f1b" and encoders:
        free = [name for name in encoders if name not in problem.constraints.encoder_microbatches]
        num_llm = num_microbatches[LLM]
        fewest_first = [number for number in range(1, num_llm + 1) if num_llm % number == 0] if free else [num_llm]
        schedules.append((True, [{**num_microbatches, **dict.fromkeys(free, number)} for number in fewest_first]))
    return schedules


def _recomputes_encoders(candidate: Candidate) -> bool:
    """Return whether memory makes an encoder compute layers again, which more mini-batches may spare."""
    units = candidate.layout.units.items()
    return any(unit.num_recomputed for name, unit in units if name not in (LLM, GENERATOR))


def _is_far_behind(
    assignment: MeshAssignment, simulated: Sequence[Candidate], put_off: Sequence[Candidate], fastest_s: float
) -> bool:
    """Return whether shards of other sizes on this mesh, with tensor or context parallelism, are far from the fastest.

    What a mesh computes stays, whatever the size of its shards.

    put_off: candidates that were slow on the first batch.
    """
    llm = assignment.meshes[LLM]
    if llm.tp == llm.cp == 1:
        return False

    def of_other_sizes(candidates: Sequence[Candidate]) -> list[Candidate]:
        of_mesh = (c for c in candidates if c.assignment.meshes == assignment.meshes)
        return [c for c in of_mesh if c.assignment.shard != assignment.shard]

    others = of_other_sizes(simulated)
    if others:
        return min(candidate.step_time_s for candidate in others) > FAR_BEHIND_RATIO * fastest_s
    return len({candidate.assignment.shard for candidate in of_other_sizes(put_off)}) >= MAX_SIZES_PUT_OFF


def _dispatch_modes(problem: PlanningProblem, num_replicas: int) -> tuple[DispatchMode, ...]:
    """Return what may be balanced over replicas; `all` and `llm` differ where there are items and another replica."""
    fixed = problem.recipe.parallel.dispatch
    if fixed != "auto":
        return (fixed,)
    return ("all", "llm") if num_replicas > 1 and len(problem.shape.units) > 1 else ("llm",)


def fit_replicated(candidate: Candidate, evaluator: Evaluator) -> Candidate | Rejected:
    """Recompute as few layers of a candidate of this placement as memory demands."""
    layer_costs = evaluator.layer_costs
    candidate = candidate.partitioned(((0, sum(len(unit.layers) for unit in layer_costs.shape.units)),))
    assert candidate.partition is not None
    layout = partitioned_layout(candidate.assignment, layer_costs, candidate.partition)
    graph = layout_graph(layout, layer_costs)
    return evaluator.fit(candidate, schedule_in_flight(graph, layout.default_schedule))


def shard_sizes(num_ranks: int, ranks_per_node: int) -> Sequence[int]:
    """Return sizes of shard groups: divisors of a node's ranks, and whole nodes by powers of two, up to all ranks.

    With tensor parallelism a TP group counts as one rank. Groups lie one after another. Fewer ranks than a node has,
    such as 64 of an NVL72, are divided as they are.
    """
    common = num_ranks if num_ranks <= ranks_per_node else math.gcd(num_ranks, ranks_per_node)
    in_node = [size for size in range(1, ranks_per_node + 1) if common % size == 0]
    num_nodes = num_ranks // ranks_per_node if num_ranks % ranks_per_node == 0 else 0
    across_nodes = [ranks_per_node << i for i in range(1, num_nodes.bit_length()) if num_nodes % (1 << i) == 0]
    return sorted({*in_node, *across_nodes, num_ranks})
