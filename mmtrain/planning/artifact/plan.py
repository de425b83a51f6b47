"""The plan: which ranks hold which layers, and its predicted step. It is saved as JSON and read back exactly."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, PhaseLoad
from mmtrain.costs.hardware import Precision
from mmtrain.models.shapes.layer_shape import shard_holds_experts
from mmtrain.models.shapes.model_shape import OffloadMode
from mmtrain.program.ir.graph import LLM, ContextMethod, CutSequences, DispatchMode, Exchange
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.version import __version__

PLAN_VERSION = 2
AS_FAST_RATIO = 1.01  # predicted step times that differ by less are called equal: no prediction is that exact
AS_FAST_TEXT = "as fast within 1%"  # what `AS_FAST_RATIO` is called
Placement = Literal["unified", "disaggregated", "colocated", "replicated"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_CONTEXT_FIELDS = ("cp", "cp_method", "cp_split")  # of `UnitPlan`


def sharding_text(shard: int | None, keeps_weights: bool) -> str:
    """Name what ranks of `replicated` share out: `zero 1`, `shard 8`, or `shard 8 zero 2`; see `UnitPlan`."""
    return "zero 1" if shard is None else f"shard {shard}" + " zero 2" * keeps_weights


class StagePlan(_Frozen):
    """One stage: layers [lo, hi) of the unit, and which of them are recomputed, or brought back from host memory.

    Stages count along the data flow, through all chunks: stage s is chunk s // pp of pipeline rank s % pp.
    """

    stage: int
    chunk: int = 0
    layers: tuple[int, int]
    recompute: tuple[int, ...] = ()


class UnitPlan(_Frozen):
    """A unit's mesh, its ranks (tp fastest, then cp, dp and pp) and its stages, up to `vpp` on each pipeline rank.

    Where the number of stages is no multiple of pp, the last pipeline ranks have a stage less.
    """

    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    dp: int = Field(ge=1)
    vpp: int = Field(1, ge=1)
    sp: bool = False  # sequence parallelism: the ranks of a TP group share the tokens between GEMMs
    shard: int | None = None  # replicas that hold one copy of the unit together (FSDP); None: each holds it whole
    # With `shard`: weights stay gathered from the first forward of a step to its last backward, and gradients and
    # optimizer state alone are shared out (ZeRO-2). Files say it only where it is so.
    keeps_weights: bool = False
    # What is balanced over the replicas of `replicated`, which are whole (ZeRO-1) without `shard`; None in others.
    dispatch: DispatchMode | None = None
    exchange: Exchange = "all_to_all"  # by which replicas that dispatch move rows
    # Context parallelism: replicas that share the sequences of a microbatch, how they attend to each other's tokens,
    # and which sequences are cut. Files say it only where cp is above 1.
    cp: int = Field(1, ge=1)
    cp_method: ContextMethod | None = None
    cp_split: CutSequences | None = None
    # Expert parallelism: replicas that hold the experts of a block together. Files say it only where ep is above 1.
    ep: int = Field(1, ge=1)
    # Chunks of tokens in the linears of blocks: the TP group communicates one while it computes another.
    tp_chunks: int = Field(1, ge=1)
    # Fewest parameters of a bucket of layers whose gradients replicas reduce together; see `costs.gradient_buckets`.
    # Files say it only where the recipe does.
    bucket_parameters: int | None = Field(None, ge=1)
    recompute_activation_function: bool = False  # blocks compute the activation functions of their MLPs again
    offload: OffloadMode = "none"  # what blocks listed as recomputed keep in host memory; with `all` they are not
    ranks: tuple[int, ...]
    stages: tuple[StagePlan, ...]

    @model_serializer(mode="wrap")
    def _without_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.bucket_parameters is None:
            del fields["bucket_parameters"]
        if self.cp == 1:
            for name in _CONTEXT_FIELDS:
                fields.pop(name, None)
        if not self.keeps_weights:
            fields.pop("keeps_weights", None)
        if self.ep == 1:
            fields.pop("ep", None)
        return fields

    @model_validator(mode="after")
    def _mesh_has_as_many_ranks(self) -> "UnitPlan":
        num_ranks = self.tp * self.cp * self.dp * self.pp
        if len(self.ranks) != num_ranks or len(set(self.ranks)) != num_ranks:
            raise ValueError(
                f"{len(self.ranks)} ranks, {len(set(self.ranks))} of them different; {self.mesh_text} has {num_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _stages_go_round_the_ranks(self) -> "UnitPlan":
        numbers = [(stage.stage, stage.chunk) for stage in self.stages]
        expected = [(i, i // self.pp) for i in range(len(numbers))]
        if numbers != expected or -(-len(numbers) // self.pp) != self.vpp:
            raise ValueError(
                f"(stage, chunk) are {numbers}; with pp {self.pp} and vpp {self.vpp} the stages are numbered from 0 "
                f"along the data flow, {(self.vpp - 1) * self.pp + 1} to {self.vpp * self.pp} of them, "
                "and stage s is chunk s // pp"
            )
        return self

    @model_validator(mode="after")
    def _context_parallelism_is_whole(self) -> "UnitPlan":
        is_described = self.cp_method is not None and self.cp_split is not None
        if self.cp == 1 and (self.cp_method, self.cp_split) != (None, None):
            raise ValueError("cp is 1 with a cp_method or cp_split, which say how cp ranks above 1 share sequences")
        if self.cp == 1:
            return self
        if not is_described:
            raise ValueError(
                f"cp is {self.cp} with cp_method {self.cp_method}, cp_split {self.cp_split}: a unit with cp above 1 "
                "has a method and a split"
            )
        per_replica = self.tp * self.cp
        for first in range(0, len(self.ranks), per_replica):
            if list(self.ranks[first : first + per_replica]) != sorted(self.ranks[first : first + per_replica]):
                raise ValueError(
                    f"ranks are {self.ranks}: those that share sequences ascend, as torch orders its groups"
                )
        return self

    @model_validator(mode="after")
    def _experts_lie_on_whole_groups(self) -> "UnitPlan":
        if self.ep == 1:
            return self
        if self.num_replicas % self.ep:
            of = "dp" if self.cp == 1 else "dp x cp"
            raise ValueError(f"ep is {self.ep}, which does not divide {of} {self.num_replicas}; use a divisor of it")
        if self.shard is not None and not shard_holds_experts(self.shard, self.ep):
            raise ValueError(
                f"ep is {self.ep} with shard {self.shard}: one copy of the unit, or several, hold all experts; use a "
                "divisor or a multiple of `shard`"
            )
        return self

    @model_validator(mode="after")
    def _chunks_need_a_group(self) -> "UnitPlan":
        if self.tp == 1 and self.tp_chunks > 1:
            raise ValueError(
                f"tp_chunks is {self.tp_chunks} with tp 1: chunks hide the communication of a tensor-parallel group; "
                "use 1, or make a new plan"
            )
        return self

    @model_validator(mode="after")
    def _shards_divide_the_replicas(self) -> "UnitPlan":
        if not self.is_replicated:
            return self
        if (self.pp, self.vpp) != (1, 1):
            raise ValueError(
                f"shard is {self.shard} and dispatch {self.dispatch} with pp {self.pp}, vpp {self.vpp}: a unit that is "
                "sharded, or dispatches, has pp 1 and vpp 1, since every TP group runs all of it; leave `shard` and "
                "`dispatch` out, or make a new plan"
            )
        if self.shard is not None and (self.shard < 1 or self.num_replicas % self.shard):
            of = "dp" if self.cp == 1 else "dp x cp"
            raise ValueError(
                f"shard is {self.shard}, which does not divide {of} {self.num_replicas}; use a divisor of it"
            )
        if list(self.ranks) != sorted(self.ranks):
            raise ValueError(f"ranks are {self.ranks}: those of a sharded unit ascend, as torch orders its groups")
        return self

    @model_validator(mode="after")
    def _only_shards_are_gathered(self) -> "UnitPlan":
        if self.keeps_weights and self.shard is None:
            raise ValueError("keeps_weights is true without `shard`: weights that are whole anyway are never gathered")
        return self

    @property
    def is_replicated(self) -> bool:
        """Whether it is a unit of `replicated`: sharded (ZeRO-3), or whole on ranks that balance or dispatch."""
        return self.shard is not None or self.dispatch is not None

    @property
    def num_replicas(self) -> int:
        """The number of copies of the unit's weights: `cp` of them share the sequences of each microbatch."""
        return self.dp * self.cp

    @property
    def mesh_text(self) -> str:
        """The mesh in one line, such as `tp2 pp1 dp4`, or `tp2 cp2 pp1 dp4`."""
        context = f" cp{self.cp}" if self.cp > 1 else ""
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"tp{self.tp}{context} pp{self.pp} dp{self.dp}{experts}"

    @property
    def num_recomputed(self) -> int:
        """The number of layers that are recomputed in the backward."""
        return sum(len(stage.recompute) for stage in self.stages)


