"""The cost table: measured seconds and bytes of layers and messages on one kind of hardware, stored as JSON."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmtrain.costs.cost_model import TokenLoad
from mmtrain.costs.find_hardware import is_same_hardware
from mmtrain.costs.layer_fields import checked_layer_fields, layer_fields, layer_key, shape_of_fields
from mmtrain.costs.table_contradictions import (
    describe_invalid_table,
    require_consistent_load,
    require_distinct,
    require_repeatable,
    require_same_passes,
)
from mmtrain.errors import PlanError
from mmtrain.foreign_json import parse_json
from mmtrain.models.shapes.model_shape import LayerShape
from mmtrain.version import __version__
from mmtrain.written_by import WRITTEN_BY, describe_other_format

__all__ = [
    "CoreSpeed",
    "CostTable",
    "LayerEntry",
    "LayerSample",
    "LayerScale",
    "LoadingEntry",
    "MeasuredSpread",
    "MessageEntry",
    "OptimizerEntry",
    "TimedPass",
    "layer_fields",
    "layer_key",
]

COST_TABLE_VERSION: Literal[1] = 1
TimedPass = Literal["forward", "forward_only", "recompute", "backward", "backward_weight", "backward_input"]
Source = Literal["measured", "modelled"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # 0: what recomputation adds may be lost in noise
Duration = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LayerFields = Annotated[dict[str, Any], AfterValidator(checked_layer_fields)]  # see `layer_fields`


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerSample(_Frozen):
    """One load, and the medians measured for it.

    `backward` computes the gradients of weights and input, `backward_weight` and `backward_input` only one of them; a
    pass that a layer does not have is absent (an embedding has no input gradient). `forward_only` is a forward that no
    backward follows. `recompute` is what recomputation adds to a backward.
    """

    tokens: Annotated[int, Field(gt=0)]
    sum_sq: Count
    max_len: Count
    num_sequences: Count
    seconds: dict[TimedPass, Seconds]
    activation_bytes: Count

    @model_validator(mode="after")
    def _require_main_passes(self) -> Self:
        if missing := [name for name in ("forward", "recompute", "backward") if name not in self.seconds]:
            raise ValueError(f"seconds lacks {', '.join(missing)} at {self.tokens} tokens")
        if not self.seconds["forward"]:
            raise ValueError(f"a forward of {self.tokens} tokens in 0 s; a time must be positive")
        require_consistent_load(self.tokens, self.sum_sq, self.max_len, self.num_sequences)
        return self

    @property
    def load(self) -> TokenLoad:
        """The load as cost models read it."""
        return TokenLoad(self.tokens, self.sum_sq, self.max_len, self.num_sequences)


class LayerEntry(_Frozen):
    """All samples of one layer kind at one tensor-parallel size, in ascending order of tokens."""

    layer: LayerFields
    tp: Annotated[int, Field(gt=0)]
    tp_chunks: Annotated[int, Field(gt=0)] = 1  # of tokens, in which the layer's GEMMs hid their collectives
    source: Source = "measured"
    samples: Annotated[tuple[LayerSample, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _require_samples_that_agree(self) -> Self:
        require_same_passes([(sample.tokens, sample.seconds) for sample in self.samples])
        require_repeatable([(sample.load, sample.seconds["forward"]) for sample in self.samples])
        return self

    @property
    def name(self) -> str:
        """The layer and how it was split, as text."""
        chunks = f" in {self.tp_chunks} chunks" if self.tp_chunks > 1 else ""
        return f"{layer_key(self.layer)} at tp {self.tp}{chunks}"

    @property
    def shape(self) -> LayerShape:
        """The layer, without what of it trains."""
        return shape_of_fields(self.layer)


class MessageEntry(_Frozen):
    """Seconds by bytes of a message between two ranks, or of a collective over `size` of them.

    The bytes are those of the whole tensor, gathered or reduced; of an all-to-all what each rank holds, of which it
    sends an equal part to every rank and keeps one.
    """

    kind: Literal["p2p", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]
    size: Annotated[int, Field(gt=1)]
    nodes: Annotated[int, Field(ge=1)] = 1  # over which the ranks are spread evenly
    source: Source = "measured"
    nbytes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]  # ascending
    seconds: tuple[Duration, ...]
    # Of a collective, by size: the share of its time that compute beside it loses; empty: not measured.
    overlap_slowdown: tuple[Share, ...] = ()

    @model_validator(mode="after")
    def _require_even_groups_and_one_time_per_size(self) -> Self:
        if self.size % self.nodes:
            raise ValueError(f"{self.kind}: {self.size} ranks cannot be spread evenly over {self.nodes} nodes")
        if self.kind == "p2p" and self.size != 2:
            raise ValueError(f"p2p: a message has 2 ranks, found size {self.size}")
        if len(self.seconds) != len(self.nbytes) or list(self.nbytes) != sorted(set(self.nbytes)):
            raise ValueError(f"{self.kind} needs ascending nbytes, and one time for each; found {self.nbytes}")
        if self.overlap_slowdown and (self.kind == "p2p" or len(self.overlap_slowdown) != len(self.nbytes)):
            raise ValueError(
                f"{self.kind}: overlap_slowdown has {len(self.overlap_slowdown)} shares; a collective has one for each "
                f"of its {len(self.nbytes)} sizes, or none, and a message has none"
            )
        return self


class OptimizerEntry(_Frozen):
    """Seconds of an optimizer step over so many parameters of one rank."""

    parameters: Annotated[int, Field(gt=0)]
    seconds: Duration
    source: Source = "measured"


class CoreSpeed(_Frozen):
    """What one GEMM and one copy took beside the layers, on all cores at once: how fast the cores were at that time.

    `costs.core_ratios` says of which sizes.
    """

    gemm_s: Duration
    copy_s: Duration


class MeasuredSpread(_Frozen):
    """How much the measured ranks differed, see `costs.time_spread`."""

    ranks: Share | None  # None: one rank was measured
    layers: Share


class LoadingEntry(_Frozen):
    """Processor seconds in which a rank without a core to spare prepares a token of its data, beside its passes."""

    layer: str  # kind of the layer by which the token enters its unit
    token_s: Seconds


class LayerScale(_Frozen):
    """How many times as long a layer took in a run as the entries or the model say, whatever its load and tp."""

    layer: LayerFields
    forward: Scale = 1.0
    backward: Scale = 1.0  # recomputation included
    activations: Scale = 1.0  # bytes that recomputing the layer saves


class CostTable(_Frozen):
    """What `mmtrain profile` measured. Tables that come with the package hold modelled entries where nothing was.

    The scales are what a run recorded (`recorded_costs`). They multiply everything that this table gives, also
    what is modelled because the table has no entry for it.
    """

    version: Literal[1] = COST_TABLE_VERSION
    mmtrain: str = __version__  # that wrote it
    hardware: str  # name of the preset that models what was not measured
    device: str  # the device that was measured
    precision: Literal["fp32", "bf16"]
    software: dict[str, str]
    date: str
    layers: tuple[LayerEntry, ...] = ()
    messages: tuple[MessageEntry, ...] = ()
    optimizer: tuple[OptimizerEntry, ...] = ()
    core_speed: CoreSpeed | None = None  # of CPUs; None: the table is older, or nothing was measured
    # What a pass loses each time it stops inside a layer for other work and goes on; None: not measured.
    cut_s: Seconds | None = None
    loading: tuple[LoadingEntry, ...] = ()  # empty: ranks have cores to spare, or it was not measured
    time_spread: MeasuredSpread | None = None  # None: not measured
    # Of a run whose LLM has experts: standard deviation of their tokens in a pass over the mean; see `MoeMlp`.
    expert_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    held_out_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # median, relative, of its layers
    layer_scales: tuple[LayerScale, ...] = ()
    message_scale: Scale = 1.0  # of messages between two ranks, and of all-to-alls
    reduction_scale: Scale = 1.0  # of other collectives and the optimizer step
    run: str | None = None  # the folder of the run that recorded the scales; None: unknown, or there are none

    @model_validator(mode="after")
    def _require_one_entry_of_each(self) -> Self:
        require_distinct("layers", [entry.name for entry in self.layers])
        require_distinct("messages", [f"{e.kind} of {e.size} ranks on {e.nodes} nodes" for e in self.messages])
        require_distinct("optimizer", [f"{e.parameters} parameters" for e in self.optimizer])
        require_distinct("loading", [entry.layer for entry in self.loading])
        require_distinct("layer_scales", [layer_key(scale.layer) for scale in self.layer_scales])
        return self

    def save(self, path: Path) -> None:
        """Write the table in one step."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path, key: str = "cluster.costs") -> "CostTable":
        """Read a table.

        Raises:
            PlanError: the file does not exist or cannot be read, is no cost table or of another format; the message
                starts with `key`.
        """
        try:
            text = path.read_bytes().decode("utf-8-sig")
            _require_readable(text, f"{key}: {path}")
            return cls.model_validate_json(text)
        except FileNotFoundError:
            raise PlanError(f"{key}: {path}: no such file; make it with `mmtrain profile RECIPE --out FILE`") from None
        except OSError as error:
            raise PlanError(f"{key}: {path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{key}: {path}: cannot be read as text: {error}") from None
        except ValidationError as error:
            raise PlanError(
                f"{key}: {path} is no cost table of version 1: {describe_invalid_table(error, path)}; "
                "correct it, or make it again with `mmtrain profile`"
            ) from None

    def merged(self, newer: "CostTable") -> "CostTable":
        """Return this table with the entries of a newer one in the place of the same entries.

        Raises:
            PlanError: the two were measured on different hardware, with different precision or different software, so
                their seconds do not compare.
        """
        for name in ("hardware", "device", "precision", "software"):
            old_value, new_value = getattr(self, name), getattr(newer, name)
            if old_value != new_value and not (name == "hardware" and is_same_hardware(old_value, new_value)):
                raise PlanError(
                    f"the table was measured with {name} {old_value}, now it is {new_value}; seconds of both in one "
                    "table would mislead. Write to another file with --out, or delete the old one"
                )
        layers = {(layer_key(e.layer), e.tp, e.tp_chunks): e for e in (*self.layers, *newer.layers)}
        messages = {(e.kind, e.size, e.nodes): e for e in (*self.messages, *newer.messages)}
        optimizer = {e.parameters: e for e in (*self.optimizer, *newer.optimizer)}
        loading = {e.layer: e for e in (*self.loading, *newer.loading)}
        newest_error = self.held_out_error if newer.held_out_error is None else newer.held_out_error
        newest_speed = self.core_speed if newer.core_speed is None else newer.core_speed
        newest_cut_s = self.cut_s if newer.cut_s is None else newer.cut_s
        newest_spread = self.time_spread if newer.time_spread is None else newer.time_spread
        newest_loads = self.expert_spread if newer.expert_spread is None else newer.expert_spread
        return newer.model_copy(
            update={
                "core_speed": newest_speed,
                "cut_s": newest_cut_s,
                "time_spread": newest_spread,
                "expert_spread": newest_loads,
                "held_out_error": newest_error,
                "layers": tuple(layers.values()),
                "messages": tuple(messages.values()),
                "optimizer": tuple(optimizer[parameters] for parameters in sorted(optimizer)),
                "loading": tuple(loading.values()),
            }
        )

    @property
    def provenance(self) -> str:
        """`measured`, `modelled`, or both, as the entries say."""
        entries: list[LayerEntry | MessageEntry | OptimizerEntry] = [*self.layers, *self.messages, *self.optimizer]
        return " and ".join(sorted({entry.source for entry in entries})) or "measured"

    @cached_property
    def by_layer(self) -> dict[tuple[str, int, int], LayerEntry]:
        """Entries by the key of their layer, tp and chunks."""
        return {(layer_key(e.layer), e.tp, e.tp_chunks): e for e in self.layers}

    @cached_property
    def chunk_counts(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Numbers of chunks above 1 in which a layer was measured, by its key and tp."""
        counts: dict[tuple[str, int], tuple[int, ...]] = {}
        for key, tp, chunks in self.by_layer:
            if chunks > 1:
                counts[key, tp] = (*counts.get((key, tp), ()), chunks)
        return counts

    @cached_property
    def by_message(self) -> dict[tuple[str, int, int], MessageEntry]:
        """Entries by kind, number of ranks and number of nodes."""
        return {(e.kind, e.size, e.nodes): e for e in self.messages}

    @cached_property
    def scale_by_layer(self) -> dict[str, LayerScale]:
        """Scales by the key of their layer."""
        return {layer_key(scale.layer): scale for scale in self.layer_scales}

    @cached_property
    def loading_by_kind(self) -> dict[str, float]:
        """Processor seconds that preparing a token takes, by the kind of its first layer."""
        return {e.layer: e.token_s for e in self.loading}

    @property
    def has_entries(self) -> bool:
        """Whether anything was measured apart from the scales."""
        return bool(self.layers or self.messages or self.optimizer)

    @property
    def is_recorded(self) -> bool:
        """Whether a run has corrected the table."""
        return bool(self.layer_scales)


def _require_readable(text: str, where: str) -> None:
    """Raise PlanError for a table of another format; what is no JSON object is left to validation."""
    try:
        raw = parse_json(text)
    except ValueError:
        return
    if isinstance(raw, dict) and raw.get("version", COST_TABLE_VERSION) != COST_TABLE_VERSION:
        problem = describe_other_format(raw["version"], raw.get(WRITTEN_BY), COST_TABLE_VERSION)
        raise PlanError(f"{where}: the cost table {problem}; make it again with `mmtrain profile`")
