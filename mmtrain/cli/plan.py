"""`mmtrain plan`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.plan import Plan
    from mmtrain.recipe import Recipe


def plan(
    recipe: RecipeFile,
    overrides: Overrides,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE:nodes=N", help="Plan for another cluster, for example h100:nodes=384."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Plan for several numbers of GPUs and compare, for example 64,128,256."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Search one only: unified, disaggregated, colocated or replicated."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run the best plans for three steps on this machine and choose the fastest."),
    ] = False,
    cuts: Annotated[
        int,
        typer.Option(
            min=1, help="With --measure: plans to run: the best sizes, other partitions of them, then further sizes."
        ),
    ] = 12,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="On CPUs: measure this machine for two seconds, write its costs, and plan with them."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Return the plan of a rule of thumb, for example megatron, and compare."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Put a layout of yours into the ranking, with where it loses time: 'tp=8,pp=8,vpp=3', or arguments of "
            "Megatron-LM.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON for `train --plan FILE`.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of alternatives to show.")] = 5,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show every alternative, why it is slower, how evenly each fills its ranks, and what the choice is "
            "sensitive to.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search the fastest parallel plan and show the alternatives.

    The plan says where every layer runs, which layers are recomputed, and in what order each rank works. `train` makes
    the same plan by itself; use --out to save and reuse it.
    """
    import time
    from dataclasses import replace
    from functools import partial

    from mmtrain.cli.stage_runs import require_one_stage
    from mmtrain.recipe import read_recipe

    written = read_recipe(recipe, overrides)
    names = written.stages
    if names and written.chosen_stage is None:
        options = {"--out": out, "--gpus": gpus, "--calibrate": calibrate, "--json": as_json or None}
        single = next((option for option, value in options.items() if value is not None), None)
        require_one_stage(written, single)
        for i, name in enumerate(names, start=1):
            typer.echo(f"stage {i} of {len(names)}, {name}")
            settings_of_stage = [*overrides, f"stage={name}"]
            plan(
                recipe,
                settings_of_stage,
                cluster,
                None,
                placement,
                measure,
                cuts,
                None,
                baseline,
                compare,
                None,
                top,
                explain,
            )
        return

    from mmtrain.cli.options import require_writable, text_width
    from mmtrain.cli.whatif import cluster_overrides, parse_gpu_counts
    from mmtrain.errors import UserError, writing
    from mmtrain.recipe import load_recipe

    if gpus is not None and (out is not None or measure or compare is not None):
        raise UserError("--gpus compares clusters: leave out --out, --measure and --compare, which need a single plan")
    if baseline is not None:
        _require_baseline(baseline, measure)
    gpu_counts = None if gpus is None else parse_gpu_counts(gpus)
    settings_changed = [] if cluster is None else cluster_overrides(cluster)
    if placement is not None:
        settings_changed.append(f"parallel.placement={placement}")
    settings_changed += overrides
    settings = load_recipe(recipe, settings_changed).recipe  # report a wrong recipe before anything slow starts
    compared = None if compare is None else _compared_recipe(recipe, settings_changed, compare, settings)
    if calibrate is not None:
        require_writable("--calibrate", calibrate, "cost table")
    if out is not None:
        require_writable("--out", out, "plan")
    from mmtrain.cli.local_cluster import plan_here, plan_timer, require_costs
    from mmtrain.cli.planning_bar import planning_bar
    from mmtrain.cli.recipe_index import index_recipe
    from mmtrain.plan.explain.faster_nearby import describe_faster_nearby
    from mmtrain.plan.explain.text_only import with_text_only
    from mmtrain.plan.problem import PlanRequest
    from mmtrain.plan.search.allocation_watch import Allocation, AllocationWatch
    from mmtrain.report import plan_table
    from mmtrain.report.run_cost import RunCost, states_costs

    require_costs(settings)
    lengths = index_recipe(settings).lengths
    if calibrate is not None:
        from mmtrain.cli.calibrated_costs import calibrated_setting

        settings_changed.append(calibrated_setting(settings, calibrate))
        settings = load_recipe(recipe, settings_changed).recipe
        compared = None if compare is None else _compared_recipe(recipe, settings_changed, compare, settings)
    timer = plan_timer(settings) if measure else None
    allocations: list[Allocation] = []
    with planning_bar() as progress:
        watch = AllocationWatch(time.perf_counter, allocations.append) if explain and not as_json else None
        request = PlanRequest(top, explain, baseline, timer, cuts, progress, watch, progress.announce, sensitivity=True)
        if gpu_counts is not None:
            one_line = replace(request, num_alternatives=1, explain=False, allocation_watch=None, sensitivity=False)
            plan_for = partial(plan_here, lengths=lengths, request=one_line)
            typer.echo(_compare_gpu_counts(settings, gpu_counts, plan_for, as_json))
            return
        chosen = plan_here(settings, lengths, request=request)
        if compared is not None:
            from mmtrain.cli.compared_layout import compare_layout

            chosen = compare_layout(chosen, compared, partial(plan_here, lengths=lengths))
        progress.announce("planning the LLM alone")
        chosen = with_text_only(chosen, settings, lengths)
        progress.announce("trying other batches and numbers of ranks")
        hints = [] if as_json or measure else describe_faster_nearby(settings, lengths, chosen)
    if out is not None:
        with writing("--out", out, "plan"):
            chosen.save(out)
    typer.echo(chosen.model_dump_json(indent=2) if as_json else plan_table(chosen, text_width(), with_details=explain))
    if allocations:
        typer.echo(str(allocations[-1]))
    for hint in hints:
        typer.echo(f"Hint: {hint}")
    if not as_json and states_costs(settings.cluster):
        num_steps = settings.train.steps
        run_s = num_steps * chosen.predicted.step_time_s
        cost = RunCost.of_seconds(settings.cluster, num_steps, run_s, chosen.world_size)
        typer.echo(f"Cost of {cost.to_text()}.")
    if out is not None and not as_json:
        typer.echo(_next_commands(settings, recipe, settings_changed, out))


