"""The cost table: what layers and messages were measured to take on one kind of hardware. JSON, read back exactly."""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmtrain.costs.cost_model import TokenLoad
from mmtrain.errors import PlanError
from mmtrain.models.model_shape import LayerShape

TimedPass = Literal["forward", "forward_only", "recompute", "backward", "backward_weight", "backward_input"]
TIMED_PASSES: tuple[TimedPass, ...] = (
    "forward",
    "forward_only",
    "recompute",
    "backward",
    "backward_weight",
    "backward_input",
)


Source = Literal["measured", "modelled"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerSample(_Frozen):
    """One load, and the medians measured for it.

    `backward` makes the gradients of weights and input, `backward_weight` and `backward_input` only the one; what a
    layer cannot do (an embedding has no input) is absent. `forward_only` is a forward that no backward follows.
    `recompute` is what recomputing adds to a backward.
    """

    tokens: Annotated[int, Field(gt=0)]
    sum_sq: Count
    max_len: Count
    num_sequences: Count
    seconds: dict[TimedPass, Seconds]
    activation_bytes: Count

    @model_validator(mode="after")
    def _always_timed(self) -> Self:
        if missing := [name for name in ("forward", "recompute", "backward") if name not in self.seconds]:
            raise ValueError(f"seconds lacks {', '.join(missing)} at {self.tokens} tokens")
        return self

    @property
    def load(self) -> TokenLoad:
        """The load as cost models take it."""
        return TokenLoad(self.tokens, self.sum_sq, self.max_len, self.num_sequences)


class LayerEntry(_Frozen):
    """All samples of one layer kind at one tensor-parallel size, in ascending order of tokens."""

    layer: dict[str, Any]  # the fields of its shape that are not their defaults, whatever trains
    tp: Annotated[int, Field(gt=0)]
    source: Source = "measured"
    samples: Annotated[tuple[LayerSample, ...], Field(min_length=1)]


class MessageEntry(_Frozen):
    """Seconds by bytes of a message between two ranks of a node, or of a collective over `size` of them."""

    kind: Literal["p2p", "all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    size: Annotated[int, Field(gt=1)]
    source: Source = "measured"
    nbytes: Annotated[tuple[int, ...], Field(min_length=1)]  # ascending; the whole (gathered or reduced) tensor
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _one_time_for_each(self) -> Self:
        if len(self.seconds) != len(self.nbytes) or list(self.nbytes) != sorted(set(self.nbytes)):
            raise ValueError(f"{self.kind} needs ascending nbytes, and one time for each; found {self.nbytes}")
        return self


class OptimizerEntry(_Frozen):
    """Seconds of an optimizer step over so many parameters of one rank."""

    parameters: Annotated[int, Field(gt=0)]
    seconds: Seconds
    source: Source = "measured"


class CostTable(_Frozen):
    """What `mmtrain profile` measured; of a table that comes with the package, what it would where nothing could be."""

    version: Literal[1] = 1
    hardware: str  # name of the preset that stands for it where nothing was measured
    device: str  # what it was measured on
    precision: Literal["fp32", "bf16"]
    software: dict[str, str]
    date: str
    layers: tuple[LayerEntry, ...] = ()
    messages: tuple[MessageEntry, ...] = ()
    optimizer: tuple[OptimizerEntry, ...] = ()

    def save(self, path: Path) -> None:
        """Write the table in one step."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path, key: str = "cluster.costs") -> "CostTable":
        """Read a table; PlanError, naming `key`, if there is none or it cannot be read."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PlanError(f"{key}: {path}: no such file; make it with `mmtrain profile RECIPE --out FILE`") from None
        except OSError as error:
            raise PlanError(f"{key}: {path}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            found = f" (found {first['input']})" if isinstance(first["input"], int | float | str) else ""
            raise PlanError(
                f"{key}: {path} is no cost table of version 1: {where}: {first['msg']}{found}; "
                "make it anew with `mmtrain profile`"
            ) from None

    def merged(self, newer: "CostTable") -> "CostTable":
        """This table with what a newer one measured in the place of the same entries.

        Raises PlanError where the two were measured on different hardware, at another precision or with other
        software: their seconds do not compare.
        """
        for name in ("hardware", "device", "precision", "software"):
            mine, theirs = getattr(self, name), getattr(newer, name)
            if mine != theirs:
                raise PlanError(
                    f"the table was measured with {name} {mine}, now it is {theirs}; seconds of both in one table "
                    "would mislead. Write to another file with --out, or delete the old one"
                )
        layers = {(layer_key(e.layer), e.tp): e for e in (*self.layers, *newer.layers)}
        messages = {(e.kind, e.size): e for e in (*self.messages, *newer.messages)}
        steps = {e.parameters: e for e in (*self.optimizer, *newer.optimizer)}
        return newer.model_copy(
            update={
                "layers": tuple(layers.values()),
                "messages": tuple(messages.values()),
                "optimizer": tuple(steps[n] for n in sorted(steps)),
            }
        )

    @property
    def provenance(self) -> str:
        """`measured`, `modelled`, or both, as its entries say."""
        entries: list[LayerEntry | MessageEntry | OptimizerEntry] = [*self.layers, *self.messages, *self.optimizer]
        return " and ".join(sorted({entry.source for entry in entries})) or "measured"

    @cached_property
    def by_layer(self) -> dict[tuple[str, int], LayerEntry]:
        """Entries by the key of their layer and tp."""
        return {(layer_key(e.layer), e.tp): e for e in self.layers}

    @cached_property
    def by_message(self) -> dict[tuple[str, int], MessageEntry]:
        """Entries by kind and number of ranks."""
        return {(e.kind, e.size): e for e in self.messages}


def layer_fields(layer: LayerShape) -> dict[str, Any]:
    """A layer's fields without defaults, and without what trains: that decides which measured seconds count."""
    bare, default = asdict(layer), asdict(LayerShape(layer.kind, 0, 0))
    del bare["trainable"], bare["frozen"]
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in bare.items()
        if value != default[name] or name == "kind"
    }


def layer_key(fields: dict[str, Any]) -> str:
    """Fields of a layer as one comparable text."""
    return ",".join(f"{name}={fields[name]}" for name in sorted(fields))
