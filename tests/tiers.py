"""Divide the cases of a test between the slow tier and the long one."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def mostly_long(cases: Iterable[Any], every: int) -> list[ParameterSet]:
    """Mark one of `every` cases `slow`, evenly spaced, and the others `long`; a tuple holds values of several names."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.long if number % every else pytest.mark.slow))
    return marked
