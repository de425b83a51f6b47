"""What `mmtrain plan` does with its options: check them, plan, and print."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote

import typer

from mmtrain.api.compared_layout import compare_layout, parse_layout
from mmtrain.api.local_cluster import (
    can_shard_where_planned,
    plan_here,
    plan_timer,
    rare_garbage_collection,
    require_costs,
)
from mmtrain.api.other_clusters import cluster_overrides, parse_gpu_counts, plan_for_each_count
from mmtrain.api.recipe_index import index_recipe
from mmtrain.api.stage_runs import require_one_stage
from mmtrain.balance import SampleLengths
from mmtrain.cli.options import require_writable, text_width
from mmtrain.cli.planning_bar import planning_bar
from mmtrain.errors import UserError, writing
from mmtrain.planning import Plan
from mmtrain.planning.advise.baselines import BASELINES
from mmtrain.planning.space.allocation_watch import Allocation, AllocationWatch
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.whatif.faster_nearby import describe_faster_nearby
from mmtrain.planning.whatif.text_only import with_text_only
from mmtrain.recipe import Recipe, WrittenRecipe, is_runnable, load_recipe, read_recipe
from mmtrain.report import plan_table
from mmtrain.report.run_cost import RunCost, states_costs
from mmtrain.report.scaling import scaling_json, scaling_table


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `mmtrain plan`; its help explains each option."""

    recipe: Path
    overrides: tuple[str, ...]
    cluster: str | None
    gpus: str | None
    placement: str | None
    measure: bool
    cuts: int
    baseline: str | None
    compare: str | None
    out: Path | None
    top: int
    explain: bool
    as_json: bool

    def check(self) -> None:
        """Raise UserError for options that exclude each other, and for a baseline that does not exist."""
        needs_single_plan = self.out is not None or self.measure or self.compare is not None
        if self.gpus is not None and needs_single_plan:
            raise UserError(
                "--gpus compares clusters: leave out --out, --measure and --compare, which need a single plan"
            )
        if self.baseline is None:
            return
        if self.baseline not in BASELINES:
            raise UserError(f"--baseline {self.baseline}: no such baseline; allowed: {', '.join(BASELINES)}")
        if self.measure:
            raise UserError(
                "--baseline returns one plan, so --measure has nothing to choose from; leave one of them out"
            )

    @property
    def gpu_counts(self) -> list[int] | None:
        """The numbers of GPUs to compare. Raises UserError for what is no list of numbers."""
        return None if self.gpus is None else parse_gpu_counts(self.gpus)

    @property
    def settings_changed(self) -> list[str]:
        """What the options change in the recipe, as `KEY=VALUE`; what is set with --set comes last and wins."""
        of_cluster = [] if self.cluster is None else cluster_overrides(self.cluster)
        of_placement = [] if self.placement is None else [f"parallel.placement={self.placement}"]
        return [*of_cluster, *of_placement, *self.overrides]


def run_plan(options: PlanOptions) -> None:
    """Plan for the recipe, or for each of its stages in turn, and print the plans."""
    written = read_recipe(options.recipe, options.overrides)
    if not written.stages or written.chosen_stage is not None:
        _plan_one_run(options)
        return
    _require_no_option_of_one_stage(options, written)
    for number, name in enumerate(written.stages, start=1):
        typer.echo(f"stage {number} of {len(written.stages)}, {name}")
        _plan_one_run(replace(options, overrides=(*options.overrides, f"stage={name}")))


def _require_no_option_of_one_stage(options: PlanOptions, written: WrittenRecipe) -> None:
    values = {
        "--out": options.out,
        "--gpus": options.gpus,
        "--json": options.as_json or None,
    }
    require_one_stage(written, next((name for name, value in values.items() if value is not None), None))