class SchedulePlan(_Frozen):
    """Which builder makes the program, and the microbatches of a replica in a step, by unit.

    An explicit `order` lists the forwards and backwards of each rank of replica group 0, such as `F llm.0 llm:0.3`, or
    parts of them, and fills (`program.ir.actions`).
    """

    kind: ScheduleKind = "1f1b"
    num_microbatches: dict[str, int]
    order: dict[int, tuple[str, ...]] | None = None
    pieces: bool = False  # segments of `order` are pieces of blocks, not layers

    @model_validator(mode="after")
    def _order_if_explicit(self) -> "SchedulePlan":
        if (self.kind == "explicit") != (self.order is not None):
            raise ValueError("kind `explicit` needs an `order`, and no other kind has one")
        if self.pieces and self.order is None:
            raise ValueError("`pieces` says what the segments of an `order` are; leave it out with other kinds")
        return self


class SharedSequences(_Frozen):
    """What context parallelism cuts of the sampled batches' sequences, and how evenly their ranks attend."""

    sequences: float  # share of the LLM's sequences that are cut
    tokens: float  # share of its tokens that are in them
    work_over_mean: float  # attention work of the fullest rank of a microbatch over the mean of its ranks, mean
    # OmniBal's SP-Ratio (its appendix, table 7) by unit: the share of a microbatch for which the ranks that share it
    # wait for the one with most tokens, mean. An encoder on ranks of its own shares none.
    sp_ratio: dict[str, float] = Field({})


