"""Choose what each group of a step should hold of its coarsest load: whole units, the same in a row where possible."""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.matched.group_exchange import ROUNDING

MIN_ROUNDING_SHARE = 1e-4  # of a step's load: where the unit of a load is finer, whole units need no care
UNITS_PER_FINE_GROUP = 1000  # finer loads are counted in thousandths of a group's mean
MIN_COARSE_SHARE = 0.01  # of a group's mean load: smaller units are fine
MIN_DENSITY_RATIO = 1.2  # of dense to light samples, in load per token: below it all count as dense
LIGHT_QUANTILE = 0.1  # of the samples, by load per token; the dense ones begin as far from the other end
USABLE_LIGHT_SHARE = 0.95  # of the LLM tokens of light samples: the rest fills gaps in other rows
MAX_LACK_SHARE = 0.015  # of a row's load, that groups which cannot reach the row's target may lack together
MAX_TARGETS_TRIED = 64  # of a row
MIN_SAMPLES_PER_GROUP = 2  # of a row, that alone have the units of its target
MAX_MISSING_SHARE = 1 / 6  # of a row's groups, that have a unit less than the others: all may have the same target
CAP_ROUNDING = 0.15  # of a unit: samples of many tokens per unit make room that the mean sample does not


def load_unit(load: IntArray) -> int:
    """Return the greatest common divisor of the loads (k,) of samples, at least 1: whole images make loads coarse."""
    return max(int(np.gcd.reduce(load)), 1) if len(load) else 1


