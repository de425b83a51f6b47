import threading
from pathlib import Path

from mmtrain.program import Step
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.resilience.failures import read_failures, stacks_path
from mmtrain.runtime.resilience.watchdog import Watchdog
from mmtrain.runtime.run_state import read_run_state

DEADLINE_S = 5.0


class _End:
    """Stands where the process would end."""

    def __init__(self) -> None:
        self.report, self.came = "", threading.Event()

    def __call__(self, report: str) -> None:
        self.report = report
        self.came.set()


def test_all_ranks_report_when_one_has_found_that_nothing_moves(tmp_path: Path) -> None:
    now = [0.0]
    stuck, busy = Activity(clock=lambda: now[0]), Activity(clock=lambda: 0.0)
    stuck.start("loading data")
    busy.start(Step())
    ends = [_End(), _End()]
    with (
        Watchdog(stuck, 1.0, tmp_path, 0, 2, ends[0]),
        Watchdog(busy, 1.0, tmp_path, 1, 2, ends[1]),
    ):
        assert not ends[0].came.wait(0.6), "not before its time"
        now[0] = 1.0
        assert all(end.came.wait(DEADLINE_S) for end in ends)
    assert {f.rank for f in read_failures(tmp_path)} == {0, 1}
    for rank in (0, 1):
        assert "test_all_ranks_report" in stacks_path(tmp_path, rank).read_text()
    assert ends[0].report.startswith("rank 0, in `loading data`: made no progress for 1 s\n  secondary: rank 1")
    assert ends[1].report == "", "one rank speaks for all"
    assert read_run_state(tmp_path)["error"] == ends[0].report


def test_a_timeout_of_zero_watches_nothing(tmp_path: Path) -> None:
    end = _End()
    with Watchdog(Activity(clock=iter(range(10**6)).__next__), 0.0, tmp_path, 0, 1, end):
        assert not end.came.is_set()
    assert read_failures(tmp_path) == []
