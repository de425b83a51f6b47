"""Read entries by the names that a source's `columns` gives: `{messages: data.turns}` reads ours from theirs."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mmtrain.errors import DataError

_MAX_SHOWN_KEYS = 20
_MAX_DEPTH = 4  # of the objects in an entry whose keys are listed


class ColumnPaths:
    """Renames keys of entries, and remembers which of the paths no entry had."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Read the key `target` of each entry from the path `columns[target]`; other keys stay."""
        self.columns = dict(columns)
        self._unseen = set(columns)
        self._first_keys: tuple[str, ...] | None = None  # of the first entry

    def rename(self, entry: Any) -> Any:
        """Return an entry with our keys. A path that it does not have is a key that it does not have."""
        if not self.columns or not isinstance(entry, dict):
            return entry
        if self._first_keys is None:
            self._first_keys = tuple(paths_of(entry))
        renamed = {key: value for key, value in entry.items() if key not in self.columns}
        for path in self.columns.values():
            renamed.pop(self.root(path, entry), None)
        for target, path in self.columns.items():
            value = find_value(entry, path)
            if value is not None:
                renamed[target] = value
                self._unseen.discard(target)
        return renamed

    @staticmethod
    def root(path: str, names: Mapping[str, Any] | Sequence[str]) -> str:
        """Return which of the keys at the top of an entry a path starts at; a key may hold dots itself."""
        return path if path in names else path.partition(".")[0]

    def check_seen(self, where: str) -> None:
        """Raise `DataError` for a path that no entry had: without it, media would be missed silently."""
        if self._first_keys is None:
            return
        for target in sorted(self._unseen):
            path = self.columns[target]
            nearest = get_close_matches(path, self._first_keys, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            shown = ", ".join(self._first_keys[:_MAX_SHOWN_KEYS])
            raise DataError(f"{where}: columns.{target} is {path}, which no sample has; the first has {shown}{hint}")


def find_value(entry: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none. Parts that are numbers count in lists, from 0.

    >>> find_value({"data": {"turns": [["a", "b"]]}}, "data.turns.0.1")
    'b'
    """
    if isinstance(entry, dict) and path in entry:
        return entry[path]
    first, _, rest = path.partition(".")
    value = None
    if isinstance(entry, dict):
        value = entry.get(first)
    elif isinstance(entry, list) and first.isdecimal() and int(first) < len(entry):
        value = entry[int(first)]
    return find_value(value, rest) if rest else value


def paths_of(entry: Mapping[str, Any], depth: int = _MAX_DEPTH) -> dict[str, Any]:
    """Return the values of an entry by dotted path: of every key, and of those in objects inside of it.

    >>> paths_of({"id": 1, "data": {"turns": []}})
    {'id': 1, 'data': {'turns': []}, 'data.turns': []}
    """
    paths: dict[str, Any] = {}
    for key, value in entry.items():
        paths[str(key)] = value
        if isinstance(value, dict) and depth > 1:
            paths |= {f"{key}.{inner}": of_inner for inner, of_inner in paths_of(value, depth - 1).items()}
    return paths
