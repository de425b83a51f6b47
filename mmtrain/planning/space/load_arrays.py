"""The loads of all microbatches of the sampled batches as arrays, and the seconds that a cost model gives them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta
from mmtrain.costs import TokenLoad
from mmtrain.planning.space.budget import LoadBudget
from mmtrain.program.ir.graph import LLM, Microbatch, UnitMesh

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
SecondsOfLoad = Callable[[TokenLoad], float]


@dataclass(frozen=True)
class LoadArrays:
    """`TokenLoad`s of a unit: arrays of (batches, replicas, microbatches).

    Splits of large batches keep many of them, so that `load_arrays` makes columns of 32 bits where these are enough.
    """

    tokens: IntArray
    sum_sq: IntArray
    max_len: IntArray
    num_sequences: IntArray
    targets: IntArray | None = None  # of the LLM
    exchanged: IntArray | None = None  # of an LLM whose replicas share sequences
    _distinct: dict[int, tuple[list[TokenLoad], IntArray] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def largest(self) -> TokenLoad:
        """Return the load with most tokens, and with as many targets as any has."""
        index = int(self.tokens.argmax())
        num_targets = None if self.targets is None else int(self.targets.max())
        num_exchanged = 0 if self.exchanged is None else int(self.exchanged.max())
        tokens, squares, longest, count = (int(column.flat[index]) for column in self._columns)
        return TokenLoad(tokens, squares, longest, count, num_targets, min(num_exchanged, tokens))

    def total(self, batch: int) -> TokenLoad:
        """Return the sum of all loads of a batch."""
        tokens, squares, longest, count = (column[batch] for column in self._columns)
        num_targets = None if self.targets is None else int(self.targets[batch].sum())
        return TokenLoad(int(tokens.sum()), int(squares.sum()), int(longest.max()), int(count.sum()), num_targets)

    def of_targets(self) -> "LoadArrays":
        """Return the head's part of the loads; see `TokenLoad.of_targets`."""
        if self.targets is None:
            return self
        share = self.targets / np.maximum(self.tokens, 1)
        squares, longest = ((column * share).round().astype(np.int64) for column in (self.sum_sq, self.max_len))
        return LoadArrays(self.targets, squares, longest, self.num_sequences)

    def mean(self) -> TokenLoad:
        """Return a load with the mean of all microbatches in every respect."""
        tokens, squares, longest, count = (round(float(column.mean())) for column in self._columns)
        num_targets = None if self.targets is None else round(float(self.targets.mean()))
        return TokenLoad(tokens, squares, longest, count, num_targets)

    def merged(self, num_merged: int) -> "LoadArrays":
        """Return the loads of microbatches that hold `num_merged` neighbours each; what does not fill one is left out.

        Not for replicas that share sequences.
        """
        num_microbatches = self.tokens.shape[-1] // num_merged
        parts = [
            column[..., : num_microbatches * num_merged].reshape(*column.shape[:-1], num_microbatches, num_merged)
            for column in (*self._columns, *(() if self.targets is None else (self.targets,)))
        ]
        tokens, squares, longest, count, *targets = parts
        sums = (column.sum(axis=-1) for column in (count, *targets))
        return LoadArrays(tokens.sum(axis=-1), squares.sum(axis=-1), longest.max(axis=-1), *sums)

    def distinct(self, max_loads: int) -> tuple[list[TokenLoad], IntArray] | None:
        """Return every load that occurs, and for each microbatch the index of its load; None if more than `max_loads`.

        The answer is kept, since each tensor-parallel size asks for it, with indices in few bytes.
        """
        if max_loads not in self._distinct:
            self._distinct[max_loads] = self._find_distinct(max_loads)
        return self._distinct[max_loads]

    def _find_distinct(self, max_loads: int) -> tuple[list[TokenLoad], IntArray] | None:
        columns = self._columns if self.exchanged is None else (*self._columns, self.exchanged)
        number = np.zeros(self.tokens.size, dtype=np.int64)
        for column in columns:  # np.unique of whole rows takes many times as long
            values, of_column = np.unique(column, return_inverse=True)
            if len(values) > max_loads:  # loads are no fewer
                return None
            of_loads, number = np.unique(number * len(values) + of_column.ravel(), return_inverse=True)
            if len(of_loads) > max_loads:
                return None
        _, first = np.unique(number, return_index=True)
        rows = np.stack([column.ravel()[first] for column in columns], axis=1).tolist()
        loads = [
            TokenLoad(tokens, squares, longest, count, exchanged=sum(exchanged))
            for tokens, squares, longest, count, *exchanged in rows
        ]
        return loads, number.astype(np.min_scalar_type(len(loads))).reshape(self.tokens.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        optional = (column for column in (self.targets, self.exchanged) if column is not None)
        return sum(column.nbytes for column in (*self._columns, *optional))

    @property
    def _columns(self) -> tuple[IntArray, ...]:
        return self.tokens, self.sum_sq, self.max_len, self.num_sequences


def load_arrays(unit: str, metas: Sequence[BatchMeta], dp: int, num_microbatches: int) -> LoadArrays:
    """Sum up what each microbatch of a unit holds in every batch."""
    columns = []
    for meta in metas:
        sizes = meta if unit == LLM else meta.items[unit]
        lengths = sizes.tokens
        microbatch = sizes.replica * num_microbatches + sizes.index
        longest = np.zeros(dp * num_microbatches, dtype=np.int64)
        np.maximum.at(longest, microbatch, lengths)
        counted = [lengths, lengths * lengths, np.ones_like(lengths)]
        if unit == LLM:
            counted.append(meta.targets)
        sums = [np.zeros_like(longest) for _ in counted]
        for total, values in zip(sums, counted, strict=True):
            np.add.at(total, microbatch, values)
        columns.append((*sums[:2], longest, *sums[2:]))
    shape = (len(metas), dp, num_microbatches)
    return LoadArrays(*(_compact(np.stack(rows).reshape(shape)) for rows in zip(*columns, strict=True)))


def _compact(column: IntArray) -> IntArray:
    """Return the column in 32 bits if its sum fits, so that no sum of it can overflow."""
    fits = int(column.sum()) <= np.iinfo(np.int32).max
    return column.astype(np.int32) if fits else column


def loads_of_parts(mesh: UnitMesh, batches: Sequence[Mapping[Microbatch, TokenLoad]]) -> LoadArrays:
    """Collect the loads of a unit whose replicas share microbatches, of the part of each replica by itself."""
    microbatches = [
        [Microbatch(mesh.unit, replica, index) for index in range(mesh.num_microbatches)]
        for replica in range(mesh.num_replicas)
    ]

    def column(value: Callable[[TokenLoad], int]) -> IntArray:
        rows = [[[value(loads[mb]) for mb in of_replica] for of_replica in microbatches] for loads in batches]
        return np.array(rows, dtype=np.int64)

    return LoadArrays(
        tokens=column(lambda load: load.tokens),
        sum_sq=column(lambda load: load.sum_sq),
        max_len=column(lambda load: load.max_len),
        num_sequences=column(lambda load: load.num_sequences),
        targets=column(lambda load: load.num_targets),
        exchanged=column(lambda load: load.exchanged),
    )


class LoadSeconds:
    """Seconds of all loads of a unit for one kind of pass after another.

    Up to `max_exact_loads` different loads each is asked for; more are interpolated between `num_token_nodes` numbers
    of tokens. Between nodes the cost is linear in tokens, in squared lengths and in sequences, and in tokens that are
    exchanged.
    """

    def __init__(self, loads: LoadArrays, budget: LoadBudget) -> None:
        """Look for what passes share: the loads that differ, or the nodes and where each load lies between them."""
        self._loads = loads
        self._num_nodes = budget.num_token_nodes
        self._known = loads.distinct(budget.max_exact_loads)

    def of(self, seconds: SecondsOfLoad) -> FloatArray:
        """Return the seconds of every load, (batches, dp, microbatches)."""
        if self._known is not None:
            distinct, index = self._known
            return np.array([seconds(load) for load in distinct]).take(index)
        if not self._loads.tokens.any():
            return np.zeros(self._loads.tokens.shape)
        return self._nodes.interpolate(seconds)

    @cached_property
    def _nodes(self) -> "_TokenNodes":
        return _TokenNodes.of(self._loads, self._num_nodes)


@dataclass(frozen=True)
class _TokenNodes:
    """Numbers of tokens at which a cost model is asked, and how each of many loads differs from one of its tokens."""

    loads: Sequence[TokenLoad]  # at the nodes
    below: Int32Array  # of each load, the node of as many tokens or fewer
    beyond: FloatArray  # tokens above that node; 0 above the last
    more_squared: FloatArray  # squared lengths beyond what so many tokens have on average
    more_sequences: FloatArray
    more_exchanged: FloatArray | None  # None where nothing is exchanged
    is_filled: BoolArray  # whether it has any tokens

    @classmethod
    def of(cls, arrays: LoadArrays, num_nodes: int) -> "_TokenNodes":
        """Place nodes evenly between the fewest tokens and the most; some load must have tokens."""
        tokens, squares, count = (
            column.astype(np.float64) for column in (arrays.tokens, arrays.sum_sq, arrays.num_sequences)
        )
        exchanged = None if arrays.exchanged is None else arrays.exchanged.astype(np.float64)
        smallest = max(tokens[tokens > 0].min(), 1)
        nodes = np.unique(np.linspace(smallest, tokens.max(), num_nodes).astype(np.int64))
        squares_per_token = squares.sum() / tokens.sum()
        sequences_per_token = count.sum() / tokens.sum()
        exchanged_per_token = 0.0 if exchanged is None else exchanged.sum() / tokens.sum()
        longest = int(arrays.max_len.max())
        loads = [
            TokenLoad(
                node,
                max(int(node * squares_per_token), 2),
                min(longest, node),
                max(int(node * sequences_per_token), 2),
                exchanged=int(node * exchanged_per_token),
            )
            for node in nodes.tolist()
        ]
        below = np.maximum(np.searchsorted(nodes, tokens, side="right") - 1, 0)
        beyond = np.where(below < len(nodes) - 1, np.maximum(tokens - nodes[below], 0.0), 0.0)
        return cls(
            loads,
            below.astype(np.int32),
            beyond,
            squares - np.maximum(np.floor(tokens * squares_per_token), 2),
            count - np.maximum(np.floor(tokens * sequences_per_token), 2),
            None if exchanged is None else exchanged - np.floor(tokens * exchanged_per_token),
            tokens > 0,
        )

    def interpolate(self, seconds: SecondsOfLoad) -> FloatArray:
        """Return the seconds of every load."""
        base, per_square, per_sequence, per_exchanged = [], [], [], []
        for load in self.loads:
            node_seconds = seconds(load)
            base.append(node_seconds)
            more_squared = seconds(replace(load, sum_sq=2 * load.sum_sq))
            per_square.append((more_squared - node_seconds) / load.sum_sq)
            more_sequences = seconds(replace(load, num_sequences=2 * load.num_sequences))
            per_sequence.append((more_sequences - node_seconds) / load.num_sequences)
            if load.exchanged:
                twice = seconds(replace(load, exchanged=2 * load.exchanged))
                per_exchanged.append((twice - node_seconds) / load.exchanged)
            else:
                per_exchanged.append(0.0)
        total = self._between(base)
        total += self._between(per_square) * self.more_squared
        total += self._between(per_sequence) * self.more_sequences
        if self.more_exchanged is not None:
            total += self._between(per_exchanged) * self.more_exchanged
        return np.where(self.is_filled, np.maximum(total, 0.0), 0.0)

    def _between(self, values: Sequence[float]) -> FloatArray:
        """Return what `np.interp` does of values at the nodes, to the last bit, without looking for each load again."""
        at_nodes, tokens = np.array(values), np.array([load.tokens for load in self.loads])
        per_token = np.append(np.diff(at_nodes) / np.diff(tokens), 0.0)
        return np.asarray(per_token[self.below] * self.beyond + at_nodes[self.below])
