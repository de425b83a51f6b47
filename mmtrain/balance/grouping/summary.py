"""Summarize lengths for people, and score how evenly a grouping method spreads them over replicas."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray, ItemLengths, SampleLengths
from mmtrain.balance.columns import Lengths, row_blocks
from mmtrain.balance.grouping.imbalance import ImbalanceBound, dist_ratio, imbalance_bound, max_over_mean, pad_ratio
from mmtrain.balance.grouping.methods import GroupingMethod
from mmtrain.balance.grouping.pack_groups import SampleGroups

NUM_HISTOGRAM_BINS = 16
NUM_SHARE_BINS = 20  # of 5% each
MIN_DEVIATION = 1e-9  # of shares; equal ones have less, by rounding
SKEWED_MAX_OVER_MEDIAN = 20.0  # above it the bins of a histogram grow geometrically


@dataclass(frozen=True)
class LengthDistribution:
    """How one measure varies over the samples that have some of it."""

    name: str  # what is counted: "LLM tokens"
    samples: int  # that have some
    total: float
    mean: float
    median: float
    p95: float
    largest: float
    edges: tuple[float, ...]  # (bins + 1,) of the histogram
    counts: tuple[int, ...]  # (bins,) samples in [edge, next edge); the last bin includes its end


@dataclass(frozen=True)
class LengthSummary:
    """A dataset's lengths."""

    samples: int
    spreads: tuple[LengthDistribution, ...]
    correlation: tuple[tuple[float | None, ...], ...]  # Pearson's over all samples; None where a measure is constant


