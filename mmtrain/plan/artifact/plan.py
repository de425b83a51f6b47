"""The plan: where every layer goes and what that is predicted to cost. Saved as JSON, read back exactly."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmtrain.costs.hardware import Precision
from mmtrain.program.schedules.builder import ScheduleKind

PLAN_VERSION = 1
Placement = Literal["unified", "disaggregated", "colocated", "replicated"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StagePlan(_Frozen):
    """One stage: layers [lo, hi) of the unit, and which of them are recomputed.

    Stages count along the data flow, through all chunks: stage s is chunk s // pp of pipeline rank s % pp.
    """

    stage: int
    chunk: int = 0
    layers: tuple[int, int]
    recompute: tuple[int, ...] = ()


class UnitPlan(_Frozen):
    """A unit's mesh, its ranks (tp fastest, then dp, then pp) and its stages, `vpp` on a pipeline rank.

    Where a unit ends in the middle of a round over its ranks, its last ranks have a stage less.
    """

    tp: int
    pp: int
    dp: int
    vpp: int = 1
    sp: bool = False  # sequence parallelism: ranks of a TP group share out the tokens between products
    ranks: tuple[int, ...]
    stages: tuple[StagePlan, ...]

    @model_validator(mode="after")
    def _stages_go_round_the_ranks(self) -> "UnitPlan":
        found = [(s.stage, s.chunk) for s in self.stages]
        if found != [(i, i // self.pp) for i in range(len(found))] or -(-len(found) // self.pp) != self.vpp:
            raise ValueError(
                f"(stage, chunk) are {found}; with pp {self.pp} and vpp {self.vpp} the stages are numbered from 0 "
                f"along the data flow, {(self.vpp - 1) * self.pp + 1} to {self.vpp * self.pp} of them, "
                "and stage s is chunk s // pp"
            )
        return self

    @property
    def num_recomputed(self) -> int:
        """Layers that backward computes again."""
        return sum(len(stage.recompute) for stage in self.stages)


class SchedulePlan(_Frozen):
    """Which builder makes the program, and each replica's microbatches in a step, per unit.

    An explicit `order` lists forwards and backwards, like `F llm.0 llm:0.3`, of each rank of replica group 0, or parts
    of them and work in gaps (`program.actions`).
    """

    kind: ScheduleKind = "1f1b"
    num_microbatches: dict[str, int]
    order: dict[int, tuple[str, ...]] | None = None
    pieces: bool = False  # segments of `order` are pieces of blocks, not layers

    @model_validator(mode="after")
    def _order_if_explicit(self) -> "SchedulePlan":
        if (self.kind == "explicit") != (self.order is not None):
            raise ValueError("`order` belongs to kind `explicit`, and that needs one")
        if self.pieces and self.order is None:
            raise ValueError("`pieces` says what the segments of an `order` are; leave it out with other kinds")
        return self


class Prediction(_Frozen):
    """What the simulator says of this plan for typical batches of the recipe's data."""

    step_time_s: float
    mfu: float
    tokens_per_s_per_gpu: float
    peak_memory_gib: dict[str, float]  # by rank, or range of ranks
    memory_kinds_gib: dict[str, dict[str, float]] = Field({})  # the same ranks -> kind of what is held -> its part
    bubbles: dict[str, float]  # kind -> share of rank-seconds
    scheduling_efficiency: float | None = None  # colocated: share of the encoders' work inside the LLM's own step
    cost_source: str


class PlannedData(_Frozen):
    """What the data looked like for which a plan was made; see `drift`."""

    samples: int
    tokens: dict[str, float]  # unit -> what it processes of a sample, on average


class Alternative(_Frozen):
    """A plan that was considered and lost, and why; one that is not `runnable` may be faster than the chosen one."""

    summary: str
    placement: Placement
    step_time_s: float | None
    peak_memory_gib: float | None
    reason: str
    runnable: bool = True  # by this version's runtime


class Plan(_Frozen):
    """The saved artefact of the planner; the runtime executes exactly this."""

    version: int = PLAN_VERSION
    recipe_sha256: str
    hardware: str
    precision: Precision | None = None  # of weights and activations; None in files of versions that did not write it
    world_size: int
    placement: Placement
    units: dict[str, UnitPlan]
    schedule: SchedulePlan
    data: PlannedData | None = None
    predicted: Prediction
    alternatives: tuple[Alternative, ...] = Field(())

    @property
    def sha256(self) -> str:
        """Fingerprint of all that the plan says, by which traces and reports name it."""
        # Without `precision` where the file has none, so that traces of older runs still name their plan.
        unstated = {"precision"} if self.precision is None else None
        return hashlib.sha256(self.model_dump_json(exclude=unstated).encode("utf-8")).hexdigest()

    @model_validator(mode="after")
    def _microbatches_of_every_unit(self) -> "Plan":
        counts = self.schedule.num_microbatches
        if counts.keys() != self.units.keys() or min(counts.values(), default=1) < 1:
            raise ValueError(
                f"schedule.num_microbatches is {counts}; it gives each of the units {', '.join(self.units)} a number "
                "of at least 1"
            )
        return self

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
