"""Read stated lengths: a CSV file instead of data, for planning without the data or before there is any.

    count,text,vision
    400,120,1024            # 400 samples of 120 tokens of text and one image of 1,024 patches
    100,900,7x1024 256      # 100 with seven such images and a small one
    500,2000,               # and 500 of text alone

One row is one sample, or `count` equal ones. `text` counts tokens of text. A column with the name of a unit of the
model holds the sample's items, each in tokens of that unit's blocks. These are patches of an image or 20 ms pieces of a
clip. For a generated image they are positions of its latent, or patches of the latent if the generator is a
transformer. The model determines what they become in the LLM, so a file serves for any downsampling. Encoders of one
modality have a column each, with the same number of items: all of them encode every image.
"""

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray, ItemLengths, SampleLengths
from mmtrain.data.formats.sample import Quarantined
from mmtrain.data.remote.locations import open_location
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.model_settings import STATED_LENGTHS_COLUMNS
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.source_path import SourcePath

MAX_STATED_SAMPLES = 20_000_000  # their lengths take a few gigabytes
MAX_STATED_COUNT = 10_000_000  # of samples or tokens in one cell
_COUNT_COLUMN, _TEXT_COLUMN = STATED_LENGTHS_COLUMNS


@dataclass(frozen=True)
class StatedLengths:
    """What the files state: like the index of a dataset, but without samples."""

    lengths: SampleLengths
    source: IntArray  # (S,) the number of the source that a sample is from
    quarantined: tuple[Quarantined, ...]
    sha256: str  # of the files


@dataclass(frozen=True)
class _Row:
    """One row of a file: `count` equal samples."""

    where: str  # `file:line`
    count: int
    text: int  # tokens
    items: Mapping[str, tuple[int, ...]]  # unit -> tokens of each item


@dataclass(frozen=True)
class _UsableRow:
    """A row whose samples fit into a sequence."""

    source: int
    llm_tokens: int
    row: _Row


@dataclass(frozen=True)
class _UnitRule:
    """How the tokens that are stated for a unit count in its blocks and in the LLM."""

    modality: str  # "generator" for the generator
    extra_tokens: int = 0  # that the blocks see and no file states: a class token
    extra_features: int = 0  # of them that reach the LLM
    downsampling: int = 1  # tokens that become one of the LLM, or of a generator's coarsest level
    fixed_llm_tokens: int | None = None  # of each item, where they do not depend on its size
    rows_per_token: int = 1  # rows of the item's grid for one of its tokens

    def features(self, tokens: int) -> int:
        """Return the LLM tokens of an item of `tokens` tokens."""
        if self.fixed_llm_tokens is not None:
            return self.fixed_llm_tokens
        return tokens // self.downsampling + self.extra_features


def read_stated_lengths(recipe: Recipe, sources: Sequence[SourceSettings]) -> StatedLengths:
    """Read the lengths that the sources state.

    Samples longer than the recipe allows are quarantined. Raises `DataError` with file and line: for a value that is
    not a number, for a column that belongs to no unit, and for a count that is no multiple of the model's downsampling.
    """
    units = _unit_rules(recipe)
    digest = hashlib.sha256()
    rows: list[tuple[int, _Row]] = []
    for number, source in enumerate(sources):
        text = _read_text(source.path)
        digest.update(text.encode())
        rows += [(number, row) for row in _parse_rows(text, source.path, units)]
    if sum(row.count for _, row in rows) > MAX_STATED_SAMPLES:
        raise DataError(
            f"{sources[0].path}: more than {MAX_STATED_SAMPLES:,} samples in all; divide the column `{_COUNT_COLUMN}`: "
            "a plan needs only their proportions"
        )
    max_tokens = recipe.data.sample_tokens
    usable: list[_UsableRow] = []
    quarantined: list[Quarantined] = []
    for number, row in rows:
        llm_tokens = row.text + sum(units[unit].features(n) for unit, items in row.items.items() for n in items)
        if llm_tokens <= max_tokens:
            usable.append(_UsableRow(number, llm_tokens, row))
        else:
            reason = f"{llm_tokens} LLM tokens, {row.count} times; allowed: {max_tokens}"
            path = str(sources[number].path)
            quarantined += [Quarantined(path, len(quarantined), row.where, "too_long", reason)] * row.count
    source_numbers = _repeat([u.source for u in usable], usable)
    return StatedLengths(_sample_lengths(usable, units), source_numbers, tuple(quarantined), digest.hexdigest())


def _unit_rules(recipe: Recipe) -> dict[str, _UnitRule]:
    units = {
        unit: _UnitRule(
            settings.modality,
            extra_tokens=settings.extra_tokens,
            extra_features=settings.extra_features,
            downsampling=settings.tokens_per_feature,
            fixed_llm_tokens=settings.features_per_item,
            rows_per_token=settings.cells_per_token,
        )
        for unit, settings in recipe.model.all_encoders.items()
    }
    generator = recipe.model.generator
    if generator is not None:
        coarsest = 4 ** (len(generator.widths) - 1)
        units["generator"] = _UnitRule("generator", downsampling=coarsest, fixed_llm_tokens=generator.context_tokens)
    return units


