"""Points of a run at which tests inject faults."""

from torch import Tensor

from mmtrain.checkpoint import LocalStorage, Storage
from mmtrain.program import Action


class FaultPoints:
    """The moments of a run at which something can fail; here nothing does.

    Steps count from 0. An object is used in one rank only, and `start` tells it in which.
    """

    def start(self, rank: int) -> None:
        """Training starts on `rank`."""

    def before_action(self, step: int, action: Action) -> None:
        """`action` is about to run; the object may end, stop or slow this process, or raise."""

    def forward_output(self, step: int, action: Action, output: Tensor) -> Tensor:
        """Return what counts as the output of a `Forward`."""
        return output

    def checkpoint_storage(self, step: int) -> Storage:
        """Return where a checkpoint after `step` steps is written to."""
        return LocalStorage()
