"""Give ranks of this machine a core each, a slow link for collectives, and a clock that other programs do not move.

Cores that other programs share run a rank's work at some fraction of the time. The clock here counts the processor time
of the thread that computes, and what it waits for the link, but not for a core. So `mmtrain profile` measures costs as
on a machine of our own, and `mmtrain train` leaves the seconds of each action of each step in a file. The link itself
takes its time on the clock of the wall too.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.slow_link import COLLECTIVES, SlowLink

PROFILED_S = 0.1  # of each mode of a layer: this clock knows no waiting for a core, so few rounds are enough
MEGABYTES_PER_S = 400.0  # of the link, as in `bench_tp_overlap`
CARRIED = (*COLLECTIVES, "all_gather", "all_to_all_single")


@dataclass
class CoreClock:
    """The processor time of this thread, and its waits for the link."""

    waited_s: float = 0.0  # for the link
    _link_free_s: float = 0.0  # when the link has carried what was started so far

    def now(self) -> float:
        """Return the seconds so far."""
        return time.thread_time() + self.waited_s

    def carry(self, seconds: float) -> float:
        """Let the link carry something behind what it carries already; return when that ends."""
        self._link_free_s = max(self.now(), self._link_free_s) + seconds
        return self._link_free_s

    def reach(self, end_s: float) -> None:
        """Wait for the link."""
        self.waited_s += max(0.0, end_s - self.now())


@dataclass
class RecordedRank:
    """What a rank leaves behind: the clock's seconds of its actions, step by step."""

    folder: Path
    steps: list[list[float]] = field(default_factory=list)

    def add(self, record: Any, rank: int) -> None:
        """Add a step and write the file."""
        self.steps.append([action.end_s - action.start_s for action in record.actions])
        content = {"steps": self.steps, **core_usage()}
        (self.folder / f"rank-{rank}.json").write_text(json.dumps(content), encoding="utf-8")


def link_ranks(folder: Path, bytes_per_s: float = MEGABYTES_PER_S * 1e6) -> None:
    """Change this process, and those that it forks, so that mmtrain runs its ranks so; ranks write into `folder`.

    To be called before Megatron-core is imported, which keeps the collectives under names of its own.
    """
    clock = CoreClock()
    link = SlowLink(bytes_per_s=bytes_per_s, clock=clock)
    link.carry(*CARRIED)
    link.carry_coalesced()

    from mmtrain.runtime.execution import recorder
    from mmtrain.runtime.execution.executor import Executor
    from mmtrain.runtime.profiling import layer_profiler, message_profiler, profile

    def start_clock(host_clock: Any) -> None:
        host_clock.mark = clock.now

    recorder.HostClock.__init__ = start_clock  # type: ignore[assignment, method-assign]
    layer_profiler.MODE_BUDGET_S = PROFILED_S
    profile.time = SimpleNamespace(**{**vars(time), "perf_counter": clock.now})  # type: ignore[assignment, attr-defined]
    message_profiler._now_s = lambda device: clock.now()
    recorded = RecordedRank(folder)
    run_step = Executor.run

    def run(executor: Executor, step: Any) -> Any:
        import torch.distributed as dist

        if not recorded.steps:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
        outcome = run_step(executor, step)
        recorded.add(outcome.record, dist.get_rank())
        return outcome

    Executor.run = run  # type: ignore[assignment, method-assign]


def core_usage() -> dict[str, float]:
    """Return the seconds that this process's threads ran, and those that they waited for a core."""
    rows = [path.read_text(encoding="ascii").split() for path in Path("/proc/self/task").glob("*/schedstat")]
    ran, waited = (sum(int(row[column]) for row in rows) / 1e9 for column in (0, 1))
    return {"ran_s": ran, "waited_s": waited}
