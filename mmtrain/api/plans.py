"""Make the plan of a recipe: whoever calls `make_plan` gets what `mmtrain plan` saves and `mmtrain train` runs."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mmtrain.api.local_cluster import require_costs, resolve_cluster
from mmtrain.api.recipe_index import index_recipe
from mmtrain.balance import SampleLengths
from mmtrain.errors import PlanError, RecipeError
from mmtrain.planning import Plan, load_plan
from mmtrain.planning.advise.why_slower import with_compared, with_misfit
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.group_size import choose_group_size
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanningProblem, PlanRequest
from mmtrain.planning.whatif import describe_faster_nearby, with_text_only
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from mmtrain.recipe.loading.recipe_loader import plan_settings
from mmtrain.report.run_cost import RunCost
from mmtrain.report.scaling import ScalingPoint
from mmtrain.runtime.run_folder import PLAN_FILE

COMPARED_LABEL = "your layout (its layers divided by the planner)"
DIVIDED_LABEL = "your layout"


@dataclass(frozen=True)
class StartedRanks:
    """Ranks that run on this machine; the plan must use all of them."""

    num_ranks: int
    hardware: str | None = None  # name of a preset; None: the recipe's, or this machine's
    recipe_sha256: str | None = None  # fingerprint that the plan carries; None: that of the recipe


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and what was learned beside it."""

    plan: Plan  # with the throughput of its LLM alone, where it has encoders
    cost: RunCost  # of all steps of the recipe, as predicted
    hints: tuple[str, ...] = ()  # sentences: a nearby batch, or fewer ranks, that is over 10% faster
    # Of ranks to units, where the request asks to explain and units have ranks of their own.
    allocation: Allocation | None = None


def make_plan(
    recipe: Recipe,
    lengths: SampleLengths,
    request: PlanRequest | None = None,
    *,
    started: StartedRanks | None = None,
    compared: Recipe | None = None,
    with_hints: bool = False,
) -> PlannedRun:
    """Search the fastest plan that fits, for the recipe's cluster, or for this machine where the recipe leaves it open.

    Args:
        recipe: model, data, constraints and cluster. What this machine's torch cannot run is not searched for it.
        lengths: of the recipe's samples.
        request: how many losers the plan names, a rule of thumb in place of the search, runs on this machine, progress.
        started: ranks that are running already; by default the plan may use fewer, if `parallel.max_gpus` says so.
        compared: the recipe with a layout of the user fixed, which is planned too and put into the ranking.
        with_hints: whether to try other batches and numbers of ranks, which takes some more searches.

    Raises:
        PlanError: constraints contradict each other or the cluster, or nothing fits into memory.
    """
    written, request = recipe, request or PlanRequest()
    allocations: list[Allocation] = []
    if request.explain:
        request = replace(request, allocation_watch=AllocationWatch(time.perf_counter, allocations.append))
    hints: list[str] = []
    with _without_garbage_collection():
        recipe = _with_steps(_with_groups(written, lengths, request, started), lengths)
        chosen = plan(_formulate(written, recipe, lengths, request, started))
        if compared is not None:
            compared = compared.with_groups(recipe.train.num_groups, recipe.data.group_tokens)
            chosen = compare_layout(chosen, compared, partial(_search, lengths=lengths, request=PlanRequest()))
        request.say("planning the LLM alone")
        chosen = with_text_only(chosen, recipe, lengths)
        if with_hints:
            request.say("trying other batches and numbers of ranks")
            hints = describe_faster_nearby(recipe, lengths, chosen)
    num_steps = recipe.train.num_steps
    run_s = num_steps * chosen.predicted.step_time_s
    cost = RunCost.of_seconds(recipe.cluster, num_steps, run_s, chosen.world_size)
    return PlannedRun(chosen, cost, tuple(hints), allocations[-1] if allocations else None)


def read_or_make_plan(path: Path, settings_changed: Sequence[str], request: PlanRequest) -> Plan:
    """Return the plan of a plan file or of a run's folder; of a recipe, make it with `settings_changed`.

    Raises:
        MmtrainError: nothing can be read there, or the recipe has no plan.
    """
    if is_saved_plan(path):
        return load_plan(path / PLAN_FILE if path.is_dir() else path)
    recipe = load_recipe(path, settings_changed).recipe
    require_costs(recipe)
    return make_plan(recipe, index_recipe(recipe).lengths, request).plan


def is_saved_plan(path: Path) -> bool:
    """Return whether `path` is a plan file or the folder of a run; if not, it is a recipe."""
    return path.is_dir() or path.suffix == ".json"


def plan_for_started_ranks(
    recipe: Recipe,
    lengths: SampleLengths,
    world_size: int,
    hardware: str | None = None,
    recipe_sha256: str | None = None,
) -> Plan:
    """Plan for ranks that have already been started: the plan uses all of them, whatever `parallel.max_gpus` says.

    What `train` and `evaluate` call; see `StartedRanks`. Raises PlanError if nothing fits.
    """
    return make_plan(recipe, lengths, started=StartedRanks(world_size, hardware, recipe_sha256)).plan


