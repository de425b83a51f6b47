"""Count function calls: how much Python an algorithm runs, on any machine and under any load."""

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(work: Callable[[], object]) -> int:
    """Return the number of calls, of Python and of built-in functions, that `work` makes."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    earlier = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(earlier)
    return calls
