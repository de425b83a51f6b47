"""Guard against steps whose gradient is not finite."""

import json

from mmtrain.data import DataIndex
from mmtrain.durable_files import append_line
from mmtrain.errors import RunError
from mmtrain.runtime.run_folder import SKIPPED_STEPS_FILE
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class NonFiniteGuard(StepHook):
    """Names the samples of a step whose gradient was not finite; gives up after `max_nonfinite_steps` in a row.

    The optimizer has changed no weight in such a step, on any rank.
    """

    def __init__(self, index: DataIndex, records: RunRecords, max_nonfinite_steps: int) -> None:
        self._index, self._records, self._max_nonfinite_steps = index, records, max_nonfinite_steps
        self._num_bad_steps = 0  # in a row

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises RunError after too many bad steps."""
        if ctx.outcome.stepped:
            self._num_bad_steps = 0
            return
        self._num_bad_steps += 1
        grad_norm = ctx.outcome.grad_norm
        self._records.note(
            f"step {ctx.step_number}: the gradient norm is {grad_norm}; no weight was changed, "
            f"samples in {SKIPPED_STEPS_FILE}"
        )
        if self._records.is_first:
            samples = [self._index.samples[number].id for number in ctx.data.meta.sample_id]
            entry = {"step": ctx.step_number, "grad_norm": str(grad_norm), "samples": samples}
            path = self._records.run_dir / SKIPPED_STEPS_FILE
            self._records.try_write(SKIPPED_STEPS_FILE, lambda: append_line(path, json.dumps(entry)))
        if self._num_bad_steps >= self._max_nonfinite_steps:
            raise RunError(
                f"step {ctx.step_number}: the gradient norm was not finite in {self._max_nonfinite_steps} steps in a "
                f"row (train.max_nonfinite_steps); the weights are those before them. {SKIPPED_STEPS_FILE} in "
                f"{self._records.run_dir} names their samples; look at those, at the learning rate and at "
                "train.precision. `--resume-from last-good --skip-steps "
                f"{ctx.step_number - self._max_nonfinite_steps + 1}-{ctx.step_number}` continues without them"
            )
