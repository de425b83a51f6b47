"""What to plan for where the recipe leaves it open: this machine."""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from mmtrain.recipe import Recipe, recipe_fingerprint

if TYPE_CHECKING:
    from mmtrain.balance import SampleLengths
    from mmtrain.plan import Plan
    from mmtrain.plan.search.best_first_search import Progress

MOMENT_S = 1.0  # a search that is over by then shows no bar
PATIENCE_S = 10.0  # and where no bar can be drawn, says nothing before
TOLD = 4  # lines where no bar can be drawn
MANY = 100_000  # objects made between two looks for cycles: planning makes millions, and hardly a cycle


def cluster_of(recipe: Recipe) -> tuple[int, str]:
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
def _seldom_collected() -> Iterator[None]:
    """Make Python look for cycles of objects seldom."""
    before = gc.get_threshold()
    gc.set_threshold(MANY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_seldom_collected()
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

    ranks, hardware = cluster_of(recipe)
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


@_seldom_collected()
def plan_for_started(
    recipe: Recipe, lengths: "SampleLengths", *, world_size: int, hardware: str, recipe_sha256: str
) -> "Plan":
    """The plan for ranks that have been started: all of them have a part in it."""
    from mmtrain.plan.planner import plan

    return plan(_on_all_ranks(recipe), lengths, world_size=world_size, hardware=hardware, recipe_sha256=recipe_sha256)


def _on_all_ranks(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"max_gpus": None})})


def measuring(recipe: Recipe) -> "Callable[[Plan], float]":
    """What `--measure` decides by: a few steps of the plan here. Each is told; one that breaks takes for ever."""
    from mmtrain.cli.recipe_index import tell
    from mmtrain.errors import RunError
    from mmtrain.recipe import require_runnable
    from mmtrain.report.plain_text import seconds_text
    from mmtrain.report.scaling import mesh_text

    require_runnable(recipe, "plan --measure")
    from mmtrain.runtime.profiling.measure_plans import measure_step_time

    def seconds(plan: "Plan") -> float:
        try:
            found = measure_step_time(recipe, plan)
        except RunError as error:
            tell(f"{mesh_text(plan)}: could not be run: {str(error).splitlines()[0]}")
            return math.inf
        predicted = seconds_text(plan.predicted.step_time_s)
        tell(f"{mesh_text(plan)}: {seconds_text(found)} a step, predicted {predicted}")
        return found

    return seconds


@contextmanager
def planning_bar() -> Iterator["Progress"]:
    """Shows on stderr how far a search is that takes longer than a moment: a bar on a terminal, else a few lines."""
    with ExitStack() as shown:
        bar = _Bar(shown)
        yield bar.told


class _Bar:
    def __init__(self, shown: ExitStack) -> None:
        self._shown, self._done = shown, 0
        self._began: float | None = None
        self._bar: Any = None

    def told(self, done: int, total: int) -> None:
        """Candidate `done` of `total` is settled; a new search begins at 0."""
        before, self._done = self._done, done
        if self._began is None or done < before:
            self._shown.close()
            self._began, self._bar = time.monotonic(), None
        passed = time.monotonic() - self._began
        if not sys.stderr.isatty():
            if passed > PATIENCE_S and done * TOLD // total > before * TOLD // total:
                print(f"planning: {done * 100 // total}%", file=sys.stderr, flush=True)
            return
        if passed < MOMENT_S:
            return
        if self._bar is None:
            self._bar = self._shown.enter_context(typer.progressbar(length=total, label="planning", file=sys.stderr))
            before = 0
        self._bar.update(done - before)