@dataclass(frozen=True)
class CoarseLoad:
    """The coarsest load of a step's samples, in units, beyond what as many tokens of light samples have.

    Light samples are those with little of the load, such as texts beside images. Groups have about as many tokens each,
    so what is even in these units is even in the load.
    """

    units: IntArray  # (k,) of each sample; near 0 for light ones
    tokens: IntArray  # (k,) LLM tokens of each sample
    is_light: np.ndarray  # (k,) bool
    unit: int  # of the load
    is_coarse: bool  # whether single units matter
    light_density: float  # units per token that `units` leave out

    @classmethod
    def of(cls, load: IntArray, tokens: IntArray, num_groups: int) -> "CoarseLoad":
        """Return the units of a load (k,) that is not zero in all samples."""
        mean = int(load.sum()) // num_groups
        unit = load_unit(load)
        if unit >= MIN_COARSE_SHARE * mean:
            units = load // unit
            return cls(units, tokens, units == 0, unit, True, 0.0)
        unit = max(mean // UNITS_PER_FINE_GROUP, 1)
        units = load // unit
        density = units / np.maximum(tokens, 1)
        light, dense = np.quantile(density, [LIGHT_QUANTILE, 1 - LIGHT_QUANTILE]).tolist()
        if dense < MIN_DENSITY_RATIO * light:
            return cls(units, tokens, np.zeros(len(units), dtype=bool), unit, False, 0.0)
        left_out = np.floor(light * tokens).astype(np.int64)
        return cls(units - left_out, tokens, density < (light + dense) / 2, unit, False, light)

    @property
    def tokens_per_unit(self) -> float:
        """LLM tokens that come with a unit of the load."""
        is_dense = ~self.is_light
        return max(float(self.tokens[is_dense].sum()) / max(int(self.units[is_dense].sum()), 1), 1e-9)


def row_targets(load: CoarseLoad, num_groups: int, num_replicas: int) -> IntArray:
    """Return (G,) the units that each group of a step should have; each run of `num_replicas` is a row.

    A long light sample leaves its group little room for the load. The longest ones share rows with low targets: such a
    row gets the largest target of which its groups lack at most `MAX_LACK_SHARE`, but none that light samples do not
    suffice to complete. A sample that alone exceeds the mean has rows with high targets. All other rows are at the
    mean; where it is not whole, at the two whole numbers beside it.
    """
    per_group = float(load.tokens.sum()) / num_groups
    lightest = _LightSamples(load, per_group, num_replicas)
    targets = np.zeros(num_groups, dtype=np.int64)
    units_left = int(load.units.sum())
    first, end = 0, num_groups
    heavy = np.sort(load.units)[::-1]
    while end > num_replicas:
        heaviest = int(heavy[num_groups - end : num_groups - end + 1].sum())
        reachable = min(heaviest, int(per_group / load.tokens_per_unit))
        if reachable <= units_left / end + 1 or reachable * num_replicas > units_left:
            break
        targets[end - num_replicas : end] = reachable
        units_left -= reachable * num_replicas
        end -= num_replicas
    while end - first > num_replicas:
        row = lightest.next_row(units_left // (end - first))
        if row is None:
            break
        targets[first : first + num_replicas] = row
        units_left -= int(row.sum())
        first += num_replicas
    targets[first:end] = _near_mean(units_left, (end - first) // num_replicas, num_replicas)
    targets[first : first + num_replicas] = _under_caps(targets[first : first + num_replicas], lightest.caps())
    return targets


class _LightSamples:
    """The light samples of a step, longest first, and how many units their groups have room for."""

    def __init__(self, load: CoarseLoad, tokens_per_group: float, num_replicas: int) -> None:
        self._lengths = np.sort(load.tokens[load.is_light])[::-1].astype(np.float64)
        self._sums = np.concatenate([[0.0], np.cumsum(self._lengths)])
        self._tokens_per_unit = load.tokens_per_unit
        self._tokens_per_group = tokens_per_group
        self._num_replicas = num_replicas
        self._first = 0
        units, counts = np.unique(load.units, return_counts=True)
        self._frequent_units = units[counts >= MIN_SAMPLES_PER_GROUP * num_replicas]
        self._several_units = int(units[-1]) + 1 if load.is_coarse else 0
        self._tokens_left = USABLE_LIGHT_SHARE * float(self._sums[-1])

    def caps(self) -> FloatArray:
        """(R,) units for which groups have room beside the longest samples that are left, one in each."""
        caps = np.full(self._num_replicas, np.inf)
        lengths = self._lengths[self._first : self._first + self._num_replicas]
        room = (self._tokens_per_group - lengths) / self._tokens_per_unit
        caps[: len(lengths)] = np.maximum(np.floor(room + CAP_ROUNDING), 0)
        return caps

    def next_row(self, mean: int) -> IntArray | None:
        """Return (R,) the targets of the next low row, and use up its light samples; None if no row needs to be low.

        mean: whole units of each group that is left.
        """
        caps = self.caps()
        if caps[0] >= mean:
            return None
        tokens_per_replica = self._tokens_left / self._num_replicas
        least = int(np.ceil((self._tokens_per_group - tokens_per_replica) / self._tokens_per_unit))
        candidates = np.arange(max(least, 1), mean)
        candidates = candidates[self._is_reachable(candidates)]
        candidates = candidates[:: -(-len(candidates) // MAX_TARGETS_TRIED) or 1]
        lack = np.maximum(candidates[:, None] - caps, 0).sum(axis=1) / (candidates * self._num_replicas)
        possible = np.flatnonzero(lack <= MAX_LACK_SHARE)
        target = int(candidates[possible[-1]]) if len(possible) else max(int(caps[0]), least, 0)
        if target >= mean:
            return None
        row = np.minimum(target, caps).astype(np.int64)
        used = float((self._tokens_per_group - self._tokens_per_unit * row).sum())
        self._tokens_left -= used
        after = int(np.searchsorted(self._sums, self._sums[min(self._first, len(self._lengths))] + used))
        self._first = min(max(self._first + self._num_replicas, after), len(self._lengths))
        return row

    def _is_reachable(self, candidates: IntArray) -> np.ndarray:
        """(c,) whether enough groups can have so many units: by a single sample, or by several."""
        return (candidates >= self._several_units) | np.isin(candidates, self._frequent_units)


def adapt_targets(units: IntArray, targets: IntArray, num_replicas: int) -> IntArray:
    """Return (G,) targets that suit what groups have after exchanges: `units` (G,), as many in total.

    Where few samples have one unit, more groups can have 12 and 14 units than 13. So the groups are sorted, and each
    row is at its mean. Rows with groups that lack something keep their targets.
    """
    rows = targets.reshape(-1, num_replicas)
    is_free = rows.max(axis=1) - rows.min(axis=1) <= 1
    groups = np.flatnonzero(np.repeat(is_free, num_replicas))
    order = groups[np.argsort(units[groups], kind="stable")]
    means = units[order].reshape(-1, num_replicas).mean(axis=1)
    new = np.floor(means + ROUNDING).astype(np.int64)
    whole_rows, rest = divmod(int(targets[groups].sum()) - int(new.sum()) * num_replicas, num_replicas)
    if not 0 <= whole_rows < max(len(new), 1):  # groups have not come near their targets
        return targets
    by_fraction = np.argsort(new - means, kind="stable")
    new[by_fraction[:whole_rows]] += 1
    new_targets = targets.copy()
    of_groups = np.repeat(new, num_replicas)
    if rest:
        row = by_fraction[whole_rows] * num_replicas
        of_groups[row + num_replicas - rest : row + num_replicas] += 1
    new_targets[order] = of_groups
    return new_targets


def raise_to_row(targets: IntArray, num_replicas: int) -> IntArray:
    """Return (G,) targets at which few groups of a row are not a unit below the others: they may have as much.

    A group with too much makes its whole row wait, one with too little costs its own lack. So groups that could have a
    unit more are where others bring what they have too much.
    """
    rows = targets.reshape(-1, num_replicas)
    highest = rows.max(axis=1, keepdims=True)
    is_raised = (rows == highest - 1) & (
        (rows < highest).sum(axis=1, keepdims=True) <= MAX_MISSING_SHARE * num_replicas
    )
    raised: IntArray = np.where(is_raised, highest, rows).ravel()
    return raised


def _near_mean(units: int, num_rows: int, num_replicas: int) -> IntArray:
    """(rows * R,) targets that add up to `units`: the same in a row, but for what cannot be divided."""
    per_replica, rest = divmod(units, num_replicas)
    sums = np.round(np.arange(num_rows + 1) * (per_replica / num_rows)).astype(np.int64)
    targets = np.repeat(np.sort(np.diff(sums)), num_replicas)
    targets[num_replicas - rest : num_replicas] += 1
    return targets


def _under_caps(row: IntArray, caps: FloatArray) -> IntArray:
    """Move what passes the caps (R,) of a row's groups to its other groups, as evenly as possible."""
    if (row <= caps).all():
        return row
    total = int(row.sum())
    level = int(row.max())
    while np.minimum(level, caps).sum() < total:
        if (caps <= level).all():
            return row
        level += 1
    capped = np.minimum(level - 1, caps).astype(np.int64)
    raised = np.flatnonzero(caps >= level)[::-1][: total - int(capped.sum())]
    capped[raised] += 1
    return capped
