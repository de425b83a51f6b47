"""Requests for tests of the loader, and steps as comparable values."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mmtrain.data import DataIndex, GroupStream, PayloadNeed, StepData
from mmtrain.recipe.settings.schema import Recipe

Dataset = Callable[..., tuple[Recipe, DataIndex, GroupStream]]
DP = {"vision": 1, "llm": 2}
ONE, TWO = (dict.fromkeys(DP, n) for n in (1, 2))  # microbatches
EVERYTHING = (
    PayloadNeed("vision", 0, media=True),
    PayloadNeed("llm", 0, ids=True, labels=True),
    PayloadNeed("llm", 1, ids=True, labels=True),
)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a step, with its path."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}[{key}]")
    elif isinstance(value, np.ndarray):
        yield path, (value.dtype.name, value.shape, value.tobytes())
    else:
        yield path, value


def same(left: StepData, right: StepData) -> bool:
    return list(leaves(left)) == list(leaves(right))
