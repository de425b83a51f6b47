"""Divide the cases of a test between two tiers."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def mostly_long(cases: Iterable[Any], every: int) -> list[ParameterSet]:
    """Mark one of `every` cases `slow`, evenly spaced, and the others `long`; a tuple holds values of several names."""
    return _marked(cases, every, [pytest.mark.slow])


def quick_and_long(cases: Iterable[Any], every: int) -> list[ParameterSet]:
    """Leave one of `every` cases in the quick tier, evenly spaced, and mark the others `long`.

    Of a product, an `every` without a factor in common with the lengths of its axes leaves each value of each axis.
    """
    return _marked(cases, every, [])


def _marked(cases: Iterable[Any], every: int, marks: list[pytest.MarkDecorator]) -> list[ParameterSet]:
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.long] if number % every else marks))
    return marked