def _compared_recipe(path: Path, settings_changed: list[str], layout: str, settings: "Recipe") -> "Recipe":
    """Return the recipe with the sizes of `--compare` fixed, and no others."""
    from mmtrain.cli.compared_layout import parse_layout
    from mmtrain.recipe import load_recipe

    sizes = parse_layout(layout, settings.model.llm.layers)
    return load_recipe(path, [*settings_changed, *sizes]).recipe


def _require_baseline(baseline: str, measure: bool) -> None:
    """Raise UserError for a baseline that does not exist or that --measure cannot go with."""
    from mmtrain.errors import UserError
    from mmtrain.plan.explain.baselines import BASELINES

    if baseline not in BASELINES:
        raise UserError(f"--baseline {baseline}: no such baseline; allowed: {', '.join(BASELINES)}")
    if measure:
        raise UserError("--baseline returns one plan, so --measure has nothing to choose from; leave one of them out")


def _compare_gpu_counts(
    settings: "Recipe", gpu_counts: list[int], plan_for: "Callable[[Recipe], Plan]", as_json: bool
) -> str:
    """Plan for each number of GPUs; return the comparison as a table or as JSON."""
    import json

    from mmtrain.cli.options import text_width
    from mmtrain.cli.whatif import plan_for_each_count
    from mmtrain.report.scaling import scaling_json, scaling_table

    points = plan_for_each_count(settings, gpu_counts, plan_for)
    return json.dumps(list(scaling_json(points)), indent=2) if as_json else scaling_table(points, text_width())


def _next_commands(settings: "Recipe", recipe: Path, settings_changed: list[str], out: Path) -> str:
    """Write the commands that use the saved plan, with the settings that it was made with."""
    from shlex import quote

    from mmtrain.recipe import is_runnable

    arguments = " ".join(
        [quote(str(recipe)), *(f"--set {quote(setting)}" for setting in settings_changed), f"--plan {quote(str(out))}"]
    )
    lines = [f"{out} written. Use it with the same settings:"]
    if is_runnable(settings):
        lines.append(f"  mmtrain train {arguments}")
    lines.append(f"  mmtrain report {arguments} -o plan.html")
    return "\n".join(lines)
