"""End a run whose folder another run has taken."""

from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class FolderGuard(StepHook):
    """Ends the run on all ranks in the same step, before anything else writes."""

    def __init__(self, claim: FolderClaim) -> None:
        self._claim = claim

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises FolderTaken."""
        if ctx.reduction.lost_folder:
            self._claim.require()
