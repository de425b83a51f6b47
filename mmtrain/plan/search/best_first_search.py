"""Which layouts there are, and which of them is fastest: best-first, by bounds that grow tighter as work is put in.

A sizing waits with a bound on all its cuts: arithmetic, then the exact optimum of a dynamic program. When its turn
comes its cuts are rated, all of them if the whole search has few, else those near the anchor; and a cut whose rating
comes first is fitted into memory and simulated. What cannot be faster than the best one found is never looked at.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.evaluate import Judged, judge
from mmtrain.plan.estimate.layer_costs import Pricing
from mmtrain.plan.estimate.memory_fit import Fitted, Misfit, fitted
from mmtrain.plan.estimate.step_time_estimator import Rater
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import (
    Cuts,
    FloatArray,
    Track,
    alive_of,
    anchor,
    every_cut,
    graph_for,
    jittered,
    laid_out,
    least_seconds,
    recomputed,
    tracks_of,
)
from mmtrain.plan.search.mesh_enumeration import Sizing, split_tp_group_of
from mmtrain.program.ir.graph import LLM

SAME = 1.001  # step times within this factor count as equal; the simpler layout then wins
FEW = 2_000  # cuts of all sizings together up to which all are rated, and compared in full
JITTERED = 160  # cuts that are rated of each sizing otherwise
ROUNDS = 8  # of rating what lies near the best so far
HOPELESS = 1.05  # of the fastest step found: what rates above is not looked at more closely
HOPEFUL = 0.95  # of its anchor's rating: what a sizing's best cut may rate, where there are more cuts than a few
REFINED = 2  # more cuts of the sizing found fastest that are simulated then
TOO_LARGE = 12  # sizings whose bound says that they cannot fit that are looked at, where no other does
TOLD = 200  # sizings that were not looked at, of which the ranking may tell
HEAVIEST = 2  # replica groups of a batch that are rated where there are more cuts than a few

Progress = Callable[[int, int], None]  # sizings that were looked at or are settled, of how many


@dataclass(frozen=True)
class Outcome:
    """Everything the search learned."""

    judged: tuple[Judged, ...]  # the chosen one first, then by step time; of each sizing the best
    losers: tuple[Alternative, ...]  # those never simulated, with the reason

    @property
    def fastest(self) -> float:
        """Seconds of the chosen step; infinity without any."""
        return self.judged[0].step_time_s if self.judged else math.inf


def joined(*outcomes: Outcome) -> Outcome:
    """What several searches learned, ranked together."""
    return Outcome(
        tuple(_ranked([j for outcome in outcomes for j in outcome.judged])),
        tuple(loser for outcome in outcomes for loser in outcome.losers),
    )


@dataclass(order=True)
class _Waiting:
    """Something in the queue; the least bound comes first."""

    bound: float
    number: int
    sizing: Sizing = field(compare=False)
    tracks: tuple[Track, ...] = field(compare=False, default=())
    cuts: Cuts | None = field(compare=False, default=None)
    is_glanced_at: bool = field(compare=False, default=False)


def search(
    sizings: Sequence[tuple[float, Sizing]],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    at_least: int,
    progress: Progress | None = None,
) -> Outcome:
    """Simulate layouts in the order of their lower bounds until no other can be faster than the best one found.

    At least `at_least` sizings are simulated, if so many fit, so that the ranking has figures to show.
    """
    return _Search(pricing, choices, machine, at_least, progress).run(sizings)


class _Search:
    def __init__(
        self,
        pricing: Pricing,
        choices: Mapping[str, UnitChoices],
        machine: Hardware,
        at_least: int,
        progress: Progress | None,
    ) -> None:
        self.pricing, self.choices, self.machine = pricing, choices, machine
        self.at_least, self.progress = at_least, progress
        self.losers: list[Alternative] = []
        self.best: dict[int, Judged] = {}  # by id of the sizing
        self.misfits: dict[int, Misfit] = {}
        self.others: dict[int, list[tuple[float, Sizing, Cuts]]] = {}  # the next best rated cuts
        self.queue: list[_Waiting] = []
        self.num_queued = 0
        self.is_small = False
        self.rater = Rater(pricing, machine, HEAVIEST)

    def run(self, sizings: Sequence[tuple[float, Sizing]]) -> Outcome:
        """Work the queue off."""
        self.is_small = self._num_cuts(s for _, s in sizings) <= FEW
        if self.is_small:
            self.rater.groups = None
        for bound, sizing in sizings:
            if tp_group := split_tp_group_of(sizing, self.machine.ranks_per_node):
                self._lost(sizing, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
            else:
                self._wait(0.0 if self.is_small else bound, sizing)
        num_seen = 0
        while self.queue and not self._is_settled(self.queue[0]):
            waiting = heapq.heappop(self.queue)
            self._tell(num_seen, len(sizings))
            num_seen += not waiting.tracks and waiting.cuts is None
            self._look_at(waiting)
        if not self.is_small:
            self._refine()
        self._give_up()
        self._tell(len(sizings), len(sizings))
        return Outcome(tuple(_ranked(list(self.best.values()))), tuple(self.losers))

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _is_settled(self, first: _Waiting) -> bool:
        """Whether nothing that waits can change the choice."""
        if math.isinf(first.bound):  # then there is nothing to find, only something to say
            return bool(self.best) or len(self.misfits) >= TOO_LARGE
        fastest = self._fastest()
        return len(self.best) >= self.at_least and first.bound > fastest * (SAME if self.is_small else 1.0)

    def _refine(self) -> None:
        """Simulate the next best rated cuts of the sizing found fastest."""
        if not self.best:
            return
        fastest = min(self.best, key=lambda at: self.best[at].step_time_s)
        for bound, sizing, cuts in self.others.get(fastest, [])[:REFINED]:
            self._simulate(bound, sizing, cuts)

    def _num_cuts(self, sizings: Iterable[Sizing]) -> int:
        """Ways to cut all sizings, counted up to what is not few."""
        layers = {unit.name: len(unit.layers) for unit in self.pricing.shape.units}
        total = 0
        for sizing in sizings:
            if sizing.placement == "unified":
                size = sizing.sizes[LLM]
                total += math.comb(sum(layers.values()) - 1, size.pp * size.vpp - 1)
            else:
                total += math.prod(math.comb(layers[n] - 1, s.pp * s.vpp - 1) for n, s in sizing.sizes.items())
            if total > FEW:
                break
        return total

    def _wait(
        self,
        bound: float,
        sizing: Sizing,
        tracks: tuple[Track, ...] = (),
        cuts: Cuts | None = None,
        is_glanced_at: bool = False,
    ) -> None:
        self.num_queued += 1
        heapq.heappush(self.queue, _Waiting(bound, self.num_queued, sizing, tracks, cuts, is_glanced_at))

    def _look_at(self, waiting: _Waiting) -> None:
        """Put the next piece of work into what comes first."""
        bound, sizing = waiting.bound, waiting.sizing
        if waiting.cuts is not None:
            self._simulate(bound, sizing, waiting.cuts)
        elif waiting.tracks and (self.is_small or waiting.is_glanced_at):
            self._rate(bound, sizing, waiting.tracks)
        elif waiting.tracks:
            self._glance_at(bound, sizing, waiting.tracks)
        else:
            tracks = tracks_of(sizing, self.pricing, self.choices)
            if any(track.anchor is None for track in tracks):
                self._lost(sizing, "its layers cannot be cut into so many stages under parallel.*.pp")
            else:
                self._wait(max(bound, *map(least_seconds, tracks)), sizing, tracks)

    def _glance_at(self, bound: float, sizing: Sizing, tracks: tuple[Track, ...]) -> None:
        """Rate the anchor alone, so that what is far behind others waits until they are settled."""
        extra = self._extra(sizing, tracks)
        cuts = tuple(anchor(track, more) or track.anchor or () for track, more in zip(tracks, extra, strict=True))
        rating = float(self.rater.rate(sizing, tracks, [cuts], extra)[0])
        self._wait(max(bound, rating * HOPEFUL), sizing, tracks, is_glanced_at=True)

    def _rate(self, bound: float, sizing: Sizing, tracks: tuple[Track, ...]) -> None:
        """Rate the cuts of a sizing, and let the best wait for the simulator."""
        extra = self._extra(sizing, tracks)
        options = [self._options(track, more) for track, more in zip(tracks, extra, strict=True)]
        if not all(options):
            self._try_to_fit(sizing, tuple(track.anchor or () for track in tracks))
            self._lost_for_memory(sizing)
            return
        if self.is_small:
            cuts = list(product(*options))
            for rating, one in zip(self.rater.rate(sizing, tracks, cuts, extra), cuts, strict=True):
                self._wait(max(float(rating), bound), sizing, tracks, one)
            return
        rated = self._descend(sizing, tracks, options, extra)
        order = sorted(rated, key=lambda one: rated[one])
        least = max(rated[order[0]], bound)
        self.others[id(sizing)] = [(rated[one], sizing, one) for one in order[1 : 1 + REFINED]]
        if least < self._fastest():  # the sooner a fast one is known, the less of others is looked at
            self._simulate(least, sizing, order[0])
        else:
            self._wait(least, sizing, tracks, order[0])

    def _descend(
        self,
        sizing: Sizing,
        tracks: Sequence[Track],
        options: Sequence[Sequence[tuple[int, ...]]],
        extra: Sequence[FloatArray | None],
    ) -> dict[Cuts, float]:
        """Rate cuts near the anchor, then near the best of these, until none is better."""
        rated: dict[Cuts, float] = {}
        best = math.inf
        for _ in range(ROUNDS):
            new = [cuts for cuts in _spread_over(options, JITTERED) if cuts not in rated]
            if new:
                rated |= zip(new, self.rater.rate(sizing, tracks, new, extra).tolist(), strict=True)
            around = min(rated, key=lambda cuts: rated[cuts])
            if rated[around] >= best:
                break
            best = rated[around]
            if best > self._fastest() * HOPELESS:
                break
            options = [
                jittered(track, cuts, JITTERED, more) or [cuts]
                for track, cuts, more in zip(tracks, around, extra, strict=True)
            ]
        return rated

    def _fastest(self) -> float:
        return min((j.step_time_s for j in self.best.values()), default=math.inf)

    def _extra(self, sizing: Sizing, tracks: Sequence[Track]) -> list[FloatArray | None]:
        """By track, seconds of recomputation that parts and spans need; None where the anchor needs none."""
        cuts = tuple(track.anchor or () for track in tracks)
        alive = self.rater.alive(sizing, cuts)
        memory = self.pricing.memory(graph_for(laid_out(sizing, self.pricing, cuts), self.pricing), alive)
        if max(m.total for m in memory.values()) <= self.machine.memory_bytes:
            return [None] * len(tracks)
        return [recomputed(track, alive_of(track, alive), self.machine.memory_bytes) for track in tracks]

    def _options(self, track: Track, extra: FloatArray | None) -> list[tuple[int, ...]]:
        """Cuts of one track that are worth rating."""
        if self.is_small:
            return every_cut(track)
        around = anchor(track, extra)
        if around is None and track.vpp > 1 and track.anchor is not None:  # parts of a rank may help each other out
            return jittered(track, track.anchor, JITTERED)
        return [] if around is None else jittered(track, around, JITTERED, extra)

    def _simulate(self, bound: float, sizing: Sizing, cuts: Cuts) -> None:
        known = self.best.get(id(sizing))
        if known is not None and known.step_time_s <= bound:
            return
        found = self._try_to_fit(sizing, cuts)
        if found is None:
            if not self.is_small:
                self._next_best(sizing)
            if not any(w.sizing is sizing for w in self.queue):
                self._lost_for_memory(sizing)
            return
        judged = judge(found.layout, self.pricing, self.machine, memory=found.memory)
        if known is None or judged.step_time_s < known.step_time_s:
            self.best[id(sizing)] = judged

    def _next_best(self, sizing: Sizing) -> None:
        """Let the next rated cut wait, where the one before turned out not to fit."""
        left = self.others.get(id(sizing), [])
        if left:
            bound, _, cuts = left.pop(0)
            self._wait(bound, sizing, (), cuts)

    def _try_to_fit(self, sizing: Sizing, cuts: Cuts) -> Fitted | None:
        found = fitted(sizing, self.pricing, cuts, self.machine, self.rater.alive(sizing, cuts))
        if isinstance(found, Fitted):
            return found
        known = self.misfits.get(id(sizing))
        if known is None or found.need_gib < known.need_gib:
            self.misfits[id(sizing)] = found
        return None

    def _lost_for_memory(self, sizing: Sizing) -> None:
        if id(sizing) not in self.best and id(sizing) in self.misfits:
            misfit = self.misfits[id(sizing)]
            self._lost(sizing, misfit.reason, misfit.need_gib)

    def _give_up(self) -> None:
        """What still waits cannot be faster."""
        fastest = self._fastest()
        seen = {*self.best}
        for waiting in sorted(self.queue):
            if id(waiting.sizing) not in seen and len(seen) < TOLD:
                seen.add(id(waiting.sizing))
                if math.isinf(waiting.bound):
                    self._lost(waiting.sizing, "does not fit: what its ranks must hold at least is too much")
                    continue
                unit = _slowest(waiting)
                self._lost(
                    waiting.sizing, f"at least {waiting.bound / fastest:.2f}x slower: {unit} cannot be done sooner"
                )

    def _lost(self, sizing: Sizing, reason: str, peak_gib: float | None = None) -> None:
        self.losers.append(
            Alternative(
                summary=str(sizing),
                placement=sizing.placement,
                step_time_s=None,
                peak_memory_gib=peak_gib,
                reason=reason,
            )
        )


def _slowest(waiting: _Waiting) -> str:
    """Whose work asks for the bound, as far as is known."""
    if not waiting.tracks:
        return "its work"
    return " and ".join(max(waiting.tracks, key=least_seconds).units)


def _spread_over(options: Sequence[Sequence[tuple[int, ...]]], limit: int) -> list[Cuts]:
    """Combine the best few of each track."""
    few = max(1, int(limit ** (1 / len(options))))
    return list(product(*(cuts[:few] for cuts in options)))


def _ranked(judged: list[Judged]) -> list[Judged]:
    """Fastest first; of those as fast as the fastest, the simplest is chosen and leads."""
    ordered = sorted(judged, key=lambda j: (j.step_time_s, j.layout.complexity))
    if not ordered:
        return []
    equal = [j for j in ordered if j.step_time_s <= ordered[0].step_time_s * SAME]
    chosen = min(equal, key=lambda j: (j.layout.complexity, j.step_time_s))
    return [chosen, *(j for j in ordered if j is not chosen)]
