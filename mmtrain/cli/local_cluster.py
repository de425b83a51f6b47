"""What to plan for where the recipe leaves it open: this machine."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmtrain.recipe import Recipe, recipe_fingerprint

if TYPE_CHECKING:
    from mmtrain.balance import SampleLengths
    from mmtrain.plan import Plan
    from mmtrain.plan.search.best_first_search import Progress

GC_THRESHOLD_OBJECTS = 100_000  # objects made between two looks for cycles: planning makes millions, and hardly a cycle


def resolve_cluster(recipe: Recipe) -> tuple[int, str]:
    """Number of ranks and name of the hardware preset, the recipe's or this machine's.

    torch is asked, and so loaded, only where the recipe does not say: planning for a cluster elsewhere stays instant.
    Raises `PlanError` for a GPU without a preset.
    """
    cluster = recipe.cluster
    ranks, hardware = cluster.ranks, cluster.hardware
    if ranks is None or hardware == "auto":
        import torch

        from mmtrain.runtime.world import detect_hardware

        if hardware == "auto":
            hardware = detect_hardware()
        if ranks is None:
            # Two processes are the least that can cooperate.
            ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return min(ranks, recipe.parallel.max_gpus or ranks), hardware


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Make Python look for cycles of objects seldom."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_garbage_collection()
def plan_here(
    recipe: Recipe,
    lengths: "SampleLengths",
    num_ranks: int | None = None,
    top: int = 5,
    explain: bool = False,
    progress: "Progress | None" = None,
    measure: "Callable[[Plan], float] | None" = None,
    baseline: str | None = None,
) -> "Plan":
    """The plan for the recipe's cluster, or for this machine; on exactly `num_ranks` where their number is given."""
    from mmtrain.plan.planner import plan

    ranks, hardware = resolve_cluster(recipe)
    return plan(
        recipe if num_ranks is None else _on_all_ranks(recipe),
        lengths,
        world_size=num_ranks or ranks,
        hardware=hardware,
        recipe_sha256=recipe_fingerprint(recipe),
        top=top,
        explain=explain,
        progress=progress,
        measure=measure,
        baseline=baseline,
    )


@_rare_garbage_collection()
def plan_for_started_ranks(
    recipe: Recipe, lengths: "SampleLengths", *, world_size: int, hardware: str, recipe_sha256: str
) -> "Plan":
    """The plan for ranks that have been started: all of them have a part in it."""
    from mmtrain.plan.planner import plan

    return plan(_on_all_ranks(recipe), lengths, world_size=world_size, hardware=hardware, recipe_sha256=recipe_sha256)


def _on_all_ranks(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"max_gpus": None})})


def plan_timer(recipe: Recipe) -> "Callable[[Plan], float]":
    """What `--measure` decides by: a few steps of the plan here. Each is told; one that breaks takes for ever."""
    from mmtrain.cli.recipe_index import print_note
    from mmtrain.errors import RunError
    from mmtrain.recipe import require_runnable
    from mmtrain.report.plain_text import seconds_text
    from mmtrain.report.scaling import layout_text

    require_runnable(recipe, "plan --measure")
    from mmtrain.runtime.profiling.measure_plans import measure_step_time

    def seconds(plan: "Plan") -> float:
        try:
            found = measure_step_time(recipe, plan)
        except RunError as error:
            print_note(f"{layout_text(plan)}: could not be run: {str(error).splitlines()[0]}")
            return math.inf
        predicted = seconds_text(plan.predicted.step_time_s)
        print_note(f"{layout_text(plan)}: {seconds_text(found)} a step, predicted {predicted}")
        return found

    return seconds
