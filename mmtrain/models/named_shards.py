"""What a checkpoint stores of a model: named pieces of parameters and optimizer state."""

from dataclasses import dataclass

from torch import Tensor

from mmtrain.models.parameter_specs import ParamSpec


@dataclass(frozen=True)
class NamedShard:
    """The piece of one tensor that this rank answers for.

    First tensor parallelism cuts (`spec.dim`, rank `tp_rank` of `tp`), then, where `flat` is given, ZeRO-1 keeps
    elements [lo, hi) of that piece, flattened. `tensor` is the live tensor, not a copy.
    """

    name: str  # the parameter's plan-independent name, with a suffix for optimizer state
    spec: ParamSpec
    tp_rank: int
    tp: int
    flat: tuple[int, int] | None
    tensor: Tensor
