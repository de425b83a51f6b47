"""Plans by folklore: baselines that stand in the ranking beside what the planner found, or are asked for.

All but `flops` cut the one pipeline of a `unified` plan by a rule. Each is taken at the fastest of a few sizes, fits
into memory as any plan does, and is simulated as any.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

from mmtrain.costs import Hardware, model_flops
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.evaluate import Judged, judge
from mmtrain.plan.estimate.layer_costs import FORWARD, Pricing
from mmtrain.plan.estimate.memory_fit import Fitted, fitted
from mmtrain.plan.estimate.step_time_estimator import Rater
from mmtrain.plan.estimate.time_lower_bound import unit_bound
from mmtrain.plan.search.best_first_search import HEAVIEST
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import Cuts, Track, is_allowed, tracks_of
from mmtrain.plan.search.mesh_enumeration import Sizing, in_shares, split_tp_group_of
from mmtrain.plan.search.min_max_partition import FloatArray, min_max_partition
from mmtrain.program.ir.graph import LLM

AT_ONCE = 4  # sizes that are rated to take the quickest, by their bounds, of those that a rule can cut
LOOKS = 12  # how often, until one of them fits
FLOPS = "flops"  # the rule that shares ranks out, instead of cutting a pipeline
# From a line of layers and the seconds of each one's forward on the mean microbatch to its bounds; None: impossible.
CutRule = Callable[[Track, FloatArray], tuple[int, ...] | None]
Cut = tuple[Sizing, tuple[Track, ...], Cuts]


def megatron(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """The LLM's layers evenly over all ranks, encoders in front of the first stage, a generator behind the last."""
    begin, end = _llm(track)
    return _even(track.parts, begin, end, first=0, last=track.bounds[-1])


