"""From a recipe, the lengths of its data and a cluster to the planning problem."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.costs import Hardware, costs_for, machine_with_spread, precision_for
from mmtrain.costs.choose import expert_spread, require_model_of_run
from mmtrain.costs.find_hardware import MAX_RATIO_OF_DEVICES
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape, with_expert_spread
from mmtrain.planning.advise.infeasible import explain_infeasible
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.search.strategies import has_meshes
from mmtrain.planning.space.budget import DEFAULT_BUDGET, MeshBudget, SearchBudget
from mmtrain.planning.space.constraints import RecomputeMode, UnitChoices, encoder_microbatches, unit_choices
from mmtrain.planning.space.problem import Cluster, Constraints, PlanningProblem, PlanRequest
from mmtrain.planning.space.sample_batches import sample_batches
from mmtrain.recipe.loading.recipe_loader import plan_settings
from mmtrain.recipe.settings.parallel_settings import UnitParallel
from mmtrain.recipe.settings.schema import Recipe


def formulate_problem(
    recipe: Recipe,
    lengths: SampleLengths,
    *,
    world_size: int,
    hardware: str,
    recipe_sha256: str,
    request: PlanRequest | None = None,
    budget: SearchBudget = DEFAULT_BUDGET,
) -> PlanningProblem:
    """Collect what the planner depends on: shapes, costs, sampled batches and constraints.

    hardware: a preset's name. The problem may have no mesh at all; `require_feasible` says so.

    Raises:
        PlanError: settings contradict each other or the model, the ranks differ too much, or the data holds no sample.
    """
    shape = build_model_shape(recipe)
    machine = machine_with_spread(recipe, hardware)
    precision = precision_for(recipe, machine)
    choices = unit_choices(recipe, shape, machine.ranks_per_node, budget.meshes)
    grouping = Grouping.of(recipe.data, recipe.train.num_groups)
    batches = sample_batches(lengths, grouping, recipe.train.seed, budget.sampling)
    targets = replace(batches.targets, balance_as_padded=recipe.parallel.balance_as_padded())
    batches = replace(batches, targets=targets)
    if recipe.parallel.node_wise:
        batches = replace(batches, ranks_per_node=machine.ranks_per_node)
    request = request or PlanRequest()
    constraints = Constraints(
        placements=placements_to_search(recipe, choices, world_size),
        choices=choices,
        recompute={name: _recomputed_layers(recipe.parallel.of(name)) for name in choices},
        sequence_parallel={name: recipe.parallel.of(name).sp for name in choices},
        tp_overlap={name: recipe.parallel.of(name).tp_overlap for name in choices},
        encoder_microbatches=encoder_microbatches(recipe, shape),
    )
    counts = rank_counts(recipe, constraints, world_size, budget.meshes)
    _require_even_ranks(machine.at_pace_of(world_size), world_size)
    # The slowest of the fewest ranks, so that bounds hold for all numbers of them; the simulator adds the rest.
    machine = machine.at_pace_of(min(counts, default=world_size))
    costs = costs_for(machine, precision, recipe.cluster.costs)
    require_model_of_run(costs, shape)
    shape = with_expert_spread(shape, expert_spread(recipe, costs)[0])
    return PlanningProblem(
        recipe=recipe,
        recipe_sha256=recipe_sha256,
        settings=plan_settings(recipe),
        shape=shape,
        costs=costs,
        precision=precision,
        seq_len=recipe.data.group_tokens,
        batches=batches,
        constraints=constraints,
        cluster=Cluster(machine, world_size, counts),
        request=request,
    )


def _recomputed_layers(degrees: UnitParallel) -> RecomputeMode:
    """Return which layers of a unit run again as a whole: none of `selective`, which the model's shape marks."""
    return "none" if degrees.recompute == "selective" else degrees.recompute


def _require_even_ranks(machine: Hardware, num_ranks: int) -> None:
    """Refuse ranks of which the others would wait for the slowest most of the time, as for GPUs of another kind."""
    if machine.slowest_rank_ratio > MAX_RATIO_OF_DEVICES:
        raise PlanError(
            f"cluster.time_spread.ranks: {machine.time_spread.ranks:g} found, with which the slowest of {num_ranks} "
            f"ranks takes {machine.slowest_rank_ratio:.1f} times as long as a mean one, and ranks have equal shares of "
            f"the work. Allowed: up to {MAX_RATIO_OF_DEVICES:g} times. Leave the slow ranks or nodes out "
            "(`mmtrain report` of a run names them), and state the spread of the others"
        )


def require_feasible(problem: PlanningProblem) -> None:
    """Refuse a problem whose constraints leave no mesh for any number of ranks.

    Raises:
        PlanError: names the settings that clash, and numbers of ranks with which there would be a mesh.
    """
    if problem.cluster.rank_counts:
        return
    recipe, num_ranks = problem.recipe, problem.cluster.num_ranks
    max_ranks = min(num_ranks, recipe.parallel.max_gpus or num_ranks)
    choices_of: Callable[[Recipe], Mapping[str, UnitChoices]] = partial(
        unit_choices, shape=problem.shape, ranks_per_node=problem.hardware.ranks_per_node
    )
    raise PlanError(explain_infeasible(recipe, problem.choices, max_ranks, problem.constraints.placements, choices_of))


def placements_to_search(recipe: Recipe, choices: Mapping[str, UnitChoices], world_size: int) -> tuple[Placement, ...]:
    """Return the placements that the recipe allows.

    Where it leaves them open, `replicated` is one of them for several ranks: on one rank it is `unified`. Ranks share
    sequences in `unified` and `disaggregated` only.
    """
    if recipe.parallel.placement != "auto":
        return (recipe.parallel.placement,)
    if (recipe.parallel.llm.cp or 1) > 1:
        return ("unified", "disaggregated") if len(choices) > 1 else ("unified",)
    chosen: tuple[Placement, ...] = ("unified", "disaggregated", "colocated") if len(choices) > 1 else ("unified",)
    return (*chosen, "replicated") if world_size > 1 else chosen


def rank_counts(recipe: Recipe, constraints: Constraints, world_size: int, budget: MeshBudget) -> tuple[int, ...]:
    """Return the numbers of ranks to plan for: all ranks, or with `parallel.max_gpus` several up to that.

    With `parallel.max_gpus` we plan for the numbers of `rank_counts_to_try` that have a mesh. If none has one, we plan
    for the largest number that does.
    """
    limit = recipe.parallel.max_gpus

    def is_possible(count: int) -> bool:
        return any(has_meshes(constraints.choices, count, placement) for placement in constraints.placements)

    if limit is None:
        return (world_size,) if is_possible(world_size) else ()
    max_ranks = min(world_size, limit)
    preferred = tuple(filter(is_possible, rank_counts_to_try(max_ranks, budget)))
    return preferred or tuple(islice(filter(is_possible, range(max_ranks, 0, -1)), 1))


def rank_counts_to_try(max_ranks: int, budget: MeshBudget) -> list[int]:
    """Return numbers of ranks worth trying where fewer than `max_ranks` may do: evenly spaced, the largest first."""
    step = max(1, max_ranks // budget.rank_count_divisor)
    return list(range(max_ranks, 0, -step))[: budget.num_rank_counts]
