"""Where failures can be placed: tests hand in a `Faults` of their own, runs use this one, in which nothing fails."""

from torch import Tensor

from mmtrain.checkpoint import LocalStorage, Storage
from mmtrain.program import Action


class Faults:
    """The moments of a run at which something can fail; here nothing does.

    Steps count from 0. An object is used in one rank only, and `begin` tells it in which.
    """

    def begin(self, rank: int) -> None:
        """Training starts on `rank`."""

    def before(self, step: int, action: Action) -> None:
        """`action` is about to run; the object may end, stop or slow this process, or raise."""

    def computed(self, step: int, action: Action, output: Tensor) -> Tensor:
        """Return what counts as the output of a `Forward`."""
        return output

    def storage(self, step: int) -> Storage:
        """Return where a checkpoint after `step` steps is written to."""
        return LocalStorage()
