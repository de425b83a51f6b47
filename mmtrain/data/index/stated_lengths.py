"""Lengths that are stated instead of read: a CSV file, for planning without the data, or without any data yet.

    count,text,vision
    400,120,1024            # 400 samples of 120 tokens of text and one image of 1,024 patches
    100,900,7x1024 256      # 100 with seven such images and a small one
    500,2000,               # and 500 of text alone

One row is one sample, or `count` like ones; `text` is tokens of text; a column named as a unit of the model holds the
sample's items, each in tokens of that unit's blocks: patches of an image, 20 ms pieces of a clip, positions of the
latent of a generated image (of its patches, in a transformer). What they become in the LLM follows from the model, so a
file serves for any downsampling.
"""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmtrain.balance.batch_meta import IntArray, ItemLengths, SampleLengths
from mmtrain.data.formats.sample import Quarantined
from mmtrain.errors import DataError
from mmtrain.recipe.schema import Recipe, SourceSettings

MAX_STATED_SAMPLES = 20_000_000
MAX_STATED_COUNT = 10_000_000  # of anything counted in one row
_COUNT, _TEXT = "count", "text"


@dataclass(frozen=True)
class StatedLengths:
    """What files state: like the index of a dataset, but without samples."""

    lengths: SampleLengths
    source: IntArray  # (S,) which of the sources a sample is from
    quarantined: tuple[Quarantined, ...]
    sha256: str  # of the files


@dataclass(frozen=True)
class _Row:
    """Some equal samples."""

    where: str  # `file:line`
    count: int
    text: int
    items: Mapping[str, tuple[int, ...]]  # unit -> tokens of each item


@dataclass(frozen=True)
class _Unit:
    """How a unit's items count in the LLM."""

    extra: int = 0  # tokens that its blocks see and no file states: a class token
    joins: int = 1  # tokens that become one of the LLM, or of the coarsest level
    always: int | None = None  # LLM tokens of an item, where they do not depend on it
    rows: int = 1  # rows of the item's grid for one of its tokens

    def features(self, tokens: int) -> int:
        """LLM tokens of an item of so many tokens."""
        return tokens // self.joins if self.always is None else self.always


def read_stated_lengths(recipe: Recipe, sources: Sequence[SourceSettings]) -> StatedLengths:
    """Read what the sources state.

    Samples longer than the recipe allows are set aside. Raises `DataError` with file and line for what is no number,
    a column that belongs to no unit of the model, or a count that the model's downsampling does not divide.
    """
    units = _units(recipe)
    digest = hashlib.sha256()
    rows: list[tuple[int, _Row]] = []
    for number, source in enumerate(sources):
        text = _text(source.path)
        digest.update(text.encode())
        rows += [(number, row) for row in _rows(text, source.path, units)]
    if sum(row.count for _, row in rows) > MAX_STATED_SAMPLES:
        raise DataError(
            f"{sources[0].path}: more than {MAX_STATED_SAMPLES:,} samples in all; divide the column `{_COUNT}`: "
            "a plan needs their proportions"
        )
    limit = min(recipe.data.max_sample_tokens or recipe.data.seq_len, recipe.data.seq_len)
    used: list[tuple[int, int, _Row]] = []
    aside: list[Quarantined] = []
    for number, row in rows:
        tokens = row.text + sum(units[name].features(n) for name, items in row.items.items() for n in items)
        if tokens <= limit:
            used.append((number, tokens, row))
        else:
            why = f"{tokens} LLM tokens, {row.count} times; allowed: {limit}"
            aside += [Quarantined(str(sources[number].path), len(aside), row.where, "too_long", why)] * row.count
    return StatedLengths(
        _lengths(used, units), _repeated([n for n, _, _ in used], used), tuple(aside), digest.hexdigest()
    )


def _units(recipe: Recipe) -> dict[str, _Unit]:
    model = recipe.model
    units = {}
    if model.vision is not None:
        units["vision"] = _Unit(extra=int(model.vision.class_token), joins=model.vision.merge**2)
    if model.audio is not None:
        units["audio"] = _Unit(joins=model.audio.downsample, rows=2)
    if model.generator is not None:
        coarsest = 4 ** (len(model.generator.widths) - 1)
        units["generator"] = _Unit(joins=coarsest, always=model.generator.context_tokens)
    return units


def _lengths(used: Sequence[tuple[int, int, _Row]], units: Mapping[str, _Unit]) -> SampleLengths:
    items = {}
    for name, unit in units.items():
        stated = [row.items.get(name, ()) for _, _, row in used]
        counts = _repeated([len(own) for own in stated], used)
        tokens = np.array([n for own, (_, _, row) in zip(stated, used, strict=True) for n in own * row.count], np.int64)
        features = np.array([unit.features(int(n)) for n in tokens], np.int64)
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        items[name] = ItemLengths(first, tokens * unit.rows, np.ones_like(tokens), tokens + unit.extra, features)
    text = _repeated([row.text for _, _, row in used], used)
    return SampleLengths(_repeated([tokens for _, tokens, _ in used], used), text, items)


def _repeated(values: Sequence[int], used: Sequence[tuple[int, int, _Row]]) -> IntArray:
    return np.repeat(np.array(values, np.int64), [row.count for _, _, row in used])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot read the lengths: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; expected a CSV file of lengths") from None


def _rows(text: str, path: Path, units: Mapping[str, _Unit]) -> list[_Row]:
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    columns = [name.strip() for name in next(csv.reader([lines[0][1]]))] if lines else []
    known = (_COUNT, _TEXT, *units)
    wrong = [name for name in columns if name not in known]
    if _TEXT not in columns or wrong or len(set(columns)) < len(columns):
        found = ", ".join(columns) or "nothing"
        raise DataError(
            f"{path}: the columns are {found}; needed: {_TEXT}; allowed besides, once each: "
            f"{', '.join(name for name in known if name != _TEXT)} (units that the model has)"
        )
    return [_row(_cells(line, columns, f"{path}:{n}"), f"{path}:{n}", units) for n, line in lines[1:]]


def _cells(line: str, columns: Sequence[str], where: str) -> dict[str, str]:
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    if len(cells) != len(columns):
        raise DataError(f"{where}: {len(cells)} values for the {len(columns)} columns {', '.join(columns)}")
    return dict(zip(columns, cells, strict=True))


def _row(cells: Mapping[str, str], where: str, units: Mapping[str, _Unit]) -> _Row:
    items = {name: _items(cells.get(name, ""), f"{where}: {name}", unit) for name, unit in units.items()}
    count = _number(cells.get(_COUNT, "1"), 1, f"{where}: {_COUNT}")
    return _Row(where, count, _number(cells[_TEXT], 0, f"{where}: {_TEXT}"), items)


def _items(cell: str, where: str, unit: _Unit) -> tuple[int, ...]:
    """The items of `7x1024 256`."""
    found: list[int] = []
    for part in cell.split():
        times, x, tokens = part.rpartition("x")
        found += [_number(tokens, 1, where)] * (_number(times, 1, where) if x else 1)
    uneven = next((n for n in found if n % unit.joins), None)
    if uneven is not None:
        raise DataError(f"{where}: {uneven} tokens are not a multiple of the {unit.joins} that the model joins to one")
    return tuple(found)


def _number(text: str, least: int, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= MAX_STATED_COUNT:
        raise DataError(f"{where}: found {text!r}; allowed: a whole number from {least} to {MAX_STATED_COUNT}")
    return int(text)
