"""`mmtrain report`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import Overrides


def report(
    source: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="The folder of a run, or a recipe with --plan.")],
    overrides: Overrides,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="The plan to show of a recipe.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one page about a plan or a run.

    The page loads nothing from elsewhere. Of a run that recorded steps (train.trace) it shows predicted beside
    measured.
    """
    import time

    from mmtrain.balance import Grouping
    from mmtrain.cli.rehearsal import rehearsal
    from mmtrain.costs.hardware import GIB
    from mmtrain.data.compare import compare_methods
    from mmtrain.errors import UserError
    from mmtrain.plan.story import machine_for
    from mmtrain.recipe import load
    from mmtrain.report import read_metrics
    from mmtrain.report.comparison import compare
    from mmtrain.report.html import Contents, page
    from mmtrain.runtime.rundir import PLAN, RECIPE, TRACE

    is_run = source.is_dir()
    if is_run == (plan is not None):
        raise UserError(f"report {source}: a run's folder comes without --plan, a recipe with --plan FILE")
    settings = load(source / RECIPE if is_run else source, overrides).recipe
    recorded = source / TRACE if is_run and (source / TRACE).exists() else None
    found = rehearsal(settings, plan or source / PLAN, recorded)
    grouping = Grouping.of(settings.data, settings.train.global_batch)
    scores = compare_methods(
        found.index.lengths,
        found.index.weights,
        grouping,
        settings.train.seed,
        found.plan.units["llm"].dp,
        time.perf_counter,
    )
    contents = Contents(
        name=source.resolve().name,
        plan=found.plan,
        simulated=found.timelines,
        rows=compare(found.timelines, found.trace),
        memory_limit_gib=machine_for(settings, found.plan.hardware).memory_bytes / GIB,
        scores=scores,
        chosen=grouping.method,
        trace=found.trace,
        metrics=read_metrics(source) if is_run else None,
    )
    try:
        out.write_text(page(contents), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot write the page: {error.strerror}") from None
    typer.echo(f"{out} written")
