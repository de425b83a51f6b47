"""What a layer's cost depends on, and what can answer for it."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mmtrain.models.shape import LayerShape

ComputeKind = Literal["forward", "backward", "recompute"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


@dataclass(frozen=True)
class TokenLoad:
    """The tokens of one microbatch as a unit's layers see them.

    `sum_sq` is the sum of squared sequence lengths: attention over packed sequences is block-diagonal.
    Encoders count patches before downsampling; `num_sequences` is then the number of items.
    """

    tokens: int
    sum_sq: int
    max_len: int
    num_sequences: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "TokenLoad":
        """Sum up the sequence lengths (tokens) packed into one microbatch."""
        if len(lengths) == 0:
            return cls(0, 0, 0, 0)
        n = np.asarray(lengths, dtype=np.int64)
        return cls(int(n.sum()), int((n * n).sum()), int(n.max()), len(n))


class CostModel(Protocol):
    """Seconds and bytes of layers and messages; `source` says whether measured, modelled or given."""

    @property
    def source(self) -> str:
        """`measured`, `modelled` or `given`, with the hardware's name, for every table that prints a cost."""
        ...

    def seconds(self, layer: LayerShape, tp: int, load: TokenLoad, kind: ComputeKind) -> float:
        """Seconds one rank of `tp` spends on `layer`. `backward` excludes `recompute`."""
        ...

    def activation_bytes(self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool) -> int:
        """Bytes one rank keeps between forward and backward of `layer`."""
        ...

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Seconds of one message of `nbytes` between two ranks."""
        ...

    def collective(self, kind: CollectiveKind, nbytes: int, size: int, same_node: bool) -> float:
        """Seconds of a collective over `size` ranks; `nbytes` is the whole (gathered or reduced) tensor."""
        ...
