"""`mmtrain simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.cli.simulated_steps import SimulatedSteps


def simulate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|PLAN|RUN", help="A recipe, a plan's JSON with --against, or the folder of a run."
        ),
    ],
    overrides: Overrides,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Simulate this plan of a recipe. Default: that of --against, or plan first."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run of it whose trace to hold beside (train.trace).")
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Step to simulate; with --against, those that it recorded.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the timeline, with the run's, as a trace for Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Foretell a step, say what it waits for, and compare with a run.

    The plan's program is simulated on the batches that training will see. Beside a run's trace the errors per stage
    and for the step are printed. What a tensor-parallel stage takes includes its collectives, foretold and measured.
    """
    import json

    from mmtrain.cli.options import text_width
    from mmtrain.errors import writing
    from mmtrain.report.comparison import comparison_rows, comparison_text, critical_path_rows, overlay_trace

    found = _simulate_source(source, overrides, plan, against, step)
    rows, path = comparison_rows(found.timelines, found.trace), critical_path_rows(found.timelines)
    bubbles = found.timelines[0].bubble_shares()
    if out is not None:
        with writing("--out", out, "trace"):
            out.write_text(json.dumps(overlay_trace(found.timelines, found.trace, found.plan.sha256)), encoding="utf-8")
    if as_json:
        told = {
            "seconds": [row.to_json() for row in rows],
            "bubbles": bubbles,
            "steps": found.steps,
            "critical": [row.to_json() for row in path],
        }
        typer.echo(json.dumps({**told, "critical_path": _path_json(found)}))
    else:
        typer.echo(comparison_text(rows, bubbles, path, text_width()))


def _simulate_source(
    source: Path, overrides: list[str], plan: Path | None, against: Path | None, step: int
) -> "SimulatedSteps":
    """Take recipe, plan and trace from where they are.

    Raises UserError for what does not go together.
    """
    from mmtrain.cli.simulated_steps import simulate_steps
    from mmtrain.errors import UserError
    from mmtrain.recipe import load_recipe
    from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE

    is_plan, is_run = source.suffix.lower() == ".json", source.is_dir()
    if is_plan and against is None:
        raise UserError(
            f"simulate {source}: a plan does not say on what data; give its recipe (RECIPE --plan {source}), "
            "or a run of it (--against RUN)"
        )
    if plan is not None and (is_plan or is_run):
        raise UserError(f"simulate {source}: --plan FILE belongs to a recipe; a plan and a run come by themselves")
    if is_run and against is not None:
        raise UserError(f"simulate {source}: is a run, and held beside its own trace; give --against with a recipe")
    run = source if is_run else against
    recipe = load_recipe(run / RECIPE_FILE if run is not None and (is_plan or is_run) else source, overrides).recipe
    chosen = source if is_plan else plan or (run / PLAN_FILE if run else None)
    return simulate_steps(recipe, chosen, run / TRACE_FILE if run else None, (step,))


def _path_json(found: "SimulatedSteps") -> list[dict[str, Any]]:
    """The critical path of the first simulated step, action by action."""
    from mmtrain.program import action_to_text

    return [
        {
            "action": action_to_text(span.action),
            "rank": span.rank,
            "start_s": span.start_s,
            "seconds": span.duration_s,
        }
        for span in found.timelines[0].critical_path
    ]
