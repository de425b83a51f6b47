"""A recipe before it is validated: plain values that remember where they were written.

Loading is a chain of pure functions on this tree (parse, merge, override, anchor paths); only the last step makes
the typed `Recipe`. Every step reports what it dislikes as a `Problem`, so that a user sees all of them at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
Scalar: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a line of a file, or the command line."""

    source: str  # a file's path as the user would type it, or the whole `--set a.b=c`
    line: int | None  # from 1; None outside files
    folder: Path  # what a relative path written here starts at

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """One value of a recipe. Mappings and lists hold nodes; nobody changes them in place."""

    value: "Scalar | dict[str, Node] | list[Node]"
    origin: Origin


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe, at a dotted path."""

    where: KeyPath
    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        place = f" ({self.origin})" if self.origin else ""
        return f"{dotted_path(self.where)}: {self.text}{place}" if self.where else f"{self.text}{place}"


def dotted_path(keys: KeyPath) -> str:
    """Write a path as users do: `data.sources.0.path`."""
    return ".".join(str(key) for key in keys)


def to_plain(node: Node) -> object:
    """Drop the origins."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def iter_nodes(node: Node, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """All nodes below `node`, itself included, with their paths."""
    yield at, node
    children: Iterator[tuple[str | int, Node]] = iter(())
    if isinstance(node.value, dict):
        children = iter(node.value.items())
    elif isinstance(node.value, list):
        children = iter(enumerate(node.value))
    for key, child in children:
        yield from iter_nodes(child, (*at, key))


def nearest_node(node: Node, keys: KeyPath) -> Node:
    """The node at `keys`, or the deepest one on the way there."""
    for key in keys:
        value = node.value
        if isinstance(value, list):
            if not isinstance(key, int) or key >= len(value):
                break
            node = value[key]
        elif isinstance(value, dict) and key in value:
            node = value[str(key)]
        else:
            break
    return node


def merge_trees(base: Node, over: Node) -> Node:
    """Lay `over` on `base`: mappings join key by key, everything else (lists too) is replaced."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    joined = dict(base.value)
    for key, child in over.value.items():
        joined[key] = merge_trees(joined[key], child) if key in joined else child
    return Node(joined, over.origin)


def set_node(node: Node | None, keys: KeyPath, new: Node, at: KeyPath = ()) -> Node | Problem:
    """Return `node` with `new` at `keys`, making the mappings and lists on the way that are missing.

    A key made of digits is an index where a list stands, or where nothing stands yet; the list's length appends.
    """
    if not keys:
        return new
    key, rest = str(keys[0]), keys[1:]
    value = node.value if node else None
    if value is None:
        value = [] if key.isdecimal() else {}
    if isinstance(value, dict):
        child = set_node(value.get(key), rest, new, (*at, key))
        return child if isinstance(child, Problem) else _with(node, {**value, key: child}, new.origin)
    if isinstance(value, list):
        if not key.isdecimal() or int(key) > len(value):
            allowed = f"an index from 0 to {len(value)} ({len(value)} appends)"
            return Problem((*at, key), f"found {key!r} below a list of {len(value)}; allowed: {allowed}", new.origin)
        i = int(key)
        child = set_node(value[i] if i < len(value) else None, rest, new, (*at, i))
        return child if isinstance(child, Problem) else _with(node, [*value[:i], child, *value[i + 1 :]], new.origin)
    below = dotted_path((*at, *keys))
    return Problem(at, f"is {value!r}, not a mapping or a list, so {below} cannot be set", new.origin)


def _with(node: Node | None, value: dict[str, Node] | list[Node], origin: Origin) -> Node:
    return replace(node, value=value) if node else Node(value, origin)
