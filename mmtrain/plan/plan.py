"""The plan: where every layer goes and what that is predicted to cost. Saved as JSON, read back exactly."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PLAN_VERSION = 1
Placement = Literal["unified", "disaggregated"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StagePlan(_Frozen):
    """One stage: layers [lo, hi) of the unit, and which of them are recomputed."""

    stage: int
    layers: tuple[int, int]
    recompute: tuple[int, ...] = ()


class UnitPlan(_Frozen):
    """A unit's mesh, its ranks (tp fastest, then dp, then pp) and its stages, one a pipeline rank."""

    tp: int
    pp: int
    dp: int
    ranks: tuple[int, ...]
    stages: tuple[StagePlan, ...]


class SchedulePlan(_Frozen):
    """Which builder made the program, and each replica's microbatches in a step, per unit."""

    kind: Literal["1f1b"] = "1f1b"
    num_microbatches: dict[str, int]


class Prediction(_Frozen):
    """What the simulator says of this plan for typical batches of the recipe's data."""

    step_time_s: float
    mfu: float
    tokens_per_s_per_gpu: float
    peak_memory_gib: dict[str, float]  # by rank, or range of ranks
    bubbles: dict[str, float]  # kind -> share of rank-seconds
    cost_source: str


class Alternative(_Frozen):
    """A plan that was considered and lost, and why."""

    summary: str
    placement: Placement
    step_time_s: float | None
    peak_memory_gib: float | None
    reason: str


class Plan(_Frozen):
    """The saved artefact of the planner; the runtime executes exactly this."""

    version: int = PLAN_VERSION
    recipe_sha256: str
    hardware: str
    world_size: int
    placement: Placement
    units: dict[str, UnitPlan]
    schedule: SchedulePlan
    predicted: Prediction
    alternatives: tuple[Alternative, ...] = Field(())

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
