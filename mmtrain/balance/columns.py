"""Columns of lengths that all processes of a machine share: narrow in a mapped file, 64-bit integers when read.

A billion samples with an image each are 25 GB of columns in the page cache, once for a machine. As arrays of 64-bit
integers they were 112 GB in every rank.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from mmtrain.balance.check_lengths import check_lengths

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Rows: TypeAlias = "slice | Sequence[int] | npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]"

BLOCK_ROWS = 1 << 20  # read at a time where all rows are needed: 8 MiB


class ColumnFacts(NamedTuple):
    """What is known of all rows of a column together."""

    total: int
    largest: int  # 0 without rows
    sha256: str  # see `LengthColumn.sha256`


class FilePlace(NamedTuple):
    """Where the rows of a column are in a file."""

    path: Path
    offset: int  # bytes
    dtype: str
    num_rows: int


class LengthColumn(ABC):
    """Whole numbers, one for each row, of which reading copies the rows that are asked for.

    What is read is int64, so that neither sum nor product overflows the type in which the column is stored.
    `numpy.asarray` copies all rows; arithmetic on the column itself raises TypeError, because it would do so unnoticed.
    """

    __array_ufunc__ = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, rows: Rows) -> IntArray: ...

    @overload
    def __getitem__(self, rows: "int | np.integer[Any]") -> int: ...
    @overload
    def __getitem__(self, rows: Rows) -> IntArray: ...
    def __getitem__(self, rows: "int | np.integer[Any] | Rows") -> int | IntArray:
        if isinstance(rows, int | np.integer):
            return int(self._read(np.array([rows]))[0])
        return self._read(rows)

    def __array__(self, dtype: "npt.DTypeLike | None" = None, copy: bool | None = None) -> npt.NDArray[Any]:
        whole = self._read(slice(None))
        return whole if dtype is None else whole.astype(dtype)

    def tolist(self) -> list[int]:
        """Return all rows as Python integers."""
        rows: list[int] = self._read(slice(None)).tolist()
        return rows

    @cached_property
    def facts(self) -> ColumnFacts:
        """Find what holds for all rows; reads them once, block by block."""
        total, largest, digest = 0, 0, hashlib.sha256()
        for block in row_blocks(self):
            total += int(block.sum())
            largest = max(largest, int(block.max()))
            digest.update(block.tobytes())
        return ColumnFacts(total, largest, digest.hexdigest())

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the rows as 64-bit integers, or of all that they are computed from."""
        return self.facts.sha256

    def sum(self) -> int:
        """Return the sum of all rows."""
        return self.facts.total

    def max(self) -> int:
        """Return the largest of all rows."""
        return self.facts.largest


Lengths: TypeAlias = IntArray | LengthColumn


class StoredColumn(LengthColumn):
    """A column in the narrowest type that holds it, in memory or mapped from a file that does not change any more."""

    def __init__(
        self, stored: "npt.NDArray[np.integer[Any]]", place: FilePlace | None = None, facts: ColumnFacts | None = None
    ) -> None:
        """Hold the rows `stored`, which are those at `place` if that is given."""
        self.stored = stored
        self._place = place
        if facts is not None:
            self.__dict__["facts"] = facts

    @classmethod
    def narrowed(cls, name: str, values: IntArray) -> "StoredColumn":
        """Copy lengths into the narrowest type. Raises ValueError, with `name`, for lengths that are none."""
        check_lengths(name, values)
        return cls(values.astype(np.min_scalar_type(int(values.max(initial=0)))))

    @classmethod
    def mapped(cls, place: FilePlace, facts: ColumnFacts | None = None) -> "StoredColumn":
        """Map the rows at `place`; processes that map the same file share its pages. Raises OSError, ValueError."""
        if not place.num_rows:
            return cls(np.empty(0, dtype=place.dtype), place, facts)
        rows = np.memmap(place.path, place.dtype, "r", place.offset, (place.num_rows,))
        return cls(rows.view(np.ndarray), place, facts)

    def __len__(self) -> int:
        return len(self.stored)

    def _read(self, rows: Rows) -> IntArray:
        return self.stored[rows].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file again
        facts = self.__dict__.get("facts")
        if self._place is not None:
            return StoredColumn.mapped, (self._place, facts)
        return StoredColumn, (self.stored, None, facts)


@dataclass(frozen=True)
class CellRule:
    """How the cells of an item's grid become its tokens: (rows * cols + partial) // per_token + extra."""

    partial: int = 0
    per_token: int = 1
    extra: int = 0
    always: int | None = None  # the tokens of every item, whatever its grid

    def tokens(self, cells: IntArray) -> IntArray:
        """Return the tokens of items with so many cells."""
        if self.always is not None:
            return np.full_like(cells, self.always)
        return (cells + self.partial) // self.per_token + self.extra


class GridColumn(LengthColumn):
    """Tokens of items, computed from their grids when they are read."""

    def __init__(self, rows: LengthColumn, cols: LengthColumn, rule: CellRule) -> None:
        """Apply `rule` to grids of so many `rows` and `cols`."""
        self._rows, self._cols, self._rule = rows, cols, rule

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Rows) -> IntArray:
        return self._rule.tokens(self._rows[rows] * self._cols[rows])

    @cached_property
    def facts(self) -> ColumnFacts:
        """Find what holds for all rows."""
        total, largest = 0, 0
        for block in row_blocks(self):
            total += int(block.sum())
            largest = max(largest, int(block.max()))
        return ColumnFacts(total, largest, self.sha256)

    @property
    def sha256(self) -> str:
        """Return that of grids and rule."""
        content = (self._rows.sha256, self._cols.sha256, self._rule)
        return hashlib.sha256(repr(content).encode()).hexdigest()


class SourceValues:
    """A number for every sample that is the same for all samples of a source."""

    def __init__(self, sources: Lengths, values: FloatArray) -> None:
        """Give each sample the entry of `values` that its number in `sources` (S,) names."""
        self.sources = sources
        self.values = values

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, samples: Rows) -> FloatArray:
        return self.values[self.sources[samples]]

    def __array__(self, dtype: "npt.DTypeLike | None" = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[slice(None)].astype(dtype or np.float64, copy=False)

    def tolist(self) -> list[float]:
        """Return the numbers of all samples."""
        numbers: list[float] = self[slice(None)].tolist()
        return numbers


SampleValues: TypeAlias = FloatArray | SourceValues


def row_blocks(column: Lengths) -> Iterator[IntArray]:
    """Return all rows in blocks of at most `BLOCK_ROWS`."""
    return (column[rows] for rows in block_slices(len(column)))


def block_slices(num_rows: int) -> Iterator[slice]:
    """Yield slices of at most `BLOCK_ROWS` that cover all rows."""
    for start in range(0, num_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, num_rows))


def sha256_of(column: Lengths) -> str:
    """Return the SHA-256 of a column, or of an array with the same rows."""
    return column.sha256 if isinstance(column, LengthColumn) else StoredColumn(column).sha256
