"""The replicated placement, predicted: every rank runs every unit, phase by phase, on samples dealt anew (OrchMLLM).

Weights, gradients and optimizer state are sharded over groups of `shard` ranks (FSDP, arXiv 2304.11277; with a group
smaller than the cluster: hybrid shard, ZeRO++'s idea) and gathered layer by layer while the layer before is computed.
Each step is cut into rounds, one mini-batch of every rank each. In a round samples are spread over the ranks by what
they cost the LLM, items by what they cost their encoder, so features travel in one all-to-all between the phases,
their gradients in another. Layers synchronise all ranks, so a phase takes as long as its fullest rank.

This version's runtime cannot run the placement: the planner shows what it would bring.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from mmtrain.balance import IntArray
from mmtrain.balance.post import Cost, rebalance
from mmtrain.costs import CostModel, Hardware, HeldLayers, Precision, RankMemory, TokenLoad, parameters, upstream_trains
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.memory import MARGIN, layer_state, microbatch_bytes, working_bytes
from mmtrain.models.shape import LayerShape, ModelShape, UnitShape
from mmtrain.plan.batches import BatchSample
from mmtrain.plan.plan import Alternative
from mmtrain.program.graph import LLM

GRADIENT_BYTES = 4  # gradients are reduced in fp32
GATHERED_AHEAD = 2  # layers whose whole weights a rank holds: the one computed and the one gathered meanwhile
PHASES = 2  # all-to-alls of an encoder's features in a round: theirs, and their gradients'


@dataclass(frozen=True)
class Replicated:
    """One way to run all units on all ranks."""

    num_ranks: int
    shard: int  # ranks that share one copy of weights, gradients and optimizer state
    num_rounds: int  # mini-batches of each rank in a step
    recompute: frozenset[str]  # units that keep only their layers' inputs

    def __str__(self) -> str:
        again = f", recompute {' and '.join(sorted(self.recompute))}" if self.recompute else ""
        return f"replicated: {self.num_ranks} ranks, shard {self.shard}, {self.num_rounds} mini-batches{again}"


@dataclass(frozen=True)
class Rehearsed:
    """What the cost model says of it on the drawn batches (means, seconds of a step)."""

    layout: Replicated
    step_time_s: float
    phase_s: Mapping[str, float]  # by unit: its forwards and backwards, exposed collectives included
    exposed_s: float  # part of them that waits for weights and gradients
    dispatch_s: float  # all-to-alls between phases
    max_over_mean: Mapping[str, float]  # by unit: the fullest rank's cost over the mean one's
    memory: RankMemory


@dataclass(frozen=True)
class Phases:
    """Predicts the replicated placement of one model on one cluster; what layouts share is computed once."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    batches: BatchSample
    machine: Hardware
    num_ranks: int
    _dealt: dict[int, "_Rounds"] = field(default_factory=dict, repr=False)

    def best(self) -> tuple[list[Rehearsed], Rehearsed | None]:
        """All layouts that fit into memory, fastest first, and the smallest one where none does."""
        found = [self.rehearse(layout) for layout in self.layouts()]
        fitting = [r for r in found if r.memory.total <= self.machine.memory_bytes]
        fitting.sort(key=lambda r: (r.step_time_s, len(r.layout.recompute), r.layout.shard))
        return fitting, None if fitting else min(found, key=lambda r: r.memory.total)

    def alternative(self, chosen_step_s: float) -> Alternative:
        """The best layout as a line of the plan's ranking, beside the chosen plan's step time."""
        fitting, smallest = self.best()
        best = fitting[0] if fitting else smallest
        assert best is not None, "there is always one shard group, one round and no recompute"
        limit, binding = self.machine.memory_bytes / GIB, best.memory.binding
        if not fitting:
            reason = f"does not fit: every rank needs {best.memory.total / GIB:.1f} of {limit:.1f} GiB, most {binding}"
        else:
            ratio = best.step_time_s / chosen_step_s
            found = f"{ratio:.2f}x slower" if ratio >= 1 else f"would take {ratio:.2f} of the step"
            waits = (best.exposed_s + best.dispatch_s) / best.step_time_s
            reason = f"{found}, {waits:.0%} of it waiting for weights and features; predicted only, not runnable yet"
        return Alternative(
            summary=str(best.layout),
            placement="replicated",
            step_time_s=best.step_time_s if fitting else None,
            peak_memory_gib=round(best.memory.total / GIB, 4),
            reason=reason,
            runnable=False,
        )

    def layouts(self) -> Iterator[Replicated]:
        """Shard groups of whole nodes or inside one, rounds in powers of two, recompute by unit."""
        samples = min(sum(len(g) for g in groups) for groups in self.batches.groups)
        most = max(samples // self.num_ranks, 1)
        rounds = [1 << i for i in range(most.bit_length())]
        names = [u.name for u in self.shape.units]
        kept = [
            frozenset(n for n, again in zip(names, flags, strict=True) if again)
            for flags in product((False, True), repeat=len(names))
        ]
        for shard in _shards(self.num_ranks, self.machine.ranks_per_node):
            for num_rounds, recompute in product(rounds, kept):
                yield Replicated(self.num_ranks, shard, num_rounds, recompute)

    def rehearse(self, layout: Replicated) -> Rehearsed:
        """Step time and memory of one layout."""
        dealt = self._rounds(layout.num_rounds)
        compute, exposed = {u.name: 0.0 for u in self.shape.units}, 0.0
        for batch in dealt.loads:
            for i, loads in enumerate(batch):
                for unit in self.shape.units:
                    busy, waits = self._phase(unit, loads[unit.name], layout, last=i == layout.num_rounds - 1)
                    compute[unit.name] += busy + waits
                    exposed += waits
        num = len(dealt.loads)
        phase_s = {name: seconds / num for name, seconds in compute.items()}
        return Rehearsed(
            layout,
            sum(phase_s.values()) + dealt.dispatch_s,
            phase_s,
            exposed / num,
            dealt.dispatch_s,
            dealt.max_over_mean,
            self._memory(layout, dealt),
        )

    def _phase(self, unit: UnitShape, load: TokenLoad, layout: Replicated, *, last: bool) -> tuple[float, float]:
        """Seconds of a unit's forward and backward in one round: computing, and waiting for collectives.

        Gradients are reduced inside the shard group each round, between the groups in the last one.
        """
        needs = upstream_trains(self.shape)[unit.name]
        gathers = [self._gather(layer, layout.shard) for layer in unit.layers]
        forward = [self.costs.seconds(layer, 1, load, "forward") for layer in unit.layers]
        backward, again, reductions = [], [], []
        for layer, gather, needed in zip(reversed(unit.layers), reversed(gathers), reversed(needs), strict=True):
            if not (layer.trainable or needed):
                break
            seconds = self.costs.seconds(layer, 1, load, "backward", input_grad=needed)
            if unit.name in layout.recompute:
                seconds += self.costs.seconds(layer, 1, load, "recompute")
            backward.append(seconds)
            again.append(gather)
            reductions.append(self._reduce(layer, layout.shard, last) if layer.trainable else 0.0)
        busy = sum(forward) + sum(backward)
        taken = overlapped(forward, gathers, [0.0] * len(forward)) + overlapped(backward, again, reductions)
        return busy, taken - busy

    def _gather(self, layer: LayerShape, shard: int) -> float:
        nbytes = parameters(layer) * ELEMENT_BYTES[self.precision]
        return self.costs.collective("all_gather", nbytes, shard, shard <= self.machine.ranks_per_node)

    def _reduce(self, layer: LayerShape, shard: int, last: bool) -> float:
        nbytes, inside = parameters(layer) * GRADIENT_BYTES, shard <= self.machine.ranks_per_node
        seconds = self.costs.collective("reduce_scatter", nbytes, shard, inside)
        if last:
            copies, near = self.num_ranks // shard, self.num_ranks <= self.machine.ranks_per_node
            seconds += self.costs.collective("all_reduce", nbytes // shard, copies, near)
        return seconds

    def _memory(self, layout: Replicated, dealt: "_Rounds") -> RankMemory:
        """Everything of the fullest rank: a shard of the state, one mini-batch of every unit, layers gathered whole."""
        state = np.zeros(3)
        activations = buffers = 0.0
        needs = upstream_trains(self.shape)
        for unit in self.shape.units:
            state += sum(np.array(layer_state(layer, 1, 1, self.precision)) for layer in unit.layers)
            again = (unit.name in layout.recompute,) * len(unit.layers)
            held = HeldLayers(unit.layers, needs[unit.name], again, 1, 1, 1, dealt.largest[unit.name])
            activations += microbatch_bytes(held, self.costs)
            buffers = max(buffers, working_bytes(held, self.costs, self.precision))
        largest = max(parameters(layer) for unit in self.shape.units for layer in unit.layers)
        if layout.shard > 1:
            buffers += largest * (GATHERED_AHEAD * ELEMENT_BYTES[self.precision] + GRADIENT_BYTES)
        own = state / layout.shard
        total = float(own.sum()) + activations + buffers
        return RankMemory(float(own[0]), float(own[1]), float(own[2]), activations, buffers, MARGIN * total)

    def _rounds(self, num_rounds: int) -> "_Rounds":
        if num_rounds not in self._dealt:
            self._dealt[num_rounds] = self._deal(num_rounds)
        return self._dealt[num_rounds]

    def _deal(self, num_rounds: int) -> "_Rounds":
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
            cost = self._cost(LLM, tokens).of_ranks(tokens, place, self.num_ranks * num_rounds)
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
        return _Rounds(tuple(loads), largest, dispatch / num, evenness)

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
            row = np.concatenate([np.arange(a, a + n) for a, n in zip(items.first[samples], counts, strict=True)])
            row = row.astype(np.int64)
            goes = self._spread(unit.name, items.tokens[row], self.num_ranks)
            fullest[unit.name] = self._fullest(unit.name, items.tokens[row], goes, uneven)
            moved = goes != np.repeat(rank, counts)
            width = next(e.width for e in self.shape.edges if unit.name in (e.src, e.dst))
            nbytes = items.features[row] * width * ELEMENT_BYTES[self.precision] * moved
            seconds += PHASES * self._all_to_all(nbytes, goes, np.repeat(rank, counts))
        return fullest, seconds

    def _fullest(self, unit: str, tokens: IntArray, rank: IntArray, uneven: dict[str, list[float]]) -> TokenLoad:
        """The load of the rank that costs most."""
        costs = self._cost(unit, tokens).of_ranks(tokens, rank, self.num_ranks)
        if costs.sum() > 0:
            uneven[unit].append(float(costs.max() / costs.mean()))
        return TokenLoad.of(tokens[rank == costs.argmax()])

    def _spread(self, unit: str, tokens: IntArray, bins: int) -> IntArray:
        """Post-balancing: who computes which, for the least cost of the fullest."""
        dealt = np.arange(len(tokens), dtype=np.int64) % bins
        return rebalance(tokens, dealt, bins, self._cost(unit, tokens)).dest_rank

    def _cost(self, unit: str, tokens: IntArray) -> Cost:
        """Seconds of a token and of a pair of tokens in the unit's attention, about the mean mini-batch."""
        load = TokenLoad.of(tokens)
        if load.tokens == 0:
            return Cost()
        num = self.num_ranks
        mean = TokenLoad(max(load.tokens // num, 1), max(load.sum_sq // num, 1), load.max_len, 1)
        double = TokenLoad(mean.tokens, 2 * mean.sum_sq, mean.max_len, 1)
        one, two = self._seconds(unit, mean), self._seconds(unit, double)
        return Cost(linear=(2 * one - two) / mean.tokens, quadratic=(two - one) / mean.sum_sq)

    def _seconds(self, unit: str, load: TokenLoad) -> float:
        return sum(self.costs.seconds(layer, 1, load, "forward") for layer in self.shape.unit(unit).layers)

    def _all_to_all(self, nbytes: IntArray, source: IntArray, destination: IntArray) -> float:
        """Seconds until the rank that sends or receives most is done; messages of one rank follow each other."""
        if self.num_ranks == 1 or not nbytes.any():
            return 0.0
        out, into = (np.bincount(ranks, nbytes, self.num_ranks) for ranks in (source, destination))
        return self.costs.transfer(int(max(out.max(), into.max())), self.num_ranks <= self.machine.ranks_per_node)


@dataclass(frozen=True)
class _Rounds:
    """The drawn batches dealt out over rounds and ranks."""

    loads: tuple[tuple[Mapping[str, TokenLoad], ...], ...]  # per batch and round: the fullest rank's, by unit
    largest: Mapping[str, TokenLoad]
    dispatch_s: float  # of a step, mean
    max_over_mean: Mapping[str, float]


def overlapped(compute: Sequence[float], gathers: Sequence[float], reductions: Sequence[float]) -> float:
    """Seconds for layers one after another whose weights are gathered before, and gradients reduced after, each.

    While layer i is computed, the weights of layer i + 1 arrive and the gradients of layer i - 1 leave; layer i + 1
    begins when all three are done. The first gather and the last reduction have nothing to hide behind.

        >>> overlapped([4.0, 4.0], [1.0, 1.0], [0.0, 5.0])
        14.0
    """
    if not compute:
        return 0.0
    beside = [a + b for a, b in zip([*gathers[1:], 0.0], [0.0, *reductions[:-1]], strict=True)]
    return gathers[0] + sum(map(max, compute, beside)) + reductions[-1]


def _shards(num_ranks: int, per_node: int) -> Sequence[int]:
    """Sizes of shard groups: those that divide a node's ranks, and whole nodes by powers of two, up to all ranks."""
    inside = [n for n in range(1, per_node + 1) if math.gcd(num_ranks, per_node) % n == 0]
    nodes = num_ranks // per_node if num_ranks % per_node == 0 else 0
    across = [per_node << i for i in range(1, nodes.bit_length()) if nodes % (1 << i) == 0]
    return sorted({*inside, *across, num_ranks})