def plan_for_each_count(
    recipe: Recipe, lengths: SampleLengths, gpu_counts: Sequence[int], request: PlanRequest
) -> list[ScalingPoint]:
    """Plan the recipe for each number of GPUs; a point without a plan holds the reason.

    Raises:
        PlanError: no number of GPUs has a plan.
    """
    points = []
    for gpus in gpu_counts:
        cluster = recipe.cluster.model_copy(update={"ranks": gpus})
        try:
            with _without_garbage_collection():
                chosen = _search(recipe.model_copy(update={"cluster": cluster}), lengths, request)
            points.append(ScalingPoint(gpus, chosen, ""))
        except PlanError as error:
            points.append(ScalingPoint(gpus, None, str(error)))
    if all(point.plan is None for point in points):
        largest = points[-1]
        raise PlanError(f"--gpus: no plan exists for any of these numbers; for {largest.gpus}: {largest.reason}")
    return points


def compare_layout(chosen: Plan, compared: Recipe, plan_for: Callable[[Recipe], Plan]) -> Plan:
    """Plan `compared`, the recipe with the user's sizes fixed, and put that plan into the ranking of the chosen one."""
    label = DIVIDED_LABEL if compared.parallel.llm.layers_per_chunk else COMPARED_LABEL
    try:
        of_user = plan_for(compared)
    except (PlanError, RecipeError) as error:
        return with_misfit(chosen, label, " ".join(str(error).split()))
    same_recipe = {"recipe_sha256": chosen.recipe_sha256, "alternatives": ()}
    return with_compared(chosen, of_user.model_copy(update=same_recipe), label)


def _search(recipe: Recipe, lengths: SampleLengths, request: PlanRequest) -> Plan:
    """Return the fastest plan alone, without what `make_plan` adds to it."""
    return plan(_formulate(recipe, _with_groups(recipe, lengths, request), lengths, request))


def _with_groups(
    recipe: Recipe, lengths: SampleLengths, request: PlanRequest, started: StartedRanks | None = None
) -> Recipe:
    """Return the recipe with the number and the size of groups, chosen here where it leaves the size to the planner."""
    if recipe.states_groups:
        return recipe
    if recipe.data.seq_len != "auto":
        from mmtrain.data.stream.count_groups import count_groups

        return count_groups(recipe, lengths)
    num_ranks, hardware = resolve_cluster(recipe)
    if started is not None:
        num_ranks, hardware = started.num_ranks, started.hardware or hardware
    request.say("choosing data.seq_len")
    return choose_group_size(
        recipe,
        lengths,
        num_ranks=num_ranks,
        hardware=hardware,
        recipe_sha256=recipe_fingerprint(recipe),
        baseline=request.baseline,
    )


def with_steps_of_epochs(recipe: Recipe, lengths: SampleLengths) -> Recipe:
    """Return a recipe with about the steps of its epochs.

    Raises:
        RecipeError: the planner chooses the size of groups, so that the number of steps depends on the plan.
    """
    if recipe.train.steps is not None:
        return recipe
    if recipe.data.seq_len == "auto":
        raise RecipeError("train.epochs: with data.seq_len: auto each plan has other steps; set train.steps here")
    from mmtrain.data.stream.count_groups import count_groups

    return recipe.with_steps(_with_steps(count_groups(recipe, lengths), lengths).train.num_steps)


def _with_steps(recipe: Recipe, lengths: SampleLengths) -> Recipe:
    """Return the recipe with about the steps of its epochs, which plans do not depend on, but what they cost."""
    if recipe.train.steps is not None:
        return recipe
    from mmtrain.data.stream.count_steps import with_estimated_steps

    return with_estimated_steps(recipe, lengths)


def _formulate(
    written: Recipe, recipe: Recipe, lengths: SampleLengths, request: PlanRequest, started: StartedRanks | None = None
) -> PlanningProblem:
    """Return the problem for the started ranks, or for the recipe's cluster.

    written: the recipe without the groups that were chosen for it, whose fingerprint and settings the plan carries.
    """
    fingerprint, settings = recipe_fingerprint(written), plan_settings(written)
    if started is None:
        num_ranks, hardware = resolve_cluster(recipe)
    else:
        num_ranks, hardware = started.num_ranks, started.hardware or resolve_cluster(recipe)[1]
        fingerprint = started.recipe_sha256 or fingerprint
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"max_gpus": None})})
    problem = formulate_problem(
        recipe,
        lengths,
        world_size=num_ranks,
        hardware=hardware,
        recipe_sha256=fingerprint,
        request=request,
    )
    return replace(problem, settings=settings)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for reference cycles inside this context.

    Planning makes millions of objects that are freed with their last reference, so collections only cost time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
