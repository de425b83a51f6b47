"""What `mmtrain report` shows: a plan, a recipe with a simulated step, a run with its stages, and two runs compared."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmtrain.api.simulated_steps import simulate_steps
from mmtrain.api.stage_runs import stage_folders
from mmtrain.balance import Grouping
from mmtrain.costs import machine_for, preset
from mmtrain.costs.hardware import GIB
from mmtrain.data.stream.recipe_summaries import compare_grouping_methods
from mmtrain.errors import UserError
from mmtrain.planning import load_plan
from mmtrain.planning.artifact.plan_files import with_planned_groups
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.report.comparison import comparison_rows
from mmtrain.report.report_contents import ReportContents
from mmtrain.report.run_difference import RunRecord
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE, load_run_recipe


def report_contents(source: Path, plan: Path | None = None, overrides: Sequence[str] = ()) -> list[ReportContents]:
    """Return what a report shows of a plan file, a recipe or a run's folder: one item, or one for each stage of a run.

    Args:
        source: a plan file (.json), a folder, else a recipe.
        plan: the plan file of a recipe; by default one is made.
        overrides: settings of the recipe, as in `--set`.

    Raises:
        UserError: the arguments contradict each other, or name something that cannot be read.
    """
    is_plan = source.suffix.lower() == ".json"
    if plan is not None and (is_plan or source.is_dir()):
        raise UserError(f"report {source}: --plan FILE goes with a recipe, not with a plan or a run")
    if is_plan and overrides:
        raise UserError(f"report {source}: --set changes a recipe; give the recipe, and the plan as --plan {source}")
    if is_plan:
        return [_contents_of_plan(source)]
    stages = stage_folders(source) if source.is_dir() else []
    if not stages:
        return [_contents_with_steps(source, plan, overrides)]
    contents = [_contents_with_steps(stage, None, overrides) for stage in stages]
    name = source.resolve().name
    return [replace(of_stage, name=f"{name}: stage {of_stage.name}") for of_stage in contents]


def run_record(folder: Path) -> RunRecord:
    """Read a run to compare it with another one.

    Raises:
        UserError: the folder is none of a run, or of several stages.
    """
    stages = stage_folders(folder)
    if stages:
        raise UserError(f"report {folder}: it has stages; compare one of them: {', '.join(map(str, stages))}")
    name = folder.resolve().name
    return RunRecord(name, load_run_recipe(folder), load_plan(folder / PLAN_FILE), read_metrics(folder))


def run_records(first: Path, second: Path) -> tuple[RunRecord, RunRecord]:
    """Read two runs, whose names are those of their folders, or their paths where these are the same."""
    records = run_record(first), run_record(second)
    if records[0].name != records[1].name:
        return records
    return replace(records[0], name=str(first)), replace(records[1], name=str(second))


def _contents_of_plan(path: Path) -> ReportContents:
    """Load a plan file; its memory limit is that of the hardware preset."""
    plan = load_plan(path)
    return ReportContents(path.stem, plan, preset(plan.hardware).memory_bytes / GIB)


def _contents_with_steps(source: Path, plan: Path | None, overrides: Sequence[str]) -> ReportContents:
    """Load a run, or a recipe with its plan, and simulate a step on its data."""
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
