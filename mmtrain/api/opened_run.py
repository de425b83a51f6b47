"""A run's folder as an object: its recipe, plan and log, with curves in a notebook."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.api.data_frames import data_frame
from mmtrain.api.shown_plan import ShownPlan, load_plan
from mmtrain.api.stage_runs import stage_folders
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.report.notebook_html import run_html
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, load_run_recipe, read_run_state

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Run:
    """A run that was trained, or is being trained; its properties read the folder each time.

    A recipe with stages has one run for each of them, `stages`; the others' properties are those of the last stage.
    """

    folder: Path
    stages: "tuple[Run, ...]" = ()  # in order; empty for a recipe without stages

    @property
    def recipe(self) -> Recipe:
        """The recipe, with all defaults filled in."""
        return load_run_recipe(self._newest.folder)

    @property
    def plan(self) -> ShownPlan:
        """The plan that the run executes."""
        return load_plan(self._newest.folder / PLAN_FILE)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps in order, each with `step`, `loss`, `step_time_s`, `tokens_per_s` and more."""
        return read_metrics(self._newest.folder)

    @property
    def status(self) -> str:
        """How it ended: `done`, `stopped` or `failed`; `running` until then, or after a kill; `new` before a step."""
        status: str = read_run_state(self._newest.folder).get("status", "new")
        return status

    def to_frame(self) -> "pandas.DataFrame":
        """Return the logged steps as a data frame of pandas, one row for each.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame(self.metrics, "Run.to_frame")

    @property
    def _newest(self) -> "Run":
        started = [stage for stage in self.stages if (stage.folder / RECIPE_FILE).is_file()]
        return started[-1] if started else self

    def __repr__(self) -> str:
        if self.stages:
            return f"Run({str(self.folder)!r}, stages: {'; '.join(map(repr, self.stages))})"
        return f"Run({str(self.folder)!r}, {self._summary(self.metrics)})"

    def _summary(self, metrics: list[dict[str, Any]]) -> str:
        if not metrics:
            return f"{self.status}, no step logged"
        return f"{self.status} after step {metrics[-1]['step']}{_loss_text(metrics[0], metrics[-1])}"

    def _repr_html_(self) -> str:
        if self.stages:
            return "".join(stage._repr_html_() for stage in self.stages)
        metrics = self.metrics
        return run_html(f"{self.folder.name}: {self._summary(metrics)}", metrics)


def _loss_text(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    values = (first.get("loss"), last.get("loss"))
    if None in values:
        return ""
    return f", loss {values[0]:.4g} -> {values[1]:.4g}"


def open_run(folder: str | Path) -> Run:
    """Open the folder of a run, or of a recipe's stages.

    Args:
        folder: that `mmtrain train` wrote to.

    Raises:
        UserError: the folder is none of a run.
    """
    path = Path(folder)
    stages = tuple(Run(stage) for stage in stage_folders(path))
    if not stages:
        load_run_recipe(path)  # says what is missing
    return Run(path, stages)
