"""`StepLoads`: what is particular to one step, for a program that is fixed for the run."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.costs.types import TokenLoad
from mmtrain.program.graph import Microbatch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Route:
    """Which rows of which source microbatch go where in which destination microbatch, for one pair of units.

    One entry a span (an item): rows [src_offset, src_offset + length) of the features of `src` become rows
    [dst_offset, dst_offset + length) of the features that `dst` receives.
    """

    spans: dict[tuple[Microbatch, Microbatch], IntArray]  # (src, dst) -> (k, 3): src_offset, dst_offset, length

    def rows(self, src: Microbatch, dst: Microbatch) -> int:
        """Feature rows that travel from `src` to `dst`."""
        spans = self.spans.get((src, dst))
        return 0 if spans is None else int(spans[:, 2].sum())


@dataclass(frozen=True)
class StepLoads:
    """A load for every microbatch and a route for every pair of units that exchange data."""

    loads: dict[Microbatch, TokenLoad]
    routes: dict[tuple[str, str], Route]  # (source unit, destination unit)
    rows_out: dict[Microbatch, int]  # rows that leave the unit's last layer (features of an encoder)
