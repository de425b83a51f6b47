"""Which source of the recipe each sample is of, what reports call it, and how often training uses its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mmtrain.balance.columns import Lengths, SampleValues, SourceValues, row_blocks
from mmtrain.balance.grouping.mixture import Mixture, mixture_phases
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import SourceSettings


@dataclass(frozen=True)
class SampleSources:
    """The sources of a dataset's samples."""

    numbers: Lengths  # (S,) of each sample's source, in the recipe's order
    names: tuple[str, ...]  # of the sources, all different

    @classmethod
    def of(cls, sources: Sequence[SourceSettings], numbers: Lengths) -> "SampleSources":
        """Name each source by as many of the last parts of its path as tell it from the others."""
        paths = [source.path.parts for source in sources]
        for num_parts in range(1, max(map(len, paths), default=0) + 1):
            names = ["/".join(parts[-num_parts:]) for parts in paths]
            if len(set(names)) == len(names):
                return cls(numbers, tuple(names))
        return cls(numbers, tuple(f"{i}: {source.path}" for i, source in enumerate(sources)))

    @cached_property
    def num_samples(self) -> list[int]:
        """Count the samples of each source."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for numbers in row_blocks(self.numbers):
            counts += np.bincount(numbers, minlength=len(counts))
        num_samples: list[int] = counts.tolist()
        return num_samples


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
    for source, schedule, count in zip(sources, shares, named.num_samples, strict=True):
        if not count and any(schedule.values()):
            raise DataError(
                f"data.sources: {source.path} has share {max(schedule.values()):g} and no usable sample; mend it, or "
                "remove it and set the other shares anew"
            )
    return Mixture(named.numbers, mixture_phases(shares), unit)


def sample_uses(
    weights: SourceValues, named: SampleSources, mixture: Mixture | None, tokens: Lengths, num_steps: int
) -> SampleValues | None:
    """Return (S,) how often training uses each sample, in proportion; None if all alike."""
    if mixture is not None:
        return mixture.uses(tokens, num_steps)
    occurring = weights.values[np.array(named.num_samples) > 0]
    return None if (occurring == occurring[:1]).all() else weights
