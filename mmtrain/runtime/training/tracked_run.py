"""What trackers hear of a run before its first step, without credentials."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe, dump_recipe
from mmtrain.recipe.settings.base import flatten
from mmtrain.redaction import Redactor
from mmtrain.report import plan_table, read_metrics
from mmtrain.report.report_contents import steady_medians
from mmtrain.report.runlog import run_summary
from mmtrain.report.trackers import TrackedRun, TrackerFeeds, open_trackers
from mmtrain.report.trackers.git_state import read_git_state
from mmtrain.runtime.training.rank_run import RankRun
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.version import __version__


def open_run_trackers(run: RankRun, records: RunRecords) -> TrackerFeeds:
    """Return what feeds the trackers of `train.loggers` on the first rank; on others, what feeds none."""
    names = run.rank_context.recipe.train.loggers
    described = describe_run(run, Redactor()) if records.is_first and names else None
    return open_trackers(names, described, records.note, partial(_summary, run))


def describe_run(run: RankRun, redact: Redactor) -> TrackedRun:
    """Return recipe, plan, config and git state of a run; all texts go through `redact`."""
    recipe, plan = run.rank_context.recipe, run.plan
    facts: dict[str, object] = {
        "mmtrain": __version__,
        "torch": torch.__version__,
        "hardware": plan.hardware,
        "ranks": plan.world_size,
        "placement": plan.placement,
        "plan_sha256": plan.sha256,
        "predicted_step_time_s": plan.predicted.step_time_s,
    }
    config = {**flatten_settings(recipe), **facts}
    return TrackedRun(
        run_id=run.session.claim.run_id,
        name=redact(recipe.name),
        run_dir=run.session.request.run_dir,
        first_step=run.position.first_step + 1,
        recipe=redact(dump_recipe(recipe)),
        plan=redact(plan.file_text()),
        plan_text=redact(plan_table(plan)),
        config={name: _plain(value, redact) for name, value in config.items()},
        git={name: redact(value) for name, value in read_git_state(Path.cwd()).items()},
    )


def require_no_credentials(recipe: Recipe, redact: Redactor) -> None:
    """Raise UserError for a setting that holds a credential: the run's folder keeps the recipe as it is."""
    for key, value in flatten_settings(recipe).items():
        text = value if isinstance(value, str) else json.dumps(value)
        if redact(text) != text:
            raise UserError(
                f"{key}: holds what looks like a credential: {redact(text)!r}. The run's folder and its trackers "
                "would show it; put it into the environment of the process, and leave it out of the recipe"
            )


def flatten_settings(recipe: Recipe) -> dict[str, object]:
    """Return every setting of a recipe by its dotted key."""
    return flatten(recipe.model_dump(mode="json"))


def _plain(value: object, redact: Redactor) -> str | int | float | bool:
    return value if isinstance(value, int | float | bool) else redact(str(value))


def _summary(run: RankRun) -> Mapping[str, str | float]:
    """Return the medians of a run that is done, and what the log says of it in words."""
    metrics = read_metrics(run.session.request.run_dir)
    summary: dict[str, str | float] = dict(steady_medians(metrics))
    for name in ("loss", "val_loss", "val_exact"):
        values = [step[name] for step in metrics if step.get(name) is not None]
        if values:
            summary[f"last_{name}"] = values[-1]
    text = run_summary(run.plan, run.rank_context.recipe.cluster, metrics)
    return {**summary, "text": text} if text else summary
