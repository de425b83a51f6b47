"""What torch.profiler says of a step: for how long the device was busy, and which kernels took the time."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TOP_KERNELS = 25


@dataclass(frozen=True)
class ProfiledStep:
    """One step under the profiler."""

    busy_s: float | None  # of the device; None on a CPU
    table: str  # the kernels that took most time


def profile_step(run: Callable[[], object], trace: Path | None = None) -> ProfiledStep:
    """Run one step under the profiler; write what it recorded to `trace`, for Perfetto, host included.

    Without `trace` a GPU's kernels alone are recorded: recording the host's operators slows the host down.
    """
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    if cuda and trace is not None:
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities) as recorded:
        run()
        if cuda:
            torch.cuda.synchronize()
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=TOP_KERNELS, max_name_column_width=80)
    if not cuda:
        return ProfiledStep(None, table)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return ProfiledStep(union_length(kernels) / 1e6, table)


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans: kernels of several streams overlap.

    >>> union_length([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def synchronizing_lines(run: Callable[[], object]) -> list[str]:
    """Run one step; return the lines of code at which the host waited for the GPU, each with how often."""
    if not torch.cuda.is_available():
        run()
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts: dict[str, int] = {}
    for warning in caught:
        text = str(warning.message).splitlines()[0]
        if "synchroniz" in text.lower():
            line = f"{warning.filename}:{warning.lineno}: {text}"
            counts[line] = counts.get(line, 0) + 1
    return [f"{count} x {line}" for line, count in sorted(counts.items(), key=lambda entry: -entry[1])]
