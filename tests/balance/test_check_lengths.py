"""Lengths that are no lengths are rejected at every entry of the package, at once and with their row."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import BatchCost, ItemLengths, SampleLengths, pack_groups, rebalance
from mmtrain.balance.check_lengths import MAX_LENGTH, check_lengths
from mmtrain.balance.dispatch.node_placement import rearrange_across_nodes

NUM = 4
RANKS = np.arange(NUM) % 2
ZEROS = np.zeros(NUM, dtype=np.int64)
FIRST = np.arange(2)
ENTRIES: dict[str, Callable[[Any], object]] = {
    "tokens of samples": lambda lengths: SampleLengths(lengths, ZEROS, {}),
    "targets of samples": lambda lengths: SampleLengths(ZEROS, lengths, {}),
    "first of items": lambda lengths: ItemLengths(lengths, ZEROS, ZEROS, ZEROS, ZEROS),
    "rows of items": lambda lengths: ItemLengths(FIRST, lengths, ZEROS, ZEROS, ZEROS),
    "cols of items": lambda lengths: ItemLengths(FIRST, ZEROS, lengths, ZEROS, ZEROS),
    "tokens of items": lambda lengths: ItemLengths(FIRST, ZEROS, ZEROS, lengths, ZEROS),
    "features of items": lambda lengths: ItemLengths(FIRST, ZEROS, ZEROS, ZEROS, lengths),
    "lengths of samples": lambda lengths: rebalance(lengths, RANKS, 2, BatchCost()),
    "bytes of pieces": lambda lengths: rearrange_across_nodes(RANKS, RANKS, lengths, 2, 1),
}
BAD = {
    "-1": np.array([3, 0, -1, -2]),
    "nan": np.array([3, 0, np.nan, 1]),
    "inf": np.array([3, 0, np.inf, 1]),
    "2.5": np.array([3, 0, 2.5, 1]),
    str(MAX_LENGTH + 1): np.array([3, 0, MAX_LENGTH + 1, 1]),
    "18446744073709551615": np.array([3, 0, 2**64 - 1, 1], dtype=np.uint64),
}


@pytest.mark.parametrize("shown", BAD)
@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_rejects_what_is_no_length(name: str, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: row 2 is {shown}; allowed: whole numbers from 0 to {MAX_LENGTH}"):
        ENTRIES[name](BAD[shown])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_takes_lengths_up_to_the_limit(name: str) -> None:
    ENTRIES[name](np.array([0, 1, MAX_LENGTH, MAX_LENGTH - 1]))


def test_a_size_under_one_of_several_budgets_is_named_by_row_and_column() -> None:
    tokens = np.array([[1, 1], [1, -5]])
    with pytest.raises(ValueError, match=r"tokens of samples: row \(1, 1\) is -5"):
        pack_groups(tokens, np.array([10, 10]), np.arange(2), window=2)


def test_other_types_than_whole_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="x are of type float64; give them as int64"):
        check_lengths("x", np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="x: row 0 is one"):
        check_lengths("x", np.array(["one"]))
    check_lengths("x", np.array([]))
