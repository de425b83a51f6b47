"""`mmtrain report`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides


def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|RUN|RECIPE", help="Plan file, folder of a run, or recipe.")],
    overrides: Overrides,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A second run, to compare with the first one.", show_default=False),
    ] = None,
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
    """Show a plan or run, or what differs between two runs.

    The HTML page is self-contained. For a recipe (optionally with --plan FILE) or a run, the report also shows a step
    simulated on the data; for a run with a trace (train.trace_steps), predicted and measured times side by side. The
    stages of a run follow one another. Of two runs it shows what differs: settings, plans, figures, and loss at the
    same steps.
    """
    import json

    from mmtrain.api.report_sources import report_contents
    from mmtrain.errors import UserError, writing
    from mmtrain.report.report_contents import report_json

    if other is not None:
        if plan is not None or overrides or png is not None:
            raise UserError("report A B compares two runs: leave out --plan, --set and --png")
        _compare(source, other, out, as_json)
        return
    contents = report_contents(source, plan, overrides)
    if out is not None:
        from mmtrain.report.html import html_page

        with writing("--out", out, "page"):
            out.write_text(html_page(*contents), encoding="utf-8")
    if png is not None:
        from mmtrain.report.figure_files import report_drawings, save_drawings

        if len(contents) > 1:
            raise UserError(f"--png: {source} has {len(contents)} stages; name the folder of one of them")
        save_drawings(report_drawings(contents[0]), png)
    if as_json:
        pages = [report_json(of_stage) for of_stage in contents]
        typer.echo(json.dumps(pages[0] if len(pages) == 1 else {"stages": pages}, indent=2))
    elif out is None and png is None:
        from mmtrain.cli.options import text_width
        from mmtrain.report.terminal import report_text

        for of_stage in contents:
            if len(contents) > 1:
                typer.echo(of_stage.name)
            typer.echo(report_text(of_stage, text_width()))
    else:
        typer.echo("\n".join(f"{path} written" for path in (out, png) if path is not None))


def _compare(first: Path, second: Path, out: Path | None, as_json: bool) -> None:
    """Show what differs between two runs."""
    import json

    from mmtrain.api.report_sources import run_records
    from mmtrain.cli.options import text_width
    from mmtrain.errors import writing
    from mmtrain.report.run_difference import run_difference_html, run_difference_json, run_difference_text

    runs = run_records(first, second)
    if out is not None:
        with writing("--out", out, "page"):
            out.write_text(run_difference_html(*runs), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(run_difference_json(*runs), indent=2))
    elif out is None:
        typer.echo(run_difference_text(*runs, text_width()), nl=False)
    else:
        typer.echo(f"{out} written")
