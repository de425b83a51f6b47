"""`CostModel`, the protocol of everything that knows costs, and `TokenLoad`, what a layer's cost depends on."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.models.shapes.model_shape import LayerShape

ComputeKind = Literal["forward", "backward", "recompute"]
PassDirection = Literal["forward", "backward"]


@dataclass(frozen=True)
class TokenLoad:
    """The tokens of one microbatch as a unit's layers see them.

    `sum_sq` is the sum of squared sequence lengths, since attention over packed sequences is block-diagonal. For
    encoders tokens are patches before downsampling, and `num_sequences` is the number of items. The LLM's head computes
    only tokens with a target.
    """

    tokens: int
    sum_sq: int
    max_len: int
    num_sequences: int
    targets: int | None = None  # tokens that count in the loss; None: all
    exchanged: int = 0  # tokens of sequences that a context-parallel rank shares with others

    @classmethod
    def of(cls, lengths: np.ndarray) -> "TokenLoad":
        """Return the load of one microbatch with sequences of these lengths (tokens)."""
        if len(lengths) == 0:
            return cls(0, 0, 0, 0)
        tokens = np.asarray(lengths, dtype=np.int64)
        return cls(int(tokens.sum()), int((tokens * tokens).sum()), int(tokens.max()), len(tokens))

    @property
    def num_targets(self) -> int:
        """Return how many tokens the head computes."""
        return self.tokens if self.targets is None else self.targets

    def of_targets(self) -> "TokenLoad":
        """Return the head's part of the load: its targets, as if they were tokens of sequences as many and as even."""
        if self.targets is None or not self.tokens:
            return self
        share = self.targets / self.tokens
        return TokenLoad(self.targets, round(self.sum_sq * share), round(self.max_len * share), self.num_sequences)

    def __add__(self, other: "TokenLoad") -> "TokenLoad":
        """Return the load of both microbatches packed into one."""
        return TokenLoad(
            self.tokens + other.tokens,
            self.sum_sq + other.sum_sq,
            max(self.max_len, other.max_len),
            self.num_sequences + other.num_sequences,
            None if self.targets is other.targets is None else self.num_targets + other.num_targets,
            self.exchanged + other.exchanged,
        )


@dataclass(frozen=True)
class TokenSplit:
    """How the ranks of a tensor-parallel group divide the tokens of a block."""

    sp: bool = False  # sequence parallelism: between GEMMs each rank holds a slice of the tokens
    chunks: int = 1  # GEMMs run in so many chunks of tokens, each communicated while a neighbour is computed


UNDIVIDED = TokenSplit()


class LayerWork(NamedTuple):
    """One pass of a layer on one rank: what its seconds depend on.

    A backward computes weight gradients if `layer.trainable`, and the gradient of the layer's input if `input_grad`.
    With neither there is no backward.
    """

    layer: LayerShape
    tp: int  # ranks that share the layer
    load: TokenLoad  # of one microbatch
    kind: ComputeKind
    input_grad: bool = True  # whether something trainable lies below the layer
    split: TokenSplit = UNDIVIDED

    @property
    def direction(self) -> PassDirection:
        """Return the direction in which the pass runs: a recomputation runs forward."""
        return "backward" if self.kind == "backward" else "forward"

    @property
    def has_gradient(self) -> bool:
        """Return whether backward computes anything."""
        return self.layer.trainable or self.input_grad


class PieceCost(NamedTuple):
    """The seconds of a piece of a layer on one rank.

    What a collective takes from the rank that computes beside it counts as the rank's compute.
    """

    compute_s: float
    collective_s: float  # of the collective at its end, during which the rank may compute something else
    # Of these, what the pass itself hides unless it stops behind the piece. Negative where chunks of tokens cost more
    # than they hide.
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The seconds of the piece in a pass that goes on behind it."""
        return self.compute_s + self.collective_s - self.hidden_s


def waiting_seconds(costs: "CostModel", work: LayerWork) -> float:
    """Return the seconds of a pass in which its rank waits for collectives of its TP group between pieces of a block.

    What such a collective takes from compute beside it counts as compute, as in `PieceCost`. The share is that of the
    pieces, whose sum differs from the pass where collectives of sequence parallelism are not counted in it.
    """
    pieces = costs.pieces(work)
    waiting_s = sum(piece.total_s - piece.compute_s for piece in pieces)
    return waiting_s and costs.seconds(work) * waiting_s / sum(piece.total_s for piece in pieces)


class CostModel(Protocol):
    """Seconds and bytes of layers and messages; `source` says whether they are measured, modelled or given.

    What a backward computes depends on what trains: see `LayerWork`.
    """

    @property
    def source(self) -> str:
        """`measured`, `modelled` or `given`, with the hardware's name, for every table that prints a cost."""
        ...

    @property
    def holds_tp_waits(self) -> bool:
        """Whether seconds of layers were measured on TP groups, whose ranks waited for each other."""
        ...

    @property
    def sums_on_the_way(self) -> bool:
        """Whether a reduce-scatter adds gradients up in bf16 on their way; mmtrain adds up in fp32 what arrives."""
        ...

    @property
    def tp_traffic(self) -> float:
        """Bytes of a block's tensor-parallel collectives over those of Megatron-LM."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """Bytes for each parameter that layers' prices hold for adding gradients up; sharded layers leave that out."""
        ...

    @property
    def reduces_once(self) -> bool:
        """Whether sharded layers reduce gradients once in a step; mmtrain does so after every microbatch."""
        ...

    def seconds(self, work: LayerWork) -> float:
        """Return the seconds that one rank spends on a layer's pass.

        `backward` excludes `recompute`. A forward that no backward follows keeps no activations. Sequence parallelism
        itself changes nothing here, only what chunks hide with it.
        """
        ...

    def pieces(self, work: LayerWork) -> tuple[PieceCost, ...]:
        """Divide `seconds` among the layer's pieces; see `costs.block_pieces`."""
        ...

    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Return the bytes one rank keeps on its device between forward and backward of `layer`."""
        ...

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Return the seconds of one message of `nbytes` between two ranks."""
        ...

    def posting(self) -> float:
        """Return how many seconds each end of a message keeps its rank from computing."""
        ...

    def collective(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the seconds of a collective over `group`; `nbytes` is the whole (gathered or reduced) tensor."""
        ...

    def all_to_all(self, on_node_bytes: int, off_node_bytes: int, group: GroupLayout) -> float:
        """Return the seconds of an all-to-all over `group`, in which ranks may send different amounts.

        on_node_bytes, off_node_bytes: what the rank that sends or receives most moves on its node, and beyond it.
        """
        ...

    def overlap_slowdown(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the share of a collective's seconds that compute beside it loses: 0 to 1, which leaves no time."""
        ...

    def cut(self) -> float:
        """Return the seconds that a pass loses each time it stops inside a layer and goes on later."""
        ...

    def shard_copies(self, nbytes: float, kernels: int) -> float:
        """Return the seconds of copies between a sharded layer's tensors and the buffers that travel.

        nbytes: read and written in so many kernels.
        """
        ...

    def product(self, rows: int, columns: int, inner: int) -> float:
        """Return the seconds of a product of matrices (rows, inner) x (inner, columns), in the weights' precision."""
        ...

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of an optimizer step over `parameters` of one rank: gradient norm, clipping, update."""
        ...
