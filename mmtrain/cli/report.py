"""`mmtrain report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.report.report_contents import ReportContents


def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|RUN|RECIPE", help="Plan file, folder of a run, or recipe.")],
    overrides: Overrides,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan file, for a recipe. Default: make a plan.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write one HTML page.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the plan and a step as PNG, PDF or SVG, by the file's ending."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan or a run as text, HTML page or figure.

    The HTML page is self-contained. For a recipe (optionally with --plan FILE) or a run, the report also shows a step
    simulated on the data; for a run with a trace (train.trace_steps), predicted and measured times side by side.
    """
    import json

    from mmtrain.errors import UserError, writing
    from mmtrain.report.report_contents import report_json

    is_plan = source.suffix.lower() == ".json"
    if plan is not None and (is_plan or source.is_dir()):
        raise UserError(f"report {source}: --plan FILE goes with a recipe, not with a plan or a run")
    if is_plan and overrides:
        raise UserError(f"report {source}: --set changes a recipe; give the recipe, and the plan as --plan {source}")
    contents = _contents_of_plan(source) if is_plan else _contents_with_steps(source, plan, overrides)
    if out is not None:
        from mmtrain.report.html import html_page

        with writing("--out", out, "page"):
            out.write_text(html_page(contents), encoding="utf-8")
    if png is not None:
        from mmtrain.report.figure_files import report_drawings, save_drawings

        save_drawings(report_drawings(contents), png)
    if as_json:
        typer.echo(json.dumps(report_json(contents), indent=2))
    elif out is None and png is None:
        from mmtrain.cli.options import text_width
        from mmtrain.report.terminal import report_text

        typer.echo(report_text(contents, text_width()))
    else:
        typer.echo("\n".join(f"{path} written" for path in (out, png) if path is not None))


def _contents_of_plan(path: Path) -> "ReportContents":
    """Load a plan file; its memory limit is that of the hardware preset."""
    from mmtrain.costs import preset
    from mmtrain.costs.hardware import GIB
    from mmtrain.planning.artifact.plan_files import load_plan
    from mmtrain.report.report_contents import ReportContents

    plan = load_plan(path)
    return ReportContents(path.stem, plan, preset(plan.hardware).memory_bytes / GIB)


def _contents_with_steps(source: Path, plan: Path | None, overrides: list[str]) -> "ReportContents":
    """Load a run, or a recipe with its plan, and simulate a step on its data."""
    import time

    from mmtrain.api.simulated_steps import simulate_steps
    from mmtrain.balance import Grouping
    from mmtrain.costs import machine_for
    from mmtrain.costs.hardware import GIB
    from mmtrain.data.stream.recipe_summaries import compare_grouping_methods
    from mmtrain.planning.artifact.plan_files import with_planned_groups
    from mmtrain.recipe import load_recipe
    from mmtrain.report import read_metrics
    from mmtrain.report.comparison import comparison_rows
    from mmtrain.report.report_contents import ReportContents
    from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE

    is_run = source.is_dir()
    settings = load_recipe(source / RECIPE_FILE if is_run else source, overrides).recipe
    trace_path = source / TRACE_FILE if is_run and (source / TRACE_FILE).exists() else None
    simulated = simulate_steps(settings, source / PLAN_FILE if is_run else plan, trace_path)
    settings = with_planned_groups(settings, simulated.plan)
    grouping = Grouping.of(settings.data, settings.train.num_groups)
    scores = compare_grouping_methods(
        simulated.index,
        grouping,
        settings.train.seed,
        simulated.plan.units["llm"].dp,
        time.perf_counter,
    )
    return ReportContents(
        name=source.resolve().name if is_run else settings.name,
        plan=simulated.plan,
        memory_limit_gib=machine_for(settings, simulated.plan.hardware).memory_bytes / GIB,
        simulated=simulated.timelines,
        comparison=comparison_rows(simulated.timelines, simulated.trace),
        grouping_scores=scores,
        grouping_method=grouping.method,
        trace=simulated.trace,
        metrics=read_metrics(source) if is_run else None,
        recipe=settings,
    )
