"""Index tables of a microbatch: which rows its layers gather, and where they put them.

They follow from the lengths alone. So the thread that prepares a step computes them, and they come to the device with
its payload; computed in a forward, each makes the device wait for a copy.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostTable: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float32]
HostTables: TypeAlias = dict[str, HostTable]


@runtime_checkable
class TableUser(Protocol):
    """A layer that needs index tables."""

    def index_tables(self, context: Any) -> HostTables:
        """Compute the tables of a microbatch on the host, by name; a name means the same table in all layers."""


def brought_or_computed(
    brought: Mapping[str, Tensor] | None, compute: Callable[[], HostTables], device: torch.device
) -> Mapping[str, Tensor]:
    """Return the tables that came with a microbatch; if none came, compute them, and let the device wait for them."""
    if brought is not None:
        return brought
    return {name: torch.from_numpy(table).to(device) for name, table in compute().items()}
