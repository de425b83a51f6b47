"""What is known of a mixer or an MLP as a part of a block: its GEMMs, its parameters, and what it keeps."""

from dataclasses import dataclass
from typing import NamedTuple

INDEX_BYTES = 8
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Gemm:
    """The product (m, k) x (k, n) of activations with a weight, or of even parts of the rows with a weight each."""

    m: int
    n: int
    k: int
    groups: int = 1  # weights

    @property
    def num_weights(self) -> int:
        """Numbers of its weights."""
        return self.groups * self.n * self.k

    @property
    def flops(self) -> int:
        """FLOPs of the GEMM."""
        return 2 * self.m * self.n * self.k


class PartParameters(NamedTuple):
    """The parameters of a mixer or an MLP."""

    divided: int  # that tensor parallelism divides among ranks
    whole: int  # that every rank holds


class SavedWidths(NamedTuple):
    """What a mixer or an MLP keeps of a token from forward to backward when nothing is recomputed."""

    divided: int  # numbers that tensor parallelism divides among ranks
    on_rank: int = 0  # numbers of one rank
    fixed_bytes: int = 0  # of one rank, in fp32 or as indices, whatever the precision