class StageBalance(_Frozen):
    """How evenly pipeline ranks are filled (OmniBal, arXiv 2407.20761, tables 4 and 5).

    A pipeline rank is one set of stages that ranks of the first replica group hold; its figures are those of one rank.
    """

    parameter_variance: float  # of the parameters in billions
    layer_variance: float  # of the number of layers
    forward_variance: float  # of the milliseconds of all its forwards for one microbatch of the LLM, mean
    sent_gib: float  # hidden states that forwards send between pipeline ranks in a step; as many gradients return
    memory_left_gib: dict[
        str, float
    ]  # by stages, such as `vision.0 llm.0`; below 0 where only a run showed that it fits
    gpu_days_per_million_samples: float
    # Of sharded units, how evenly each fills the ranks, and the seconds of a step in which ranks dispatch.
    phases: dict[str, PhaseLoad] | None = None
    dispatch_s: float | None = None
    # Of units that are dispatched by all-to-all on several nodes, the bytes that cross nodes in a step.
    off_node: dict[str, OffNodeVolume] = Field({})
    shared: SharedSequences | None = None  # where ranks share sequences


class SpreadChoice(_Frozen):
    """A plan that would be chosen in the place of this one, were ranks less or more unevenly fast than stated."""

    spread: Literal["no", "twice the"]  # times `cluster.time_spread`
    summary: str
    faster: float  # share of the step


class ExpertPrediction(_Frozen):
    """What unequal loads of experts mean for a plan whose ranks hold experts together."""

    spread: float  # `parallel.llm.expert_spread`
    source: Literal["recipe", "run", "default"] = "recipe"  # of the spread; a run's is in `cluster.costs`
    fullest_rank: float  # rows of the fullest rank over the mean
    slower: float  # share by which a step is longer than with equal loads
    steps_s: dict[int, float | None] = {}  # seconds of a step by ranks that hold experts; None: none fits or as fast


