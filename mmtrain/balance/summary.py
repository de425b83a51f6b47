"""What lengths look like, and how well a grouping evens them out: figures for people, from lengths alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups
from mmtrain.balance.imbalance import ImbalanceBound, dist_ratio, imbalance_bound, max_over_mean, pad_ratio
from mmtrain.balance.methods import GroupingMethod

NUM_BINS = 16
_SKEWED = 20.0  # largest over median, above which bins grow geometrically


@dataclass(frozen=True)
class LengthDistribution:
    """How one measure varies over the samples that have any of it."""

    name: str  # what is counted, "LLM tokens"
    samples: int  # that have any
    total: float
    mean: float
    median: float
    p95: float
    largest: float
    edges: tuple[float, ...]  # (bins + 1,) of the histogram
    counts: tuple[int, ...]  # (bins,) samples in [edge, next edge), the last one with its end


@dataclass(frozen=True)
class LengthSummary:
    """A dataset's lengths."""

    samples: int
    spreads: tuple[LengthDistribution, ...]
    correlation: tuple[tuple[float | None, ...], ...]  # Pearson's over all samples; None where one is constant


@dataclass(frozen=True)
class GroupingScore:
    """One method's grouping of an epoch: a row of OmniBal's Table 3."""

    method: GroupingMethod
    groups: int
    mean_batch: float  # samples a group
    fill: float  # LLM tokens over what groups could hold
    pad_ratio: float | None  # what padding its mini-batches would waste; None for methods that do without
    dist_ratio: dict[str, float]  # unit -> share of a step that its replicas would wait for the most loaded one
    bounds: dict[str, ImbalanceBound]  # unit -> what single samples force on that
    max_over_mean: float  # of all units' tokens together
    seconds: float


def summarize_lengths(names: Sequence[str], values: npt.NDArray[np.float64] | IntArray) -> LengthSummary:
    """Summarise (samples, measures) values; a measure that is 0 for a sample is one it has nothing of."""
    spreads = tuple(_spread(name, column[column > 0]) for name, column in zip(names, values.T, strict=True))
    centred = values - values.mean(axis=0) if len(values) else values
    scale = np.sqrt((centred**2).sum(axis=0))
    correlation = tuple(
        tuple(
            float(centred[:, i] @ centred[:, j] / (scale[i] * scale[j])) if scale[i] * scale[j] > 0 else None
            for j in range(len(names))
        )
        for i in range(len(names))
    )
    return LengthSummary(len(values), spreads, correlation)


def score_grouping(
    method: GroupingMethod,
    groups: SampleGroups,
    units: Sequence[str],
    tokens: IntArray,
    seq_len: int,
    num_replicas: int,
    seconds: float,
) -> GroupingScore:
    """Judge an epoch's groups: each run of `num_replicas` groups is what replicas compute side by side.

    tokens: (n, units) of each sample, the LLM's first. What does not fill the last run is left out of the ratios.
    """
    loads = groups.loads(tokens)
    whole = len(loads) // num_replicas * num_replicas
    steps = loads[:whole].reshape(-1, num_replicas, len(units))
    waits: FloatArray = dist_ratio(steps) if whole else np.zeros(len(units))
    return GroupingScore(
        method,
        len(groups),
        float(groups.sizes.mean()),
        float(loads[:, 0].mean() / seq_len),
        pad_ratio(tokens[:, 0], groups) if method in ("random", "length", "device") else None,
        dict(zip(units, waits.tolist(), strict=True)),
        {unit: imbalance_bound(groups, tokens[:, i], num_replicas) for i, unit in enumerate(units)},
        max_over_mean(steps.sum(axis=2)) if whole else 1.0,
        seconds,
    )


def _spread(name: str, values: npt.NDArray[np.float64] | IntArray) -> LengthDistribution:
    if not len(values):
        return LengthDistribution(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, (), ())
    median, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    edges = _edges(values, median)
    counts, _ = np.histogram(values, edges)
    total = float(values.sum())
    return LengthDistribution(
        name,
        len(values),
        total,
        total / len(values),
        median,
        p95,
        float(values.max()),
        tuple(edges.tolist()),
        tuple(counts.tolist()),
    )


def _edges(values: npt.NDArray[np.float64] | IntArray, median: float) -> FloatArray:
    """Bins over all values: whole ones if the values are, and growing where a few are much larger than most."""
    least, largest = float(values.min()), float(values.max())
    whole = bool((values == np.floor(values)).all())
    end = largest + 1 if whole else largest if largest > least else least + 1
    if largest > _SKEWED * median:
        edges = np.geomspace(least, end, NUM_BINS + 1)
        edges = np.unique(np.round(edges)) if whole else edges
    elif whole:
        step = max(1, np.ceil((end - least) / NUM_BINS))
        edges = np.arange(least, end + step, step)
    else:
        edges = np.linspace(least, end, NUM_BINS + 1)
    edges[0], edges[-1] = least, max(edges[-1], end)  # rounding must leave none outside
    return edges
