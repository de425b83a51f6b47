"""Record samples that could not be decoded while training."""

from collections.abc import Sequence
from typing import cast

from mmtrain.data import BadSampleTracker, Quarantined, write_quarantine
from mmtrain.runtime.run_folder import QUARANTINE_FILE
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.world import World


class QuarantineRecorder(StepHook):
    """Appends to the quarantine what any rank could not decode.

    A sample is recorded once: several ranks may hold images of it, and other ranks in another epoch. `bad_samples`
    counts on the first rank only.
    """

    def __init__(self, world: World, bad_samples: BadSampleTracker, records: RunRecords) -> None:
        self._world, self._bad_samples, self._records = world, bad_samples, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises TooManyBadSamples above `data.max_bad_rate`."""
        if not ctx.reduction.num_broken_samples:
            return
        gathered = cast(list[tuple[Quarantined, ...]], self._world.all_gather(ctx.data.quarantined))
        num_new = self._world.on_first(lambda: self._record(gathered))
        if num_new:
            self._records.note(f"step {ctx.step_number}: {num_new} samples could not be decoded, see {QUARANTINE_FILE}")

    def _record(self, gathered: Sequence[tuple[Quarantined, ...]]) -> int:
        new = self._bad_samples.record_new([entry for entries in gathered for entry in entries])
        path = self._records.run_dir / QUARANTINE_FILE
        self._records.try_write(QUARANTINE_FILE, lambda: write_quarantine(path, new, append=True))
        return len(new)
