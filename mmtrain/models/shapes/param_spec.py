"""A parameter from the view of the whole model: its name, its full shape, and where tensor parallelism splits it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParamSpec:
    """A parameter from the view of the whole model."""

    name: str  # plan-independent, e.g. `vision.layers.3.self_attention.linear_qkv.weight`
    full_shape: tuple[int, ...]  # of the full view
    dim: int | None  # dimension of the full view that tensor parallelism splits; None: every rank holds all of it
    starts_at_zero: bool = False  # of what would start at 1: weights of zero-centered norms
    # Each rank of the TP group has the gradient of some tokens or heads alone; that of all is their sum.
    is_gradient_partial: bool = False

    @property
    def num_elements(self) -> int:
        """Return how many elements the whole parameter has."""
        return math.prod(self.full_shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of one rank's shard of the full view; elements in the order of the rank's parameter."""
        return tuple(size // tp if i == self.dim else size for i, size in enumerate(self.full_shape))