@dataclass(frozen=True)
class LongSamples:
    """The samples that have more LLM tokens than one of the ranks that share the longest sequences computes."""

    ranks: int  # that share a sequence of `data.seq_len` tokens
    most_tokens: int  # of one of them
    samples: float  # share of the samples that are longer
    tokens: float  # share of the LLM's tokens that are in them

    @classmethod
    def count(cls, tokens: Lengths, seq_len: int, ranks: int) -> "LongSamples":
        """Count those of samples with `tokens` (S,), at most `seq_len` each."""
        most_tokens = -(-seq_len // ranks)
        num_long = tokens_in_long = 0
        for block in row_blocks(tokens):
            long = block[block > most_tokens]
            num_long += len(long)
            tokens_in_long += int(long.sum())
        return cls(ranks, most_tokens, num_long / len(tokens), tokens_in_long / int(tokens.sum()))


@dataclass(frozen=True)
class CompositionShare:
    """Which share of a sample's LLM tokens is of one unit's items, or text, over the samples (OrchMLLM, figure 3)."""

    unit: str  # an encoder, the generator, or `text`
    of_all_tokens: float  # share of the tokens of all samples together
    mean: float  # of the samples' shares, like all below
    deviation: float
    p5: float
    median: float
    p95: float
    without: float  # share of the samples that have none of it
    counts: tuple[int, ...]  # samples by share, in equal bins from 0 to 1


@dataclass(frozen=True)
class SourceSummary:
    """One source, and what training uses of it."""

    name: str
    samples: int  # usable ones
    tokens: int  # of the LLM, in these samples
    token_shares: dict[int, float]  # first step -> share of the tokens that steps use from there on
    passes: float  # over the source, in all steps of the run


@dataclass(frozen=True)
class GroupingScore:
    """How good one method's grouping of an epoch is: a row of OmniBal's Table 3."""

    method: GroupingMethod
    groups: int
    mean_batch: float  # samples in a group
    fill: float  # LLM tokens over what the groups could hold
    pad_ratio: float | None  # what padding its mini-batches would waste; None for methods that pack
    dist_ratio: dict[str, float]  # unit -> share of a step that replicas wait for the most loaded one
    bounds: dict[str, ImbalanceBound]  # unit -> the imbalance that single samples force
    max_over_mean: float  # of all units' tokens together
    seconds: float


@dataclass(frozen=True)
class IsfScore:
    """How good ISF's grouping of an epoch is, with other rules than the recipe's."""

    rounds: int
    slack: float  # share of the LLM's budget that a full group may lack
    encoder_slack: float  # the same of an encoder's budget
    score: GroupingScore  # its pad ratio is that of mini-batches which are padded instead of packed


def summarize_lengths(names: Sequence[str], values: npt.NDArray[np.float64] | IntArray) -> LengthSummary:
    """Summarize values (samples, measures); a sample whose value is 0 has nothing of that measure."""
    spreads = tuple(_distribution(name, column[column > 0]) for name, column in zip(names, values.T, strict=True))
    centered = values - values.mean(axis=0) if len(values) else values
    scale = np.sqrt((centered**2).sum(axis=0))

    def correlation(i: int, j: int) -> float | None:
        product = scale[i] * scale[j]
        return float(centered[:, i] @ centered[:, j] / product) if product > 0 else None

    measures = range(len(names))
    return LengthSummary(len(values), spreads, tuple(tuple(correlation(i, j) for j in measures) for i in measures))


def composition_shares(lengths: SampleLengths) -> list[CompositionShare]:
    """Return for each unit with items, then for text, how its share of the LLM tokens varies over the samples.

    Samples without tokens are left out. Features of several encoders of one modality count as each encoder's own. Empty
    where all samples are composed alike.
    """
    tokens = {unit: _features_of_samples(items) for unit, items in lengths.items.items()}
    of_samples: IntArray = np.asarray(lengths.tokens, dtype=np.int64)
    tokens["text"] = of_samples - sum(tokens.values())
    used = of_samples > 0
    total = of_samples[used]
    shares = [_composition_share(unit, of_unit[used], total) for unit, of_unit in tokens.items()] if len(total) else []
    return shares if any(share.deviation > MIN_DEVIATION for share in shares) else []


def _features_of_samples(items: ItemLengths) -> IntArray:
    """Return (S,) the LLM tokens that the items of each sample become."""
    before = np.concatenate([[0], np.cumsum(np.asarray(items.features))])
    features: IntArray = np.diff(before[np.asarray(items.first)])
    return features


def _composition_share(unit: str, tokens: IntArray, total: IntArray) -> CompositionShare:
    """Summarize the shares of samples with `tokens` (S,) of a unit among `total` (S,)."""
    shares = tokens / total
    p5, median, p95 = np.quantile(shares, [0.05, 0.5, 0.95]).tolist()
    counts, _ = np.histogram(shares, NUM_SHARE_BINS, (0.0, 1.0))
    return CompositionShare(
        unit=unit,
        of_all_tokens=float(tokens.sum() / total.sum()),
        mean=float(shares.mean()),
        deviation=float(shares.std()),
        p5=p5,
        median=median,
        p95=p95,
        without=float((tokens == 0).mean()),
        counts=tuple(counts.tolist()),
    )


def score_grouping(
    method: GroupingMethod,
    groups: SampleGroups,
    units: Sequence[str],
    tokens: IntArray,
    seq_len: int,
    num_replicas: int,
    seconds: float,
) -> GroupingScore:
    """Score an epoch's groups, where replicas compute each run of `num_replicas` groups side by side.

    tokens: (n, units) of each sample, the LLM's first. Groups that do not fill the last run are left out of the ratios.
    """
    loads = groups.loads(tokens)
    num_whole = len(loads) // num_replicas * num_replicas
    steps = loads[:num_whole].reshape(-1, num_replicas, len(units))
    waiting: FloatArray = dist_ratio(steps) if num_whole else np.zeros(len(units))
    return GroupingScore(
        method=method,
        groups=len(groups),
        mean_batch=float(groups.sizes.mean()),
        fill=float(loads[:, 0].mean() / seq_len),
        pad_ratio=pad_ratio(tokens[:, 0], groups) if method in ("random", "length", "device") else None,
        dist_ratio=dict(zip(units, waiting.tolist(), strict=True)),
        bounds={unit: imbalance_bound(groups, tokens[:, i], num_replicas) for i, unit in enumerate(units)},
        max_over_mean=max_over_mean(steps.sum(axis=2)) if num_whole else 1.0,
        seconds=seconds,
    )


def _distribution(name: str, values: npt.NDArray[np.float64] | IntArray) -> LengthDistribution:
    if not len(values):
        return LengthDistribution(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, (), ())
    median, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    edges = _histogram_edges(values, median)
    counts, _ = np.histogram(values, edges)
    total = float(values.sum())
    return LengthDistribution(
        name=name,
        samples=len(values),
        total=total,
        mean=total / len(values),
        median=median,
        p95=p95,
        largest=float(values.max()),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def _histogram_edges(values: npt.NDArray[np.float64] | IntArray, median: float) -> FloatArray:
    """Bins over all values: whole numbers if the values are, and growing where a few values are much larger."""
    smallest, largest = float(values.min()), float(values.max())
    is_whole = bool((values == np.floor(values)).all())
    end = largest + 1 if is_whole or largest == smallest else largest
    if largest > SKEWED_MAX_OVER_MEDIAN * median:
        edges = np.geomspace(smallest, end, NUM_HISTOGRAM_BINS + 1)
        edges = np.unique(np.round(edges)) if is_whole else edges
    elif is_whole:
        step = max(1, np.ceil((end - smallest) / NUM_HISTOGRAM_BINS))
        edges = np.arange(smallest, end + step, step)
    else:
        edges = np.linspace(smallest, end, NUM_HISTOGRAM_BINS + 1)
    edges[0], edges[-1] = smallest, max(edges[-1], end)  # rounding must leave no value outside
    return edges