def _sample_lengths(usable: Sequence[_UsableRow], units: Mapping[str, _UnitRule]) -> SampleLengths:
    items = {}
    for name, unit in units.items():
        items_by_row = [u.row.items.get(name, ()) for u in usable]
        counts = _repeat([len(row_items) for row_items in items_by_row], usable)
        repeated = [n for row_items, u in zip(items_by_row, usable, strict=True) for n in row_items * u.row.count]
        tokens = np.array(repeated, np.int64)
        features = np.array([unit.features(int(n)) for n in tokens], np.int64)
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = tokens * unit.rows_per_token
        items[name] = ItemLengths(first, rows, np.ones_like(tokens), tokens + unit.extra_tokens, features)
    text = _repeat([u.row.text for u in usable], usable)
    return SampleLengths(_repeat([u.llm_tokens for u in usable], usable), text, items)


def _repeat(values: Sequence[int], usable: Sequence[_UsableRow]) -> IntArray:
    """Repeat a value of each row for each of its samples."""
    return np.repeat(np.array(values, np.int64), [u.row.count for u in usable])


def _read_text(path: SourcePath) -> str:
    try:
        with io.TextIOWrapper(open_location(str(path)), encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot read the lengths: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; expected a CSV file of lengths") from None


def _parse_rows(text: str, path: SourcePath, units: Mapping[str, _UnitRule]) -> list[_Row]:
    numbered = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in numbered if line]
    columns = [name.strip() for name in next(csv.reader([lines[0][1]]))] if lines else []
    known = (_COUNT_COLUMN, _TEXT_COLUMN, *units)
    has_unknown = any(name not in known for name in columns)
    has_duplicates = len(set(columns)) < len(columns)
    if _TEXT_COLUMN not in columns or has_unknown or has_duplicates:
        names = ", ".join(columns) or "nothing"
        optional = ", ".join(name for name in known if name != _TEXT_COLUMN)
        raise DataError(
            f"{path}: the columns are {names}; needed: {_TEXT_COLUMN}; allowed besides, once each: {optional} "
            "(units that the model has)"
        )
    rows = []
    for n, line in lines[1:]:
        where = f"{path}:{n}"
        row = _parse_row(_parse_cells(line, columns, where), where, units)
        _check_number_of_items(row, units)
        rows.append(row)
    return rows


def _check_number_of_items(row: _Row, units: Mapping[str, _UnitRule]) -> None:
    """Raise `DataError` if the encoders of one modality have different numbers of items."""
    first_of: dict[str, str] = {}
    for name, unit in units.items():
        first = first_of.setdefault(unit.modality, name)
        if len(row.items[name]) != len(row.items[first]):
            raise DataError(
                f"{row.where}: {first} has {len(row.items[first])} items, {name} has {len(row.items[name])}; allowed: "
                f"as many, because both encoders read {unit.modality} and encode every item of it"
            )


def _parse_cells(line: str, columns: Sequence[str], where: str) -> dict[str, str]:
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    if len(cells) != len(columns):
        raise DataError(f"{where}: {len(cells)} values for the {len(columns)} columns {', '.join(columns)}")
    return dict(zip(columns, cells, strict=True))


def _parse_row(cells: Mapping[str, str], where: str, units: Mapping[str, _UnitRule]) -> _Row:
    items = {name: _parse_items(cells.get(name, ""), f"{where}: {name}", unit) for name, unit in units.items()}
    count = _parse_number(cells.get(_COUNT_COLUMN, "1"), 1, f"{where}: {_COUNT_COLUMN}")
    text = _parse_number(cells[_TEXT_COLUMN], 0, f"{where}: {_TEXT_COLUMN}")
    return _Row(where, count, text, items)


def _parse_items(cell: str, where: str, unit: _UnitRule) -> tuple[int, ...]:
    """Return the tokens of each item of a cell such as `7x1024 256`."""
    items: list[int] = []
    for part in cell.split():
        times, x, tokens = part.rpartition("x")
        repeats = _parse_number(times, 1, where) if x else 1
        items += [_parse_number(tokens, 1, where)] * repeats
    indivisible = next((n for n in items if n % unit.downsampling), None)
    if indivisible is not None:
        raise DataError(
            f"{where}: {indivisible} tokens are not a multiple of the {unit.downsampling} that the model joins to one"
        )
    return tuple(items)


def _parse_number(text: str, minimum: int, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not minimum <= int(text) <= MAX_STATED_COUNT:
        raise DataError(f"{where}: found {text!r}; allowed: a whole number from {minimum} to {MAX_STATED_COUNT}")
    return int(text)
