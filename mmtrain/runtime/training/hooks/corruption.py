"""Look for weights and optimizer state that changed by themselves, before anything of them is saved."""

import json
from collections.abc import Callable
from dataclasses import replace

from mmtrain.durable_files import append_line
from mmtrain.errors import StateCorrupted
from mmtrain.runtime.execution.activity import CHECKING
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.execution.state_sums import StateSums
from mmtrain.runtime.run_folder import CORRUPTION_FILE
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook

CHECKED_STATE = "checked_step"  # key of the state of checkpoints: the step after which the state was last checked


class CorruptionCheck(StepHook):
    """Checks the sums around all updates every `every` steps, and before each checkpoint.

    So what a run saves has passed a check, and its newest checkpoint is one to go back to.
    """

    def __init__(
        self,
        rank_context: RankContext,
        first_step: int,
        every: int,
        finish_saves: Callable[[], None],
        saves: Callable[[StepContext], bool],
        records: RunRecords,
        has_mixed_devices: bool,
    ) -> None:
        """Watch what was loaded, from the state after `first_step` steps on. All ranks call this together.

        `saves` says whether a checkpoint or a copy in memory follows a step. `finish_saves` waits for those of earlier
        steps, which had passed: they must not go on beside what follows an error. Devices of several kinds may round
        the same update otherwise.

        Raises StateCorrupted where ranks have loaded different state.
        """
        self._every, self._finish_saves, self._saves = every, finish_saves, saves
        self._records = records
        self._activity = rank_context.activity
        self._activity.start(CHECKING)
        held = list(rank_context.optimizer.held())
        if has_mixed_devices:
            held = [replace(one, replicas=()) if one.changes == "by update" else one for one in held]
        self._sums = StateSums(held, rank_context.world, first_step)
        self._check(first_step)
        rank_context.optimizer.watch_state(self._sums)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises StateCorrupted."""
        if ctx.is_due(self._every) or self._saves(ctx):
            self._activity.start(CHECKING)
            self._check(ctx.step_number)

    def _check(self, step: int) -> None:
        checked_step = self._sums.checked_step
        problem = self._sums.check(step)
        if problem is None:
            return
        self._finish_saves()
        if self._records.is_first:
            line = json.dumps({"step": step, "checked_step": checked_step, "problem": problem})
            path = self._records.run_dir / CORRUPTION_FILE
            self._records.try_write(CORRUPTION_FILE, lambda: append_line(path, line))
        raise StateCorrupted(
            f"step {step}: weights or optimizer state have changed by themselves: {problem}. Do not trust the "
            "memory, the processors and the network of that machine: take it out, or test it. `--resume` goes back to "
            "the newest checkpoint, which has passed a check",
            checked_step,
        )