class CopyPrediction(_Frozen):
    """What copies of the run's state in host memory (`train.peer_copies`) take."""

    gib: float  # of the fullest rank, with those that it keeps for its peer
    seconds: float  # from its start until a copy is complete, beside the steps


class Prediction(_Frozen):
    """What the simulator predicts for this plan, mean over sampled batches of the recipe's data."""

    step_time_s: float
    mfu: float
    tokens_per_s_per_gpu: float
    peak_memory_gib: dict[str, float]  # by rank, or range of ranks
    memory_kinds_gib: dict[str, dict[str, float]]  # the same ranks -> kind of memory -> its share
    host_gib: dict[str, float] = Field({})  # the same ranks -> activations in host memory, where there are any
    bubbles: dict[str, float]  # kind -> share of rank-seconds
    scheduling_efficiency: float | None = None  # colocated: share of the encoders' work inside the LLM's own step
    coarse_scheduling_efficiency: float | None = None  # the same if all of it ran before or behind the LLM's passes
    cost_source: str
    memory_gib: float  # that a rank has
    balance: StageBalance | None = None  # None in plans that no search has made
    other_choices: tuple[SpreadChoice, ...] = ()  # by another spread of the ranks' times
    experts: ExpertPrediction | None = None  # with expert parallelism
    muon_s: float | None = None  # of the step, in which the slowest rank moves and orthogonalizes matrices for Muon
    copies: CopyPrediction | None = None  # in a run that takes any
    # Of the same LLM on the same ranks, with as many tokens of text alone; None where that was not planned.
    text_only_tokens_per_s_per_gpu: float | None = None

    @property
    def text_only_share(self) -> float | None:
        """Share of text-only efficiency that is kept: LLM tokens/s with media over those without."""
        text_only = self.text_only_tokens_per_s_per_gpu
        return None if text_only is None else self.tokens_per_s_per_gpu / text_only


class LargestMicrobatch(_Frozen):
    """The largest microbatch of a unit that the plan has memory for, see `costs.TokenLoad`."""

    tokens: int
    sum_sq: int
    max_len: int
    num_sequences: int
    targets: int | None = None
    exchanged: int = 0  # files state it only where sequences are shared

    @model_serializer(mode="wrap")
    def _without_exchange_of_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.exchanged:
            fields.pop("exchanged", None)
        return fields


class PlannedData(_Frozen):
    """A summary of the data that a plan was made for: to detect drift (`data_drift`), and to prove that it fits."""

    samples: int
    tokens: dict[str, float]  # unit -> mean tokens of a sample that it processes
    largest_microbatch: dict[str, LargestMicrobatch]  # by unit
    # Most LLM tokens of a group, and the samples of a step, mean; None in plans that no search has made.
    seq_len: int | None = None
    step_samples: float | None = None


class Alternative(_Frozen):
    """A plan that was considered and not chosen, and why."""

    summary: str
    placement: Placement
    step_time_s: float | None
    peak_memory_gib: float | None
    reason: str
    balance: StageBalance | None = None  # None where it was not simulated


@dataclass(frozen=True)
class StepMeasurement:
    """What a few steps of a plan took."""

    seconds: float  # of one step; infinity where the plan could not be run
    # The bytes of the rank that held most beside what was counted for it and for the batches run; None: unknown. Where
    # memory ran out, what a rank held then beside its counted peak: it needs at least so much more.
    memory_ratio: float | None = None
    ratio_by_rank: tuple[float, ...] = ()  # the same of every rank; empty: unknown
    is_out_of_memory: bool = False


class MeasuredPlan(_Frozen):
    """What `plan --measure` saw in a few steps of this plan."""

    step_time_s: float
    # By what its memory was counted too large; only where it fits by this alone, see `plan_memory.prove_memory`.
    memory_ratio: float | None = None
    # The same for each rank of the first replica group; empty: they are not known, and `memory_ratio` is that of all.
    ratio_by_rank: dict[int, float] = Field({})

    def memory_ratio_of(self, rank: int) -> float:
        """Return what a rank of the first replica group held beside what is counted for it."""
        return self.ratio_by_rank.get(rank, 1.0 if self.memory_ratio is None else self.memory_ratio)


