"""A bounded cache, for what takes so much memory that only the last few entries can be kept."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentlyUsed(Generic[T]):
    """The entries that were asked for last, by key."""

    def __init__(self, max_size: int, size_of: Callable[[T], int] = lambda _: 1) -> None:
        """Keep entries of at most `max_size` together; the last one is kept whatever its size.

        size_of: size of an entry, in bytes for instance; by default entries are counted.
        """
        self._max_size = max_size
        self._size_of = size_of
        self._entries: dict[Hashable, T] = {}  # the next to go comes first
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def clear(self) -> None:
        """Keep nothing of what was asked for so far."""
        self._entries.clear()
        self.size = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the entry of this key, from `make` if it is not kept."""
        if key in self._entries:
            entry = self._entries.pop(key)
        else:
            entry = make()
            self.size += self._size_of(entry)
        self._entries[key] = entry
        while self.size > self._max_size and len(self._entries) > 1:
            first = next(iter(self._entries))
            self.size -= self._size_of(self._entries.pop(first))
        return entry