def megatron_extra(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """The encoders as a first stage of their own, the LLM's layers evenly over the others."""
    begin, end = _llm(track)
    if begin == 0 or track.parts < 2:
        return None
    rest = _even(track.parts - 1, begin, end, first=begin, last=track.bounds[-1])
    return None if rest is None else (0, *rest)


def balanced(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """Forward and backward of the mean microbatch as even as can be over all chunks (Optimus' baseline)."""
    return min_max_partition(track.line.seconds.tolist(), track.parts)


def equal_parameters(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """As many trained parameters in every part."""
    return min_max_partition((track.line.parameters + 1e-6).tolist(), track.parts)


def equal_layers(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """As many layers in every part."""
    return min_max_partition([1.0] * len(track.line.seconds), track.parts)


def profile_only(track: Track, forward: FloatArray) -> tuple[int, ...] | None:
    """Measured forwards as even as can be: no backward, no recomputation, no messages (OmniBal's baseline)."""
    return min_max_partition(forward.tolist(), track.parts)


CUT_RULES: Mapping[str, CutRule] = {
    "megatron": megatron,
    "megatron-extra": megatron_extra,
    "balanced": balanced,
    "equal-parameters": equal_parameters,
    "equal-layers": equal_layers,
    "profile-only": profile_only,
}
BASELINES = (*CUT_RULES, FLOPS)


def _llm(track: Track) -> tuple[int, int]:
    at = track.units.index(LLM)
    return track.bounds[at], track.bounds[at + 1]


def _even(parts: int, begin: int, end: int, first: int, last: int) -> tuple[int, ...] | None:
    """Cut [begin, end) into parts of as many layers; the outer ones also have what lies from `first`, and to `last`."""
    if end - begin < parts:
        return None
    inner = np.linspace(begin, end, parts + 1).round().astype(int).tolist()
    return (first, *inner[1:-1], last) if all(a < b for a, b in pairwise(inner)) else None


@dataclass(frozen=True)
class Folklore:
    """Makes baselines of the sizes that are searched, `sizings` with their bounds."""

    sizings: Sequence[tuple[float, Sizing]]
    pricing: Pricing
    choices: Mapping[str, UnitChoices]
    machine: Hardware

    def all(self, within: float = math.inf) -> dict[str, Judged]:
        """Every baseline that is possible and fits, by name, but for those that surely take more seconds a step."""
        found = {name: self.find(name, within) for name in BASELINES}
        return {name: judged for name, judged in found.items() if judged is not None}

    def asked(self, name: str) -> Judged:
        """One baseline; PlanError where it is not possible or does not fit."""
        found = self.find(name)
        if found is None:
            raise PlanError(
                f"--baseline {name}: no plan by this rule is possible and fits; possible here: "
                f"{', '.join(self.all()) or 'none'}. Rules that cut a pipeline need `unified` plans with pp above 1, "
                f"`{FLOPS}` units on ranks of their own"
            )
        return found

    def find(self, name: str, within: float = math.inf) -> Judged | None:
        """The baseline of this name at its fastest size, simulated.

        None where it is not possible or does not fit, or by its rating takes more than `within` seconds.
        """
        looks = self._in_proportion() if name == FLOPS else self._cut_by(CUT_RULES[name])
        for look in islice(looks, LOOKS):
            rated = []
            for at, (sizing, tracks, cuts) in enumerate(look):
                rating = float(self._rater.rate(sizing, tracks, [cuts], [None] * len(tracks))[0])
                if rating <= within:
                    rated.append((rating, at, sizing, cuts))
            for _, _, sizing, cuts in sorted(rated):
                found = fitted(sizing, self.pricing, cuts, self.machine, self._rater.alive(sizing, cuts))
                if isinstance(found, Fitted):
                    return judge(found.layout, self.pricing, self.machine, memory=found.memory)
        return None

    @cached_property
    def _rater(self) -> Rater:
        """Rules share it, as they share sizes and with them orders."""
        return Rater(self.pricing, self.machine, HEAVIEST)

    def _cut_by(self, rule: CutRule) -> Iterator[list[Cut]]:
        """The `unified` sizes that look quickest, a few at a time; those of one pipeline rank have nothing to cut."""
        pipelines = [s for _, s in sorted(self.sizings, key=lambda entry: entry[0]) if s.placement == "unified"]
        found: list[Cut] = []
        for sizing in (s for s in pipelines if s.sizes[LLM].pp > 1 and not self._is_split(s)):
            (track,) = tracks_of(sizing, self.pricing, self.choices)
            cuts = rule(track, self._forward(sizing))
            if cuts is not None and is_allowed(track, cuts):
                found.append((sizing, (track,), (cuts,)))
            if len(found) == AT_ONCE:
                yield found
                found = []
        yield found

    def _in_proportion(self) -> Iterator[list[Cut]]:
        """Units on ranks of their own, as nearly as many as their FLOPs ask for as sizes come and fit."""
        apart = [s for _, s in self.sizings if s.placement == "disaggregated"]
        if not apart:
            return
        world_size = max(sizing.ranks for sizing in apart)
        bound = unit_bound(self.pricing, self.choices, self.machine)
        for sizings in in_shares(self.choices, self._shares(world_size), bound):
            found: list[Cut] = []
            for sizing in [s for s in sizings if not self._is_split(s)][:AT_ONCE]:
                tracks = tracks_of(sizing, self.pricing, self.choices)
                cuts = tuple(track.anchor for track in tracks if track.anchor is not None)
                if len(cuts) == len(tracks):
                    found.append((sizing, tracks, cuts))
            if found:
                yield found

    def _shares(self, world_size: int) -> dict[str, float]:
        """Ranks of each unit in proportion to its FLOPs on the drawn batches."""
        alone = tuple((name, 1, self.choices[LLM].batch) for name in self.choices)
        batches = range(len(self.pricing.batches.groups))
        flops = {
            name: sum(
                model_flops(self.pricing.shape, {name: self.pricing.grid(name, alone).total(batch)})
                for batch in batches
            )
            for name in self.choices
        }
        return {name: world_size * own / sum(flops.values()) for name, own in flops.items()}

    def _forward(self, sizing: Sizing) -> FloatArray:
        """(L,) seconds of each layer's forward for one microbatch of the LLM, mean over the batches."""
        own = [
            self.pricing.prices(name, size.tp, sizing.spread).mean[:, FORWARD] * sizing.counts[name]
            for name, size in sizing.sizes.items()
        ]
        return np.asarray(np.concatenate(own) / sizing.counts[LLM])

    def _is_split(self, sizing: Sizing) -> bool:
        return split_tp_group_of(sizing, self.machine.ranks_per_node) is not None


def told(name: str, baseline: Judged, fastest: float) -> Alternative:
    """A baseline in the ranking, under its name."""
    rule = "ranks shared out by FLOPs" if name == FLOPS else "cut by rule, whatever layers cost"
    return Alternative(
        summary=f"{name} baseline, {baseline.layout.summary}",
        placement=baseline.layout.placement,
        step_time_s=baseline.step_time_s,
        peak_memory_gib=round(baseline.peak_bytes / GIB, 4),
        reason=f"{baseline.step_time_s / fastest:.2f}x slower: {rule}",
    )
