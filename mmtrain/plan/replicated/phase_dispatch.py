"""The drawn batches as the replicated placement would run them: dealt to ranks anew in each phase (OrchMLLM)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from mmtrain.balance import IntArray
from mmtrain.balance.post_balancing import BatchCost, rebalance
from mmtrain.costs import CostModel, TokenLoad
from mmtrain.models.model_shape import LayerShape, ModelShape
from mmtrain.plan.artifact.marginal_cost import average_cost
from mmtrain.plan.estimate.sample_batches import SampledBatches
from mmtrain.program.ir.graph import LLM

ALL_TO_ALLS_PER_ROUND = 2  # all-to-alls of an encoder's features in a round: theirs, and their gradients'


@dataclass(frozen=True)
class DispatchedRounds:
    """The drawn batches dealt out over rounds and ranks."""

    loads: tuple[tuple[Mapping[str, TokenLoad], ...], ...]  # per batch and round: the fullest rank's, by unit
    largest: Mapping[str, TokenLoad]
    dispatch_s: float  # of a step, mean
    max_over_mean: Mapping[str, float]


@dataclass(frozen=True)
class PhaseDispatcher:
    """Samples over rounds and ranks by their cost in the LLM, a round's items over ranks by that in their encoder."""

    shape: ModelShape
    costs: CostModel
    element_bytes: int  # of a feature
    batches: SampledBatches
    num_ranks: int
    ranks_per_node: int
    _dealt: dict[int, DispatchedRounds] = field(default_factory=dict, repr=False)

    def rounds(self, num_rounds: int) -> DispatchedRounds:
        """The batches over `num_rounds` mini-batches of every rank."""
        if num_rounds not in self._dealt:
            self._dealt[num_rounds] = self._deal(num_rounds)
        return self._dealt[num_rounds]

    def _deal(self, num_rounds: int) -> DispatchedRounds:
        """Spread every drawn batch over rounds and ranks, in each phase by what it costs there."""
        names = [u.name for u in self.shape.units]
        largest = dict.fromkeys(names, TokenLoad(0, 0, 0, 0))
        uneven: dict[str, list[float]] = {name: [] for name in names}
        loads, dispatch = [], 0.0
        for groups in self.batches.groups:
            samples = np.concatenate(groups).astype(np.int64)
            tokens = self.batches.lengths.tokens[samples]
            place = self._spread(LLM, tokens, self.num_ranks * num_rounds)
            # Bins of like cost share a round, so that its ranks wait for each other as little as can be.
            cost = self.unit_costs[LLM].of_ranks(tokens, place, self.num_ranks * num_rounds)
            order = np.argsort(np.argsort(-cost, kind="stable"), kind="stable")[place]
            batch = []
            for i in range(num_rounds):
                here = order // self.num_ranks == i
                fullest, seconds = self._round(samples[here], order[here] % self.num_ranks, uneven)
                dispatch += seconds
                batch.append(fullest)
                largest = {n: max(largest[n], fullest[n], key=lambda load: load.tokens) for n in names}
            loads.append(tuple(batch))
        num = len(self.batches.groups)
        evenness = {name: float(np.mean(values)) if values else 1.0 for name, values in uneven.items()}
        return DispatchedRounds(tuple(loads), largest, dispatch / num, evenness)

    def _round(
        self, samples: IntArray, rank: IntArray, uneven: dict[str, list[float]]
    ) -> tuple[dict[str, TokenLoad], float]:
        """The fullest rank's load of every unit in a round, and the seconds its dispatches take."""
        tokens = self.batches.lengths.tokens[samples]
        fullest = {LLM: self._fullest(LLM, tokens, rank, uneven)}
        seconds = 0.0
        for unit in self.shape.units:
            if unit.name == LLM:
                continue
            items = self.batches.lengths.items[unit.name]
            counts = items.first[samples + 1] - items.first[samples]
            row = self._rows(unit.name, samples)
            goes = self._spread(unit.name, items.tokens[row], self.num_ranks)
            fullest[unit.name] = self._fullest(unit.name, items.tokens[row], goes, uneven)
            moved = goes != np.repeat(rank, counts)
            width = next(e.width for e in self.shape.edges if unit.name in (e.src, e.dst))
            nbytes = items.features[row] * width * self.element_bytes * moved
            seconds += ALL_TO_ALLS_PER_ROUND * self._all_to_all(nbytes, goes, np.repeat(rank, counts))
        return fullest, seconds

    def _fullest(self, unit: str, tokens: IntArray, rank: IntArray, uneven: dict[str, list[float]]) -> TokenLoad:
        """The load of the rank that costs most."""
        costs = self.unit_costs[unit].of_ranks(tokens, rank, self.num_ranks)
        if costs.sum() > 0:
            uneven[unit].append(float(costs.max() / costs.mean()))
        return TokenLoad.of(tokens[rank == costs.argmax()])

    def _spread(self, unit: str, tokens: IntArray, bins: int) -> IntArray:
        """Post-balancing: who computes which, for the least cost of the fullest."""
        dealt = np.arange(len(tokens), dtype=np.int64) % bins
        return rebalance(tokens, dealt, bins, self.unit_costs[unit]).dest_rank

    @cached_property
    def unit_costs(self) -> dict[str, BatchCost]:
        """For every unit the seconds of a token, and of a pair of tokens in attention, about a mean mini-batch."""
        found = {}
        for unit in self.shape.units:
            every = [self._tokens(unit.name, np.concatenate(groups)) for groups in self.batches.groups]
            load, parts = TokenLoad.of(np.concatenate(every)), len(every) * self.num_ranks
            mean = TokenLoad(max(load.tokens // parts, 1), max(load.sum_sq // parts, 1), load.max_len, 1)
            own = average_cost(partial(self._forward, unit.layers), mean)
            found[unit.name] = BatchCost(linear=own.linear, quadratic=own.quadratic)
        return found

    def _forward(self, layers: Sequence[LayerShape], load: TokenLoad) -> float:
        return sum(self.costs.seconds(layer, 1, load, "forward") for layer in layers)

    def _tokens(self, unit: str, samples: IntArray) -> IntArray:
        """Tokens of the samples, or of their items."""
        if unit == LLM:
            return self.batches.lengths.tokens[samples]
        return self.batches.lengths.items[unit].tokens[self._rows(unit, samples)]

    def _rows(self, unit: str, samples: IntArray) -> IntArray:
        """Rows of the samples' items, sample by sample."""
        first = self.batches.lengths.items[unit].first
        begin, counts = first[samples], first[samples + 1] - first[samples]
        return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))

    def _all_to_all(self, nbytes: IntArray, source: IntArray, destination: IntArray) -> float:
        """Seconds until the rank that sends or receives most is done; messages of one rank follow each other."""
        if self.num_ranks == 1 or not nbytes.any():
            return 0.0
        out, into = (np.bincount(ranks, nbytes, self.num_ranks) for ranks in (source, destination))
        return self.costs.transfer(int(max(out.max(), into.max())), self.num_ranks <= self.ranks_per_node)
