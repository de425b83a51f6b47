"""Measure how uneven work is: padding inside a mini-batch, waiting between the replicas of a step.

A load that is zero in every replica (a modality that a step lacks) counts as perfectly even, since nobody waits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping.pack_groups import SampleGroups

Loads = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def pad_ratio(lengths: IntArray, groups: SampleGroups) -> float:
    """Return the share of a padded mini-batch that is padding, mean over the mini-batches.

    For a mini-batch of B samples of lengths t_i: sum_i (t_max - t_i) / (t_max * B) (OmniBal, arXiv 2407.20761, eq. 1).
    lengths: (n,) of each sample. Every group is read as a padded mini-batch, although packed groups have no padding.
    """
    if not len(groups):
        return 0.0
    lengths = lengths[groups.samples]
    longest = np.maximum.reduceat(lengths, groups.first[:-1])
    total = np.add.reduceat(lengths, groups.first[:-1])
    return float(np.mean(1 - _share(total, longest * groups.sizes)))


def dist_ratio(loads: Loads) -> FloatArray:
    """Return (m,) by modality the share of a step that replicas wait for the most loaded one, mean over the steps.

    For the N replicas of a step with loads T_i: sum_i (T_max - T_i) / (T_max * N) (OmniBal, eq. 2). loads: (steps, N,
    m). Modalities are measured apart, as units on ranks of their own see them.
    """
    largest, num_replicas = loads.max(axis=1), loads.shape[1]
    waiting: FloatArray = (1 - _share(loads.sum(axis=1), largest * num_replicas)).mean(axis=0)
    return waiting


def max_over_mean(loads: Loads) -> float:
    """Return the largest load of a step over the mean load, mean over the steps: step time over its ideal.

    loads: (steps, N), one summed cost for each replica. 1.0 is perfect.
    """
    return float(np.mean(1 / _share(loads.sum(axis=1), loads.max(axis=1) * loads.shape[1])))


@dataclass(frozen=True)
class ImbalanceBound:
    """The imbalance that single samples force on the replicas of a step, however the others are arranged."""

    dist_ratio: float  # mean over steps; no arrangement of the same steps has less
    steps: float  # share of steps in which one sample alone exceeds the mean load
    sample: int | None  # the one that exceeds it most, if any does


def imbalance_bound(groups: SampleGroups, tokens: IntArray, num_replicas: int) -> ImbalanceBound:
    """Compute how uneven steps must be because one of their samples alone exceeds the mean load.

    tokens: (n,) of each sample for one unit; each run of `num_replicas` groups is a step. Only ranks that share such a
    sample help (`parallel.llm.cp`).
    """
    num_groups = len(groups) // num_replicas * num_replicas  # in whole steps
    if num_groups == 0:
        return ImbalanceBound(0.0, 0.0, None)
    step_tokens = tokens[groups.samples[: groups.first[num_groups]]]
    starts = groups.first[:num_groups]
    largest = np.maximum.reduceat(step_tokens, starts).reshape(-1, num_replicas).max(axis=1)
    total = np.add.reduceat(step_tokens, starts).reshape(-1, num_replicas).sum(axis=1)
    mean = total / num_replicas
    least_possible_max = np.maximum(largest, mean)
    waiting = 1 - _share(mean, least_possible_max)
    forced = np.where(largest > mean, waiting, 0.0)
    if not forced.any():
        return ImbalanceBound(float(np.mean(waiting)), 0.0, None)
    worst = int(forced.argmax())
    samples = groups.samples[groups.first[worst * num_replicas] : groups.first[(worst + 1) * num_replicas]]
    worst_sample = int(samples[tokens[samples].argmax()])
    return ImbalanceBound(float(np.mean(waiting)), float((forced > 0).mean()), worst_sample)


def sample_above_mean_load(loads: IntArray, num_replicas: int) -> tuple[int, float] | None:
    """Find the sample of a step that keeps its replicas uneven, however samples are arranged.

    loads: (k, q) what each sample adds to each load of a step. A sample that alone exceeds the mean load of a replica
    makes its replica the last one. Returns the row of the worst sample and its load over that mean, or None if there is
    no such sample. Only ranks that share it help (`parallel.llm.cp`).
    """
    mean = loads.sum(axis=0) / num_replicas
    ratio = np.divide(loads, mean, out=np.zeros(loads.shape), where=mean > 0)
    if not ratio.size or ratio.max() <= 1:
        return None
    return int(ratio.max(axis=1).argmax()), float(ratio.max())


def _share(part: Loads, whole: Loads) -> FloatArray:
    """part / whole, and 1 where the whole is zero."""
    shares: FloatArray = np.divide(part, whole, out=np.ones(np.shape(whole)), where=np.asarray(whole) > 0)
    return shares