class Plan(_Frozen):
    """What the planner saves and the runtime executes, unchanged."""

    version: int = PLAN_VERSION
    mmtrain: str = __version__  # that wrote it
    recipe_sha256: str
    # By dotted path, what the fingerprint covers; of files the names. Empty in plans that no search has made.
    settings: dict[str, Any] = Field({})
    hardware: str
    precision: Precision  # of weights and activations
    world_size: int
    placement: Placement
    units: dict[str, UnitPlan]
    schedule: SchedulePlan
    data: PlannedData
    predicted: Prediction
    measured: MeasuredPlan | None = None  # None where it was not run
    alternatives: tuple[Alternative, ...] = Field(())

    @property
    def shard(self) -> int | None:
        """Ranks that hold one copy of all units together; None in placements that do not shard."""
        return next(iter(self.units.values())).shard

    @property
    def keeps_weights(self) -> bool:
        """Whether ranks that shard a copy keep its weights gathered through a step (ZeRO-2)."""
        return next(iter(self.units.values())).keeps_weights

    @property
    def dispatch(self) -> DispatchMode | None:
        """What is balanced over the replicas of all units; None in placements that do not shard."""
        return next(iter(self.units.values())).dispatch

    @property
    def num_groups(self) -> int:
        """The groups of a step, each of which is one microbatch of the LLM."""
        return self.units[LLM].dp * self.schedule.num_microbatches[LLM]

    @property
    def sha256(self) -> str:
        """Fingerprint of the whole plan, by which traces and reports refer to it."""
        return hashlib.sha256(self.model_dump_json().encode("utf-8")).hexdigest()

    @model_validator(mode="after")
    def _ranks_exist(self) -> "Plan":
        if LLM not in self.units:
            raise ValueError(f"units are {', '.join(self.units)}; a plan has the unit {LLM}")
        for name, unit in self.units.items():
            if min(unit.ranks) < 0 or max(unit.ranks) >= self.world_size:
                raise ValueError(
                    f"unit {name} has the ranks {min(unit.ranks)} to {max(unit.ranks)}; with a world_size of "
                    f"{self.world_size} they are 0 to {self.world_size - 1}"
                )
        return self

    @model_validator(mode="after")
    def _microbatches_of_every_unit(self) -> "Plan":
        counts = self.schedule.num_microbatches
        if counts.keys() != self.units.keys() or min(counts.values(), default=1) < 1:
            raise ValueError(
                f"schedule.num_microbatches is {counts}; it gives each of the units {', '.join(self.units)} a number "
                "of at least 1"
            )
        return self

    @model_validator(mode="after")
    def _all_units_sharded_alike(self) -> "Plan":
        units = self.units.values()
        shards = {(unit.tp, unit.shard, unit.keeps_weights, unit.dispatch, unit.exchange, unit.ranks) for unit in units}
        is_replicated = any(unit.is_replicated for unit in self.units.values())
        if is_replicated != (self.placement == "replicated"):
            raise ValueError(
                f"placement is {self.placement}, and shard is {[unit.shard for unit in self.units.values()]}: units of "
                "`replicated`, and of no other placement, have a `shard` or a `dispatch`"
            )
        if is_replicated and len(shards) > 1:
            fields = "`ranks`, `tp`, `shard`, `keeps_weights`, `dispatch` and `exchange`"
            raise ValueError(f"in `replicated` all units have the same {fields}")
        is_encoder_first = self.schedule.kind == "encoder_first"
        if is_replicated and self.schedule.kind != "1f1b" and not is_encoder_first:
            kinds = "`1f1b` or `encoder_first`"
            raise ValueError(f"schedule.kind is {self.schedule.kind}; `replicated` runs its units by {kinds}")
        if is_encoder_first and not is_replicated:
            raise ValueError(f"schedule.kind is encoder_first with placement {self.placement}; allowed: replicated")
        return self

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(self.file_text(), encoding="utf-8")

    def file_text(self) -> str:
        """Return the content of the plan's file."""
        return self.model_dump_json(indent=2) + "\n"
