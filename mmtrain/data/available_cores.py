"""Count the processor cores that this process may use."""

import os
from collections.abc import Mapping

CORE_COUNT_VARIABLE = "PYTHON_CPU_COUNT"  # Python's own, which reads it from 3.13 on


def num_available_cores(env: Mapping[str, str] = os.environ) -> int:
    """Return how many cores this process may use: `PYTHON_CPU_COUNT`, else those that the system lets it run on.

    In a container with a quota of processor time the system shows all cores of the machine; the variable says how many
    are meant.
    """
    stated = env.get(CORE_COUNT_VARIABLE, "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
