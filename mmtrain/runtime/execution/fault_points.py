"""Points of a run at which tests inject faults."""

from pathlib import Path

from torch import Tensor

from mmtrain.checkpoint import LocalStorage, Storage
from mmtrain.program import Action
from mmtrain.runtime.execution.optimizer import Optimizer


class FaultPoints:
    """The points at which something can fail; nothing does here. Tests override methods.

    Steps count from 0. One object serves one rank, which `start` names.
    """

    def start(self, rank: int) -> None:
        """Handle the start of training on `rank`."""

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Handle that `optimizer` will update this rank; a fault may change what it holds."""

    def before_action(self, step: int, action: Action) -> None:
        """Handle that `action` is about to run; may end, stop or slow this process, or raise."""

    def forward_output(self, step: int, action: Action, output: Tensor) -> Tensor:
        """Return what replaces the output of a `Forward`."""
        return output

    def checkpoint_storage(self, step: int) -> Storage:
        """Return where a checkpoint after `step` steps is written to."""
        return LocalStorage()

    def node_memory(self, rank: int, folder: Path) -> Path:
        """Return the folder in the memory of a rank's node; ranks with different ones are on different nodes."""
        return folder
