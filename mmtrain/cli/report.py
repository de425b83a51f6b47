"""`mmtrain report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.report.report_contents import ReportContents


def report(
    source: Annotated[
        Path, typer.Argument(metavar="PLAN|RUN|RECIPE", help="A plan's JSON, the folder of a run, or a recipe.")
    ],
    overrides: Overrides,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The plan to show of a recipe. Default: plan first.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it as one HTML page.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw plan and step for a paper: PNG, or PDF or SVG by the ending."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan or a run: in the terminal, as a page, as a picture.

    The page loads nothing from elsewhere. A plan by itself shows what it says; with its recipe (RECIPE --plan FILE)
    also its step, simulated on the data. Of a run that recorded steps (train.trace) predicted stands beside measured.
    """
    import json

    from mmtrain.errors import UserError, writing
    from mmtrain.report.report_contents import report_json

    is_plan = source.suffix.lower() == ".json"
    if plan is not None and (is_plan or source.is_dir()):
        raise UserError(f"report {source}: --plan FILE belongs to a recipe; a plan and a run come by themselves")
    if is_plan and overrides:
        raise UserError(f"report {source}: --set changes a recipe; give that, and the plan as --plan {source}")
    contents = _contents_of_plan(source) if is_plan else _contents_with_steps(source, plan, overrides)
    if out is not None:
        from mmtrain.report.html import html_page

        with writing("--out", out, "page"):
            out.write_text(html_page(contents), encoding="utf-8")
    if png is not None:
        from mmtrain.report.figure_files import save_drawings
        from mmtrain.report.figures import report_drawings

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
    """A plan by itself; the limit of its memory is that of the hardware's preset."""
    from mmtrain.costs import preset
    from mmtrain.costs.hardware import GIB
    from mmtrain.plan.artifact.plan_files import load_plan
    from mmtrain.report.report_contents import ReportContents

    plan = load_plan(path)
    return ReportContents(path.stem, plan, preset(plan.hardware).memory_bytes / GIB)


def _contents_with_steps(source: Path, plan: Path | None, overrides: list[str]) -> "ReportContents":
    """A run, or a recipe with its plan: with a step simulated on its data."""
    import time

    from mmtrain.balance import Grouping
    from mmtrain.cli.simulated_steps import simulate_steps
    from mmtrain.costs import machine_for
    from mmtrain.costs.hardware import GIB
    from mmtrain.data.stream.compare_grouping import compare_grouping_methods
    from mmtrain.recipe import load_recipe
    from mmtrain.report import read_metrics
    from mmtrain.report.comparison import comparison_rows
    from mmtrain.report.report_contents import ReportContents
    from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE

    is_run = source.is_dir()
    settings = load_recipe(source / RECIPE_FILE if is_run else source, overrides).recipe
    recorded = source / TRACE_FILE if is_run and (source / TRACE_FILE).exists() else None
    found = simulate_steps(settings, source / PLAN_FILE if is_run else plan, recorded)
    grouping = Grouping.of(settings.data, settings.train.global_batch)
    scores = compare_grouping_methods(
        found.index.lengths,
        found.index.weights,
        grouping,
        settings.train.seed,
        found.plan.units["llm"].dp,
        time.perf_counter,
    )
    return ReportContents(
        name=source.resolve().name if is_run else settings.name,
        plan=found.plan,
        memory_limit_gib=machine_for(settings, found.plan.hardware).memory_bytes / GIB,
        simulated=found.timelines,
        comparison=comparison_rows(found.timelines, found.trace),
        grouping_scores=scores,
        grouping_method=grouping.method,
        trace=found.trace,
        metrics=read_metrics(source) if is_run else None,
    )
