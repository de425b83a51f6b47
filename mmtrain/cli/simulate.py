"""`mmtrain simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def simulate(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Simulate this plan. Default: that of --against, or plan first."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run of this recipe whose trace to hold beside (train.trace).")
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Step to simulate; with --against, those that it recorded.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the timeline, with the run's, as a trace for Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Foretell a step, and compare with a run.

    The plan's program is simulated on the batches that training will see. With --against the errors per stage and for
    the step are printed.
    """
    import json

    from mmtrain.recipe import load, sha256

    settings = load(recipe, overrides).recipe
    from mmtrain.balance import Grouping
    from mmtrain.cli.cluster import cluster_of
    from mmtrain.data import GroupStream, build
    from mmtrain.errors import UserError
    from mmtrain.plan import plan as choose
    from mmtrain.plan.files import load as load_plan
    from mmtrain.plan.files import require_match
    from mmtrain.plan.rehearse import rehearse
    from mmtrain.report.comparison import Trace, compare, comparison_text, overlay
    from mmtrain.runtime.rundir import PLAN, TRACE

    index, sha = build(settings), sha256(settings)
    path = plan or (against / PLAN if against else None)
    if path is None:
        ranks, hardware = cluster_of(settings)
        chosen = choose(settings, index.lengths, world_size=ranks, hardware=hardware, recipe_sha256=sha)
    else:
        chosen = load_plan(path)
        require_match(chosen, sha, chosen.world_size, chosen.hardware)
    trace = Trace.load(against / TRACE) if against else None
    if trace is not None and trace.plan_sha256 != chosen.sha256:
        raise UserError(f"--against {against}: that run did not run {path}; leave --plan out to simulate its own")
    grouping = Grouping.of(settings.data, settings.train.global_batch)
    stream = GroupStream(index.lengths, grouping, settings.train.seed, index.weights)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    timelines = [
        rehearse(
            settings,
            chosen,
            stream.batch(number - 1, settings.train.global_batch, dp, chosen.schedule.num_microbatches),
        )
        for number in (trace.steps if trace else [step])
    ]
    rows, bubbles = compare(timelines, trace), timelines[0].bubble_shares()
    if out is not None:
        out.write_text(json.dumps(overlay(timelines, trace, chosen.sha256)), encoding="utf-8")
    if as_json:
        seconds = [
            {"what": r.what, "predicted_s": r.predicted_s, "measured_s": r.measured_s, "error": r.error} for r in rows
        ]
        typer.echo(json.dumps({"seconds": seconds, "bubbles": bubbles, "steps": trace.steps if trace else [step]}))
    else:
        typer.echo(comparison_text(rows, bubbles))
