"""Search the `replicated` placement as the runtime runs it: every rank runs every unit.

Candidates differ in how many ranks hold one copy of the state, and in what is balanced over the ranks; layers are
recomputed where memory demands it.
"""

from itertools import product

from mmtrain.errors import PlanError
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.budget import SearchBudget
from mmtrain.plan.candidate import Candidate, MeshAssignment, Rejected, SearchResults
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.estimate.layer_costs import num_microbatches_of
from mmtrain.plan.problem import PlanningProblem
from mmtrain.plan.replicated.replicated_step import ReplicatedPredictor, shard_sizes
from mmtrain.plan.search.layer_partition import layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import has_replicated_mesh
from mmtrain.plan.search_progress import Progress
from mmtrain.program.ir.graph import DispatchMode
from mmtrain.program.schedules.builder import in_flight_microbatches


class ReplicatedStrategy:
    """Simulates one candidate for every size of shards, and predicts the placement with dispatch."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return 1 if plans are searched; a prediction alone reports no progress."""
        return int("replicated" in problem.constraints.runnable_placements)

    def search(
        self,
        problem: PlanningProblem,
        evaluator: Evaluator,
        budget: SearchBudget,
        incumbent: Candidate | None,
        progress: Progress | None = None,
    ) -> SearchResults:
        """Return simulated candidates where the runtime may run them, and what predicts dispatch beside other plans."""
        simulated: list[Candidate] = []
        rejected: list[Rejected] = []
        if "replicated" in problem.constraints.runnable_placements:
            candidates = _enumerate(problem, evaluator)
            for num_settled, candidate in enumerate(candidates, start=1):
                fit = _fit(candidate, evaluator)
                if isinstance(fit, Rejected):
                    rejected.append(fit)
                else:
                    simulated.append(evaluator.simulate(fit))
                if progress is not None:
                    progress(num_settled, len(candidates))
        is_predicted = incumbent is not None and problem.cluster.num_ranks > 1
        predicted = (ReplicatedPredictor.of(problem),) if is_predicted else ()
        return SearchResults(tuple(simulated), tuple(rejected), predicted).merged()


def _enumerate(problem: PlanningProblem, evaluator: Evaluator) -> list[Candidate]:
    """Return a candidate for every number of ranks, size of shards and way to dispatch that the recipe allows.

    Raises:
        PlanError: the shards that the recipe fixes divide no number of ranks.
    """
    fixed = problem.recipe.parallel.shard
    candidates = []
    for num_ranks in problem.cluster.rank_counts:
        if not has_replicated_mesh(problem.choices, num_ranks):
            continue
        sizes = shard_sizes(num_ranks, problem.hardware.ranks_per_node)
        if fixed != "auto":
            shard = num_ranks if fixed == "all" else fixed
            sizes = [shard] if num_ranks % shard == 0 else []
        meshes = {unit.name: MeshSize(1, 1, num_ranks) for unit in problem.shape.units}
        split = evaluator.layer_costs.batch_split(dict.fromkeys(meshes, num_ranks))
        for shard, dispatch in product(sizes, _dispatch_modes(problem, num_ranks)):
            assignment = MeshAssignment("replicated", meshes, num_microbatches_of(split), shard, dispatch)
            candidates.append(evaluator.enumerated(assignment))
    if not candidates:
        counts = " or ".join(map(str, problem.cluster.rank_counts))
        raise PlanError(f"parallel.shard {fixed} does not divide {counts} ranks; use a divisor of them, or `all`")
    return candidates


def _dispatch_modes(problem: PlanningProblem, num_ranks: int) -> tuple[DispatchMode, ...]:
    """Return what may be balanced over the ranks; `all` and `llm` differ where there is an encoder and another rank."""
    fixed = problem.recipe.parallel.dispatch
    if fixed != "auto":
        return (fixed,)
    return ("all", "llm") if num_ranks > 1 and len(problem.shape.units) > 1 else ("llm",)


def _fit(candidate: Candidate, evaluator: Evaluator) -> Candidate | Rejected:
    """Recompute as few layers as memory demands."""
    layer_costs = evaluator.layer_costs
    candidate = candidate.partitioned(((0, sum(len(unit.layers) for unit in layer_costs.shape.units)),))
    assert candidate.partition is not None
    layout = partitioned_layout(candidate.assignment, layer_costs, candidate.partition)
    return evaluator.fit(candidate, in_flight_microbatches(layout_graph(layout, layer_costs)))