def _plan_one_run(options: PlanOptions) -> None:
    """Report what is wrong with options or recipe before anything slow starts, then plan and print."""
    options.check()
    gpu_counts = options.gpu_counts
    settings_changed = options.settings_changed
    settings = load_recipe(options.recipe, settings_changed).recipe
    compared = _compared_recipe(options, settings_changed, settings)
    if options.out is not None:
        require_writable("--out", options.out, "plan")
    require_costs(settings)
    lengths = index_recipe(settings).lengths
    if gpu_counts is not None:
        typer.echo(_compare_gpu_counts(options, settings, lengths, gpu_counts))
        return
    chosen = _plan_and_print(options, settings, lengths, compared)
    if options.out is not None:
        with writing("--out", options.out, "plan"):
            chosen.save(options.out)
        if not options.as_json:
            typer.echo(_next_commands(settings, options.recipe, settings_changed, options.out))


def _compared_recipe(options: PlanOptions, settings_changed: list[str], settings: Recipe) -> Recipe | None:
    """Return the recipe with the sizes of `--compare` fixed, and no others; None without that option."""
    if options.compare is None:
        return None
    sizes = parse_layout(options.compare, settings.model.llm.layers)
    return load_recipe(options.recipe, [*settings_changed, *sizes]).recipe


def _compare_gpu_counts(options: PlanOptions, settings: Recipe, lengths: SampleLengths, gpu_counts: list[int]) -> str:
    """Plan for each number of GPUs; return the comparison as a table or as JSON."""
    with planning_bar() as progress:
        request = PlanRequest(
            num_alternatives=1,
            baseline=options.baseline,
            num_measured=options.cuts,
            progress=progress,
            announce=progress.announce,
        )
        plan_for: Callable[[Recipe], Plan] = partial(plan_here, lengths=lengths, request=request)
        points = plan_for_each_count(settings, gpu_counts, plan_for)
    return json.dumps(list(scaling_json(points)), indent=2) if options.as_json else scaling_table(points, text_width())


def _plan_and_print(options: PlanOptions, settings: Recipe, lengths: SampleLengths, compared: Recipe | None) -> Plan:
    """Search, measure if that is asked for, and print the plan with its alternatives, hints and cost."""
    allocations: list[Allocation] = []
    hints: list[str] = []
    is_text = not options.as_json
    timer = plan_timer(settings) if options.measure else None
    with planning_bar() as progress, rare_garbage_collection():
        request = PlanRequest(
            num_alternatives=options.top,
            explain=options.explain,
            baseline=options.baseline,
            measure=timer,
            num_measured=options.cuts,
            progress=progress,
            allocation_watch=(
                AllocationWatch(time.perf_counter, allocations.append) if options.explain and is_text else None
            ),
            announce=progress.announce,
        )
        chosen = plan_here(settings, lengths, request=request)
        if compared is not None:
            chosen = compare_layout(chosen, compared, partial(plan_here, lengths=lengths))
        progress.announce("planning the LLM alone")
        chosen = with_text_only(chosen, settings, lengths)
        progress.announce("trying other batches and numbers of ranks")
        if is_text and not options.measure:
            hints = describe_faster_nearby(settings, lengths, chosen, can_shard_where_planned(settings))
    if not is_text:
        typer.echo(chosen.model_dump_json(indent=2))
        return chosen
    typer.echo(plan_table(chosen, text_width(), with_details=options.explain))
    if allocations:
        typer.echo(str(allocations[-1]))
    for hint in hints:
        typer.echo(f"Hint: {hint}")
    if states_costs(settings.cluster):
        num_steps = settings.train.steps
        run_s = num_steps * chosen.predicted.step_time_s
        cost = RunCost.of_seconds(settings.cluster, num_steps, run_s, chosen.world_size)
        typer.echo(f"Cost of {cost.to_text()}.")
    return chosen


def _next_commands(settings: Recipe, recipe: Path, settings_changed: list[str], out: Path) -> str:
    """Write the commands that use the saved plan, with the settings that it was made with."""
    arguments = " ".join(
        [quote(str(recipe)), *(f"--set {quote(setting)}" for setting in settings_changed), f"--plan {quote(str(out))}"]
    )
    lines = [f"{out} written. Use it with the same settings:"]
    if is_runnable(settings):
        lines.append(f"  mmtrain train {arguments}")
    lines.append(f"  mmtrain report {arguments} -o plan.html")
    return "\n".join(lines)
