"""Measure what a tracker costs: processor time of a step in the training's thread, and in the whole process.

python -m scripts.bench_trackers [--steps 1000]
"""

import argparse
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from mmtrain.report import RunLog, StepMetrics, TimeSplit
from mmtrain.report.trackers import TrackedRun, TrackerFeeds
from mmtrain.report.trackers.open_trackers import TRACKERS

PAUSE_S = 0.002  # between steps: far faster ones than any training has


def step(number: int) -> StepMetrics:
    split = TimeSplit(compute=0.355, wait=0.1, communication=0.025, data=0.02)
    return StepMetrics(number, 4.0, 0.81, 3e-4, 0.5, 22, 6150, 0.3, 0.031, 2e12, split, 3 * 2**29)


def measure(name: str | None, num_steps: int, run_dir: Path) -> tuple[float, float]:
    """Return milliseconds of a step in the training's thread and in the process, after the tracker has started."""
    run = TrackedRun("bench001", "bench", run_dir, 1, "", "{}", "", {"train.steps": num_steps})
    openers = {} if name is None else {name: TRACKERS[name].open}
    feeds = TrackerFeeds(run, openers, print)
    with RunLog(run_dir, 1, enabled=True) as log:
        log.step(step(1))
        feeds.more()
        while name is not None and not feeds.last_steps()[name]:
            time.sleep(PAUSE_S)
        process_s, thread_s = time.process_time(), 0.0
        for number in range(2, num_steps + 2):
            start_s = time.thread_time()
            log.step(step(number))
            feeds.more(is_last=number == num_steps + 1)
            thread_s += time.thread_time() - start_s
            time.sleep(PAUSE_S)
        feeds.close()
        process_s = time.process_time() - process_s
    return 1e3 * thread_s / num_steps, 1e3 * process_s / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    num_steps = parser.parse_args().steps
    for name in (None, *TRACKERS, None):
        if name is not None and find_spec(TRACKERS[name].package) is None:
            print(f"{name}: not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            thread_ms, process_ms = measure(name, num_steps, Path(folder))
        print(
            f"{name or 'no tracker'}: {thread_ms:.3f} ms in the training's thread, {process_ms:.3f} ms in the process"
        )


if __name__ == "__main__":
    main()
