"""Columns of lengths: narrow where they are stored, 64-bit integers where they are read."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.columns import (
    CellRule,
    FilePlace,
    GridColumn,
    LengthColumn,
    SourceValues,
    StoredColumn,
    sha256_of,
)

RULES = (CellRule(), CellRule(partial=3, per_token=4, extra=1), CellRule(always=64))


def write_column(file: Path, values: np.ndarray, dtype: str = "<u1") -> StoredColumn:
    """Return a column mapped from a file whose first bytes are another's."""
    file.write_bytes(b"\1" * 7 + values.astype(dtype).tobytes())
    return StoredColumn.mapped(FilePlace(file, 7, dtype, len(values)))


@given(st.lists(st.integers(0, 1 << 40), max_size=20))
def test_a_narrow_column_reads_as_the_array_that_it_was_made_of(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    column = StoredColumn.narrowed("x", array)
    assert np.asarray(column).dtype == np.int64
    assert column.tolist() == values
    assert len(column) == len(values)
    assert (column.sum(), column.max()) == (sum(values), max(values, default=0))
    assert column.sha256 == sha256_of(array)
    assert column[1::2].tolist() == values[1::2]
    assert column[array > 9].tolist() == [value for value in values if value > 9]
    if values:
        assert column[-1] == values[-1]
        assert column[np.int64(0)] == values[0]
        assert column[[0, 0]].tolist() == [values[0]] * 2


def test_a_column_takes_as_few_bytes_as_its_largest_number_needs() -> None:
    for largest, num_bytes in ((255, 1), (256, 2), (65_536, 4), (1 << 32, 8)):
        assert StoredColumn.narrowed("x", np.array([0, largest])).stored.itemsize == num_bytes
    with pytest.raises(ValueError, match="x: row 1 is -1"):
        StoredColumn.narrowed("x", np.array([0, -1]))


def test_what_is_read_does_not_overflow_and_arithmetic_on_a_whole_column_is_refused() -> None:
    column = StoredColumn(np.array([200, 250], dtype=np.uint8))
    assert (column[:] * column[:]).tolist() == [40_000, 62_500]
    assert column.sum() == 450
    with pytest.raises(TypeError):
        np.arange(2) + column  # type: ignore[operator]
    with pytest.raises(TypeError):
        np.maximum(column, 1)  # type: ignore[call-overload]


def test_a_mapped_column_is_sent_as_its_place(tmp_path: Path) -> None:
    values = np.arange(100_000) % 200
    column = write_column(tmp_path / "column", values)
    assert column.sum() == values.sum()
    sent = pickle.dumps(column)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert "facts" in received.__dict__, "the receiver need not read all rows"
    assert np.array_equal(received[:], values)
    assert write_column(tmp_path / "empty", values[:0]).tolist() == []
    in_memory = pickle.loads(pickle.dumps(StoredColumn.narrowed("x", values)))
    assert np.array_equal(in_memory[:], values)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_computed_from_grids(rule: CellRule) -> None:
    rng = np.random.default_rng(0)
    sides = rng.integers(1, 200, (2, 50))
    rows, cols = (StoredColumn.narrowed("x", side) for side in sides)
    column = GridColumn(rows, cols, rule)
    expected = rule.tokens(sides[0] * sides[1])
    assert np.array_equal(column[:], expected)
    assert column[3] == expected[3]
    assert (column.sum(), column.max()) == (expected.sum(), expected.max())
    others = [GridColumn(rows, cols, other) for other in RULES if other != rule]
    assert column.sha256 not in [other.sha256 for other in others]


def test_values_of_sources_are_read_by_sample() -> None:
    values = SourceValues(StoredColumn(np.array([0, 1, 1], dtype=np.uint8)), np.array([0.5, 2.0]))
    assert values.tolist() == [0.5, 2.0, 2.0]
    assert values[np.array([2, 0])].tolist() == [2.0, 0.5]
    assert np.asarray(values).sum() == 4.5
    assert isinstance(values.sources, LengthColumn)
