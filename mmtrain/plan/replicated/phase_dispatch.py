"""Dispatch the sampled batches as the replicated placement would: samples move to other ranks in every phase.

A *round* is one mini-batch of every rank; a step has one or more. A *phase* is the work of one unit in a round. Before
each phase all ranks exchange samples so that their costs in that unit are balanced (OrchMLLM, arXiv 2503.23830).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from mmtrain.balance import IntArray
from mmtrain.balance.post_balancing import BatchCost, rebalance
from mmtrain.costs import CostModel, TokenLoad
from mmtrain.models.model_shape import LayerShape, ModelShape
from mmtrain.plan.artifact.marginal_cost import average_cost
from mmtrain.plan.estimate.sample_batches import SampledBatches
from mmtrain.program.ir.graph import LLM

ALL_TO_ALLS_PER_PHASE = 2  # an encoder's features move once forward, their gradients once backward


@dataclass(frozen=True)
class DispatchedRounds:
    """The sampled batches, dispatched over rounds and ranks."""

    loads: tuple[tuple[Mapping[str, TokenLoad], ...], ...]  # by batch and round: the most expensive rank's, by unit
    largest: Mapping[str, TokenLoad]  # by unit: the load with most tokens of all rounds
    dispatch_s: float  # of a step, mean over the batches
    max_over_mean: Mapping[str, float]  # by unit: cost of the most expensive rank over the mean rank's


@dataclass
class PhaseDispatcher:
    """Balances samples over rounds and ranks by their cost in the LLM, and a round's items by that in their encoder."""

    shape: ModelShape
    costs: CostModel
    element_bytes: int  # of a feature
    batches: SampledBatches
    num_ranks: int
    ranks_per_node: int
    _dispatched: dict[int, DispatchedRounds] = field(default_factory=dict, init=False, repr=False)

    def dispatch(self, num_rounds: int) -> DispatchedRounds:
        """Dispatch the batches over `num_rounds` mini-batches of every rank."""
        if num_rounds not in self._dispatched:
            self._dispatched[num_rounds] = self._dispatch(num_rounds)
        return self._dispatched[num_rounds]

    def _dispatch(self, num_rounds: int) -> DispatchedRounds:
        units = [unit.name for unit in self.shape.units]
        largest = dict.fromkeys(units, TokenLoad(0, 0, 0, 0))
        imbalances: dict[str, list[float]] = {unit: [] for unit in units}
        loads = []
        dispatch_s = 0.0
        for groups in self.batches.groups:
            samples = np.concatenate(groups).astype(np.int64)
            bins = self._bins_by_cost(samples, num_rounds)
            batch_loads = []
            for i in range(num_rounds):
                in_round = bins // self.num_ranks == i
                rank = bins[in_round] % self.num_ranks
                round_loads, seconds = self._dispatch_round(samples[in_round], rank, imbalances)
                dispatch_s += seconds
                batch_loads.append(round_loads)
                largest = {u: max(largest[u], round_loads[u], key=lambda load: load.tokens) for u in units}
            loads.append(tuple(batch_loads))
        max_over_mean = {unit: float(np.mean(ratios)) if ratios else 1.0 for unit, ratios in imbalances.items()}
        return DispatchedRounds(tuple(loads), largest, dispatch_s / len(self.batches.groups), max_over_mean)

    def _bins_by_cost(self, samples: IntArray, num_rounds: int) -> IntArray:
        """Return for each sample its round * num_ranks + rank.

        Bins of similar cost share a round, so that the ranks of a round wait for each other as little as possible.
        """
        tokens = self.batches.lengths.tokens[samples]
        num_bins = self.num_ranks * num_rounds
        bins = self._balance(LLM, tokens, num_bins)
        costs = self.unit_costs[LLM].of_ranks(tokens, bins, num_bins)
        position = np.argsort(np.argsort(-costs, kind="stable"), kind="stable")
        return np.asarray(position[bins])

    def _dispatch_round(
        self, samples: IntArray, rank: IntArray, imbalances: dict[str, list[float]]
    ) -> tuple[dict[str, TokenLoad], float]:
        """Return the most expensive rank's load of every unit in a round, and the seconds of its all-to-alls.

        Also append the imbalance of each unit to `imbalances`.
        """
        tokens = self.batches.lengths.tokens[samples]
        loads = {LLM: self._most_expensive(LLM, tokens, rank, imbalances)}
        seconds = 0.0
        for unit in self.shape.units:
            if unit.name == LLM:
                continue
            items = self.batches.lengths.items[unit.name]
            items_per_sample = items.first[samples + 1] - items.first[samples]
            rows = self._item_rows(unit.name, samples)
            encoder_rank = self._balance(unit.name, items.tokens[rows], self.num_ranks)
            loads[unit.name] = self._most_expensive(unit.name, items.tokens[rows], encoder_rank, imbalances)
            llm_rank = np.repeat(rank, items_per_sample)
            width = next(edge.width for edge in self.shape.edges if unit.name in (edge.src, edge.dst))
            nbytes = items.features[rows] * width * self.element_bytes * (encoder_rank != llm_rank)
            seconds += ALL_TO_ALLS_PER_PHASE * self._all_to_all(nbytes, encoder_rank, llm_rank)
        return loads, seconds

    def _most_expensive(
        self, unit: str, tokens: IntArray, rank: IntArray, imbalances: dict[str, list[float]]
    ) -> TokenLoad:
        """Return the load of the rank with the highest cost, and append max over mean to `imbalances`."""
        costs = self.unit_costs[unit].of_ranks(tokens, rank, self.num_ranks)
        if costs.sum() > 0:
            imbalances[unit].append(float(costs.max() / costs.mean()))
        return self._with_targets(unit, TokenLoad.of(tokens[rank == costs.argmax()]))

    def _with_targets(self, unit: str, load: TokenLoad) -> TokenLoad:
        """Give a load of the LLM the share of targets that the data has on average."""
        lengths = self.batches.lengths
        share = float(lengths.targets.sum() / lengths.tokens.sum())
        return replace(load, targets=round(load.tokens * share)) if unit == LLM else load

    def _balance(self, unit: str, tokens: IntArray, num_bins: int) -> IntArray:
        """Return the bin of each sequence after post-balancing: the most expensive bin costs as little as possible."""
        round_robin = np.arange(len(tokens), dtype=np.int64) % num_bins
        return rebalance(tokens, round_robin, num_bins, self.unit_costs[unit]).dest_rank

    @cached_property
    def unit_costs(self) -> dict[str, BatchCost]:
        """By unit, seconds per token and per pair of tokens in attention, exact for a mean mini-batch."""
        unit_costs = {}
        for unit in self.shape.units:
            tokens = [self._tokens(unit.name, np.concatenate(groups)) for groups in self.batches.groups]
            total, num_mini_batches = TokenLoad.of(np.concatenate(tokens)), len(tokens) * self.num_ranks
            mean_tokens, mean_sum_sq = (max(value // num_mini_batches, 1) for value in (total.tokens, total.sum_sq))
            mean = self._with_targets(unit.name, TokenLoad(mean_tokens, mean_sum_sq, total.max_len, 1))
            cost = average_cost(partial(self._forward_seconds, unit.layers), mean)
            unit_costs[unit.name] = BatchCost(linear=cost.linear, quadratic=cost.quadratic)
        return unit_costs

    def _forward_seconds(self, layers: Sequence[LayerShape], load: TokenLoad) -> float:
        return sum(self.costs.seconds(layer, 1, load, "forward") for layer in layers)

    def _tokens(self, unit: str, samples: IntArray) -> IntArray:
        """Return the tokens of the samples in the LLM, or of their items in an encoder."""
        if unit == LLM:
            return self.batches.lengths.tokens[samples]
        return self.batches.lengths.items[unit].tokens[self._item_rows(unit, samples)]

    def _item_rows(self, unit: str, samples: IntArray) -> IntArray:
        """Return the rows of the samples' items, sample by sample."""
        first = self.batches.lengths.items[unit].first
        start, counts = first[samples], first[samples + 1] - first[samples]
        return np.repeat(start - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))

    def _all_to_all(self, nbytes: IntArray, source: IntArray, destination: IntArray) -> float:
        """Return the seconds of the rank that sends or receives most; its messages follow each other."""
        if self.num_ranks == 1 or not nbytes.any():
            return 0.0
        sent, received = (np.bincount(ranks, nbytes, self.num_ranks) for ranks in (source, destination))
        return self.costs.transfer(int(max(sent.max(), received.max())), self.num_ranks <= self.ranks_per_node)
