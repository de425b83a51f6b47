"""A plan that shows itself: as the command's table, as a picture in a notebook, and as a data frame."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmtrain.api.data_frames import data_frame
from mmtrain.errors import UserError
from mmtrain.planning import Plan, require_match
from mmtrain.planning import load_plan as read_plan
from mmtrain.planning.emit.emit_plan import emit
from mmtrain.planning.emit.emitted_plan import EmittedPlan
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report.notebook_html import plan_view_html
from mmtrain.report.plain_text import seconds_text
from mmtrain.report.plan_view import plan_table
from mmtrain.report.rank_groups import stage_ranks

if TYPE_CHECKING:
    import pandas

FrameRows = Literal["stages", "alternatives", "memory"]


class ShownPlan(Plan):
    """A plan, as `mmtrain plan` saves it and `mmtrain train` executes it; `print` shows the command's table.

    It equals any `Plan` of the same content, and its file is the same.
    """

    @classmethod
    def of(cls, plan: Plan) -> "ShownPlan":
        """Return the same plan, which is valid already."""
        return cls.model_construct(plan.model_fields_set, **plan.__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # its units and predictions are dictionaries

    def __repr__(self) -> str:
        seconds = seconds_text(self.predicted.step_time_s)
        return f"Plan({self.placement} on {self.world_size} x {self.hardware}, {seconds} per step, {self.sha256[:12]})"

    def __str__(self) -> str:
        return plan_table(self)

    def _repr_html_(self) -> str:
        return plan_view_html(self)

    def emit(self, trainer: str, recipe: str | Path | Recipe, *, set: Sequence[str] = ()) -> EmittedPlan:
        """Write the plan for another trainer, as `mmtrain plan --emit` does; `text` of the result is the file.

        Args:
            trainer: `megatron-lm`, `megatron-bridge`, `mimo`, `automodel` or `veomni`.
            recipe: what the plan was made for: its path, or what `load_recipe` returned.
            set: settings that take precedence, as the plan was made with.

        Raises:
            UserError: there is no such trainer.
            PlanError: the plan is of another recipe, or the trainer cannot run it; the message says why.
        """
        settings = recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe), set).recipe
        require_match(self, settings, self.world_size, self.hardware)
        return emit(self, settings, trainer)

    def to_frame(self, rows: FrameRows = "stages") -> "pandas.DataFrame":
        """Return the plan as a data frame of pandas.

        Args:
            rows: `stages`: one for each stage, with its unit's mesh, its layers and its ranks; `alternatives`: one for
                each plan that was not chosen, with seconds, GiB and the reason; `memory`: one for each range of ranks,
                with the GiB of every kind.

        Raises:
            UserError: pandas is not installed, or there are no such rows.
        """
        kinds = {"stages": self._stage_rows, "alternatives": self._alternative_rows, "memory": self._memory_rows}
        if rows not in kinds:
            raise UserError(f"Plan.to_frame: rows is {rows!r}; allowed: {', '.join(kinds)}")
        return data_frame(kinds[rows](), "Plan.to_frame")

    def _stage_rows(self) -> Iterator[dict[str, Any]]:
        for name, unit in self.units.items():
            for stage in unit.stages:
                yield {
                    "unit": name,
                    "stage": stage.stage,
                    "chunk": stage.chunk,
                    "tp": unit.tp,
                    "cp": unit.cp,
                    "pp": unit.pp,
                    "dp": unit.dp,
                    "first_layer": stage.layers[0],
                    "num_layers": stage.layers[1] - stage.layers[0],
                    "num_recomputed": len(stage.recompute),
                    "ranks": stage_ranks(unit, stage.stage),
                }

    def _alternative_rows(self) -> Iterator[dict[str, Any]]:
        names = ("summary", "placement", "step_time_s", "peak_memory_gib", "reason")
        for other in self.alternatives:
            yield {name: getattr(other, name) for name in names}

    def _memory_rows(self) -> Iterator[dict[str, Any]]:
        for ranks, peak_gib in self.predicted.peak_memory_gib.items():
            yield {"ranks": ranks, "peak_gib": peak_gib, **self.predicted.memory_kinds_gib.get(ranks, {})}


def load_plan(path: str | Path) -> ShownPlan:
    """Read a plan file.

    Args:
        path: a file that `mmtrain plan --out` or `Plan.save` wrote.

    Raises:
        PlanError: the file is missing, damaged, or of another format; then the message has the version that wrote it.
    """
    return ShownPlan.of(read_plan(Path(path)))
