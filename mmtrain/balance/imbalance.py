"""How uneven work is: padding inside a mini-batch, waiting between the replicas of a step.

Loads of zero in every replica (a modality that a step lacks) count as perfectly even: nobody waits for anybody.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups

Loads = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def pad_ratio(lengths: IntArray, groups: SampleGroups) -> float:
    """Share of a padded mini-batch that is padding, averaged over the mini-batches (OmniBal, eq. 1).

    For a mini-batch of B samples of lengths t_i: sum_i (t_max - t_i) / (t_max * B). lengths: (n,) of each sample.
    Groups are read as padded mini-batches; packed groups have no padding, whatever this says about them.
    """
    if not len(groups):
        return 0.0
    of_group = lengths[groups.samples]
    longest = np.maximum.reduceat(of_group, groups.first[:-1])
    total = np.add.reduceat(of_group, groups.first[:-1])
    return float(np.mean(1 - _share(total, longest * groups.sizes)))


def dist_ratio(loads: Loads) -> FloatArray:
    """Share of a step that replicas wait for the most loaded one, averaged over steps (OmniBal, eq. 2).

    For the N replicas of a step with loads T_i: sum_i (T_max - T_i) / (T_max * N). loads: (steps, N, m), m modalities.
    Returns (m,): each modality apart, as units on ranks of their own feel it.
    """
    most, num_replicas = loads.max(axis=1), loads.shape[1]
    waits: FloatArray = (1 - _share(loads.sum(axis=1), most * num_replicas)).mean(axis=0)
    return waits


def max_over_mean(loads: Loads) -> float:
    """Largest load over the mean load of a step, averaged over steps: step time over its ideal.

    loads: (steps, N), one summed cost per replica. 1.0 is perfect.
    """
    return float(np.mean(1 / _share(loads.sum(axis=1), loads.max(axis=1) * loads.shape[1])))


@dataclass(frozen=True)
class ImbalanceBound:
    """What single samples force on the replicas of a step, however the others are arranged."""

    dist_ratio: float  # no arrangement of the same steps gets below, mean over steps
    steps: float  # share of steps in which one sample alone exceeds the mean load
    sample: int | None  # the one that exceeds it most, where any does


def imbalance_bound(groups: SampleGroups, tokens: IntArray, num_replicas: int) -> ImbalanceBound:
    """Bound reached: how far samples that alone exceed the mean load of their step keep it from being even.

    tokens: (n,) of each sample for one unit; each run of `num_replicas` groups is a step. Only splitting such a
    sample's items over ranks helps (`split.split_long`).
    """
    whole = len(groups) // num_replicas * num_replicas
    if not whole:
        return ImbalanceBound(0.0, 0.0, None)
    of_sample = tokens[groups.samples[: groups.first[whole]]]
    largest = np.maximum.reduceat(of_sample, groups.first[:whole]).reshape(-1, num_replicas).max(axis=1)
    total = np.add.reduceat(of_sample, groups.first[:whole]).reshape(-1, num_replicas).sum(axis=1)
    mean = total / num_replicas
    least = np.maximum(largest, mean)
    forced = float(np.mean(1 - _share(mean, least)))
    over = np.where(largest > mean, 1 - _share(mean, least), 0.0)
    if not over.any():
        return ImbalanceBound(forced, 0.0, None)
    step = int(over.argmax())
    lo, hi = groups.first[step * num_replicas], groups.first[(step + 1) * num_replicas]
    here = groups.samples[lo:hi]
    return ImbalanceBound(forced, float((over > 0).mean()), int(here[tokens[here].argmax()]))


def sample_above_mean_load(loads: IntArray, num_replicas: int) -> tuple[int, float] | None:
    """The sample of a step that keeps replicas uneven however samples are arranged, and how far above the mean it is.

    loads: (k, q) what each sample adds to each load of a step. A sample that alone is more than a replica's mean load
    makes its replica the last; returned is the row of the worst one, and its load over that mean. None if there is
    none. Only splitting its items over ranks helps.
    """
    mean = loads.sum(axis=0) / num_replicas
    over = np.divide(loads, mean, out=np.zeros(loads.shape), where=mean > 0)
    if not over.size or over.max() <= 1:
        return None
    return int(over.max(axis=1).argmax()), float(over.max())


def _share(part: Loads, whole: Loads) -> FloatArray:
    """part / whole, and 1 where there is nothing to share."""
    shares: FloatArray = np.divide(part, whole, out=np.ones(np.shape(whole)), where=np.asarray(whole) > 0)
    return shares
