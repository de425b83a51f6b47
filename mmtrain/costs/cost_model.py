"""What a layer's cost depends on, and what can answer for it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mmtrain.models.model_shape import LayerShape

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

    def __add__(self, other: "TokenLoad") -> "TokenLoad":
        """The load of both microbatches packed into one."""
        return TokenLoad(
            self.tokens + other.tokens,
            self.sum_sq + other.sum_sq,
            max(self.max_len, other.max_len),
            self.num_sequences + other.num_sequences,
        )


class PieceCost(NamedTuple):
    """What a piece of a layer takes on one rank."""

    compute_s: float
    collective_s: float  # of the collective that ends it, beside which the rank may compute something else


class CostModel(Protocol):
    """Seconds and bytes of layers and messages; `source` says whether measured, modelled or given.

    What a backward must compute depends on what trains: `layer.trainable` asks for weight gradients, `input_grad`
    (something trainable lies below the layer) for the gradient of its input. With neither there is no backward.
    """

    @property
    def source(self) -> str:
        """`measured`, `modelled` or `given`, with the hardware's name, for every table that prints a cost."""
        ...

    def seconds(
        self, layer: LayerShape, tp: int, load: TokenLoad, kind: ComputeKind, *, input_grad: bool = True
    ) -> float:
        """Seconds one rank of `tp` spends on `layer`.

        `backward` excludes `recompute`; a forward that no backward follows keeps nothing for one.
        """
        ...

    def pieces(
        self,
        layer: LayerShape,
        tp: int,
        load: TokenLoad,
        kind: ComputeKind,
        *,
        input_grad: bool = True,
        sp: bool = False,
    ) -> tuple[PieceCost, ...]:
        """What `seconds` says of the layer, piece by piece; `sp`: with sequence parallelism. See `costs.pieces`."""
        ...

    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Bytes one rank keeps between forward and backward of `layer`."""
        ...

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Seconds of one message of `nbytes` between two ranks."""
        ...

    def posting(self) -> float:
        """Seconds for which each end of a message keeps its rank from computing."""
        ...

    def collective(self, kind: CollectiveKind, nbytes: int, size: int, same_node: bool) -> float:
        """Seconds of a collective over `size` ranks; `nbytes` is the whole (gathered or reduced) tensor."""
        ...

    def optimizer(self, parameters: int) -> float:
        """Seconds one rank takes to sum up the squares of so many gradients, clip them and update their parameters."""
        ...
