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
    from mmtrain.costs.hardware import GIB
    from mmtrain.data import GroupStream, build
    from mmtrain.data.compare import compare_methods
    from mmtrain.errors import UserError
    from mmtrain.plan.files import load as load_plan
    from mmtrain.plan.files import require_match
    from mmtrain.plan.rehearse import rehearse
    from mmtrain.plan.story import machine_for
    from mmtrain.recipe import load, sha256
    from mmtrain.report import read_metrics
    from mmtrain.report.comparison import Trace, compare
    from mmtrain.report.html import Contents, page
    from mmtrain.runtime.rundir import PLAN, RECIPE, TRACE

    is_run = source.is_dir()
    if is_run == (plan is not None):
        raise UserError(f"report {source}: a run's folder comes without --plan, a recipe with --plan FILE")
    settings = load(source / RECIPE if is_run else source, overrides).recipe
    chosen = load_plan(plan or source / PLAN)
    require_match(chosen, sha256(settings), chosen.world_size, chosen.hardware)
    trace = Trace.load(source / TRACE) if is_run and (source / TRACE).exists() else None
    if trace is not None and trace.plan_sha256 != chosen.sha256:
        raise UserError(f"{source / TRACE}: recorded with another plan than {source / PLAN}")
    index = build(settings)
    grouping = Grouping.of(settings.data, settings.train.global_batch)
    stream = GroupStream(index.lengths, grouping, settings.train.seed, index.weights)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    counts = chosen.schedule.num_microbatches
    simulated = [
        rehearse(settings, chosen, stream.batch(step - 1, settings.train.global_batch, dp, counts))
        for step in (trace.steps if trace else [1])
    ]
    scores = compare_methods(index.lengths, index.weights, grouping, settings.train.seed, dp["llm"], time.perf_counter)
    contents = Contents(
        name=source.resolve().name,
        plan=chosen,
        simulated=simulated,
        rows=compare(simulated, trace),
        memory_limit_gib=machine_for(settings, chosen.hardware).memory_bytes / GIB,
        scores=scores,
        chosen=grouping.method,
        trace=trace,
        metrics=read_metrics(source) if is_run else None,
    )
    try:
        out.write_text(page(contents), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot write the page: {error.strerror}") from None
    typer.echo(f"{out} written")
