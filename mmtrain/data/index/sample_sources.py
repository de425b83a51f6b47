"""Which source of the recipe each sample is of, what reports call it, and how often training uses its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping.mixture import Mixture, mixture_phases
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import SourceSettings


@dataclass(frozen=True)
class SampleSources:
    """The sources of a dataset's samples."""

    numbers: IntArray  # (S,) of each sample's source, in the recipe's order
    names: tuple[str, ...]  # of the sources, all different

    @classmethod
    def of(cls, sources: Sequence[SourceSettings], numbers: IntArray) -> "SampleSources":
        """Name each source by as many of the last parts of its path as tell it from the others."""
        paths = [source.path.parts for source in sources]
        for num_parts in range(1, max(map(len, paths), default=0) + 1):
            names = ["/".join(parts[-num_parts:]) for parts in paths]
            if len(set(names)) == len(names):
                return cls(numbers, tuple(names))
        return cls(numbers, tuple(f"{i}: {source.path}" for i, source in enumerate(sources)))


def find_mixture(
    sources: Sequence[SourceSettings], named: SampleSources, unit: Literal["tokens", "samples"]
) -> Mixture | None:
    """Return the mixture of sources that have shares; None where weights hold.

    Raises DataError for a source without samples that is to make up a share.
    """
    schedules = [source.share for source in sources]
    shares = [schedule for schedule in schedules if schedule is not None]
    if not shares:
        return None
    num_samples = np.bincount(named.numbers, minlength=len(sources)).tolist()
    for source, schedule, count in zip(sources, shares, num_samples, strict=True):
        if not count and any(schedule.values()):
            raise DataError(
                f"data.sources: {source.path} has share {max(schedule.values()):g} and no usable sample; mend it, or "
                "remove it and set the other shares anew"
            )
    return Mixture(named.numbers, mixture_phases(shares), unit)


def sample_uses(weights: FloatArray, mixture: Mixture | None, tokens: IntArray, num_steps: int) -> FloatArray | None:
    """Return (S,) how often training uses each sample, in proportion; None if all alike."""
    if mixture is not None:
        return mixture.uses(tokens, num_steps)
    return None if (weights == weights[0]).all() else weights
