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

    The plan's program is simulated on the batches that training will see. Beside a run's trace the errors per stage
    and for the step are printed.
    """
    import json

    from mmtrain.errors import UserError
    from mmtrain.recipe import load

    settings = load(recipe, overrides).recipe
    from mmtrain.cli.rehearsal import rehearsal
    from mmtrain.report.comparison import compare, comparison_text, overlay
    from mmtrain.runtime.rundir import PLAN, TRACE

    found = rehearsal(
        settings, plan or (against / PLAN if against else None), against / TRACE if against else None, (step,)
    )
    rows, bubbles = compare(found.timelines, found.trace), found.timelines[0].bubble_shares()
    if out is not None:
        try:
            out.write_text(json.dumps(overlay(found.timelines, found.trace, found.plan.sha256)), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {out}: cannot write the trace: {error.strerror}") from None
    if as_json:
        seconds = [
            {"what": r.what, "predicted_s": r.predicted_s, "measured_s": r.measured_s, "error": r.error} for r in rows
        ]
        typer.echo(json.dumps({"seconds": seconds, "bubbles": bubbles, "steps": found.steps}))
    else:
        typer.echo(comparison_text(rows, bubbles))
