"""`mmtrain plan`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def plan(
    recipe: RecipeFile,
    overrides: Overrides,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE:nodes=N", help="Plan for a cluster that is not here, like h100:nodes=384."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Plan for each number of GPUs, and compare: 64,128,256.")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="Allow this placement alone.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the best few for three steps on this machine, take the fastest.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="The plan by a rule of thumb, like megatron, beside what would be chosen."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON, for `train --plan FILE`.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the alternatives to show.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="Show every alternative, and why it lost.")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose a parallel plan and show what it beat.

    Without --out nothing is kept: `train` plans for itself, and comes to the same plan.
    """
    import json
    from functools import partial
    from shlex import quote

    from mmtrain.cli.options import require_writable, text_width
    from mmtrain.cli.whatif import cluster_overrides, parse_gpu_counts, plan_for_each_count
    from mmtrain.errors import UserError, writing
    from mmtrain.recipe import is_runnable, load_recipe

    if gpus is not None and (out is not None or measure):
        raise UserError("--gpus compares clusters: it saves no plan (--out) and runs none (--measure)")
    if baseline is not None:
        _require_known(baseline, measure)
    numbers = None if gpus is None else parse_gpu_counts(gpus)
    short = [] if cluster is None else cluster_overrides(cluster)
    short += [] if placement is None else [f"parallel.placement={placement}"]
    settings = load_recipe(recipe, [*short, *overrides]).recipe  # a wrong recipe is told before anything slow starts
    if out is not None:
        require_writable("--out", out, "plan")
    from mmtrain.cli.local_cluster import plan_here, plan_timer
    from mmtrain.cli.planning_bar import planning_bar
    from mmtrain.cli.recipe_index import index_recipe
    from mmtrain.report import plan_table

    lengths = index_recipe(settings).lengths
    with planning_bar() as bar:
        if numbers is not None:
            from mmtrain.report.scaling import scaling_json, scaling_table

            found = plan_for_each_count(
                settings, numbers, partial(plan_here, lengths=lengths, top=1, progress=bar, baseline=baseline)
            )
            told = json.dumps(list(scaling_json(found)), indent=2) if as_json else scaling_table(found, text_width())
            typer.echo(told)
            return
        runs = plan_timer(settings) if measure else None
        chosen = plan_here(settings, lengths, top=top, explain=explain, progress=bar, measure=runs, baseline=baseline)
    if out is not None:
        with writing("--out", out, "plan"):
            chosen.save(out)
    typer.echo(chosen.model_dump_json(indent=2) if as_json else plan_table(chosen, text_width()))
    if out is not None and not as_json:
        settled = " ".join(quote(part) for setting in [*short, *overrides] for part in ("--set", setting))
        which = f"{quote(str(recipe))}{' ' if settled else ''}{settled} --plan {quote(str(out))}"
        typer.echo(f"{out} written. It goes with the same settings:")
        if is_runnable(settings):
            typer.echo(f"  mmtrain train {which}")
        typer.echo(f"  mmtrain report {which} -o plan.html")


def _require_known(baseline: str, measure: bool) -> None:
    from mmtrain.errors import UserError
    from mmtrain.plan.explain.baselines import BASELINES

    if baseline not in BASELINES:
        raise UserError(f"--baseline {baseline}: no such rule; allowed: {', '.join(BASELINES)}")
    if measure:
        raise UserError("--baseline gives the plan of a rule, so --measure has nothing to choose from; leave one out")
