"""Copy the run's state into the memory of its nodes, so that a run that fails goes on from a recent step."""

from collections.abc import Callable

from mmtrain.runtime.execution.peer_copies import END_WAIT_S, LAST_COPY_WAIT_S, PeerCopies
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class PeerCopying(StepHook):
    """Takes a copy every `every` steps; one that is due while the last one is under way follows that."""

    def __init__(self, copies: PeerCopies, every: int, notify: Callable[[str], None]) -> None:
        """Take copies; `notify` tells the user what concerns this rank."""
        self._copies, self._every, self._notify = copies, every, notify
        self._is_due = False
        self._has_failed = False

    def takes_copy(self, ctx: StepContext) -> bool:
        """Return whether a copy is taken after this step, equal on all ranks; there is none after the last one."""
        is_due = self._is_due or ctx.step_number % self._every == 0
        return is_due and ctx.reduction.no_rank_copies and not self._ends(ctx)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. The checkpoint of the last step has been saved."""
        if self._ends(ctx):
            self._copies.remove()
            return
        takes_copy = self.takes_copy(ctx)
        self._is_due = not takes_copy and (self._is_due or ctx.step_number % self._every == 0)
        if takes_copy:
            self._copies.finish()
            self._copies.start(ctx.step_number)
        self._tell_failure()

    def finish(self) -> None:
        """Wait for the copy that is under way, unless its peer does not come."""
        self._copies.finish(LAST_COPY_WAIT_S)

    def _ends(self, ctx: StepContext) -> bool:
        return ctx.is_last or ctx.reduction.stop_requested

    def _tell_failure(self) -> None:
        """Say once that copies have ended: no rank starts another one, as the last complete copy must stay."""
        error = self._copies.error
        if error is not None and not self._has_failed:
            self._has_failed = True
            self._notify(f"no further copies in memory are made, and a failure goes back further: {error}")

    def close(self) -> None:
        """See `StepHook`. After a failure, what is under way may wait for a rank that is gone."""
        self._copies.finish(END_WAIT_S)
