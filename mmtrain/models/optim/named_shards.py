"""What a checkpoint stores of a model: named shards of parameters and optimizer state."""

from dataclasses import dataclass

from torch import Tensor

from mmtrain.models.optim.parameter_specs import ParamSpec

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam; a shard of one is named like its parameter, with `#` and this


@dataclass(frozen=True)
class NamedShard:
    """The shard of one tensor that this rank saves and counts in gradient norms.

    Tensor parallelism splits the tensor first (`spec.dim`, rank `tp_rank` of `tp`). If `flat` is given, ZeRO-1 keeps
    elements [lo, hi) of that shard, flattened. `tensor` is the live tensor, not a copy.
    """

    name: str  # the parameter's plan-independent name, with a suffix for optimizer state
    spec: ParamSpec
    tp_rank: int
    tp: int
    flat: tuple[int, int] | None
    tensor: Tensor
