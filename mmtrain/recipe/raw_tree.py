"""A recipe before validation: a tree of plain values, each with the place where it was written.

Loading is a chain of pure functions on this tree (parse, merge, override, resolve paths); only the last step makes the
typed `Recipe`. Every step reports what is wrong as a `Problem`, so that a user sees all problems at once.
"""

from collections.abc import Iterable, Iterator, Mapping
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
    folder: Path  # relative paths written here start at this folder

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """One value of a recipe. Mappings and lists hold nodes and are never changed in place."""

    value: "Scalar | dict[str, Node] | list[Node]"
    origin: Origin


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe."""

    where: KeyPath  # of the setting; empty for the recipe as a whole
    text: str
    origin: Origin | None = None  # file and line, or `--set`

    def __str__(self) -> str:
        place = f" ({self.origin})" if self.origin else ""
        return f"{dotted_path(self.where)}: {self.text}{place}" if self.where else f"{self.text}{place}"


def dotted_path(keys: KeyPath) -> str:
    """Write a path as in recipes' messages and `--set`: `data.sources.0.path`."""
    return ".".join(str(key) for key in keys)


def to_plain(node: Node) -> object:
    """Return the values of a tree without their origins."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def iter_nodes(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield `node` and all nodes below it with their paths; `path` is the one of `node`."""
    yield path, node
    children: Iterator[tuple[str | int, Node]] = iter(())
    if isinstance(node.value, dict):
        children = iter(node.value.items())
    elif isinstance(node.value, list):
        children = iter(enumerate(node.value))
    for key, child in children:
        yield from iter_nodes(child, (*path, key))


def to_node(value: object, origin: Origin) -> Node:
    """Return the tree of plain values that all have one origin; the inverse of `to_plain`."""
    if isinstance(value, Mapping):
        return Node({str(key): to_node(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([to_node(child, origin) for child in value], origin)
    assert value is None or isinstance(value, bool | int | float | str), value
    return Node(value, origin)


def node_at(node: Node | None, keys: Iterable[str]) -> Node | None:
    """Return the node at `keys`, which name mappings; None if there is none."""
    for key in keys:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node


def nearest_node(node: Node, keys: KeyPath) -> Node:
    """Return the node at `keys`, or the deepest existing node above it."""
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
    """Merge two trees: mappings key by key; any other value, lists too, is the one of `over`."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge_trees(merged[key], child) if key in merged else child
    return Node(merged, over.origin)


def set_node(node: Node | None, keys: KeyPath, new: Node, path: KeyPath = ()) -> Node | Problem:
    """Return `node` with `new` at `keys`; missing mappings and lists above it are created.

    A key made of digits is an index if the value above it is a list or missing; the length of a list appends to it.
    `path` is the path of `node`, for messages.
    """
    if not keys:
        return new
    key, rest = str(keys[0]), keys[1:]
    value = node.value if node else None
    if value is None:
        value = [] if key.isdecimal() else {}
    if isinstance(value, dict):
        child = set_node(value.get(key), rest, new, (*path, key))
        return child if isinstance(child, Problem) else _with(node, {**value, key: child}, new.origin)
    if isinstance(value, list):
        if not key.isdecimal() or int(key) > len(value):
            allowed = f"an index from 0 to {len(value)} ({len(value)} appends)"
            return Problem((*path, key), f"found {key!r} in a list of {len(value)}; allowed: {allowed}", new.origin)
        i = int(key)
        child = set_node(value[i] if i < len(value) else None, rest, new, (*path, i))
        return child if isinstance(child, Problem) else _with(node, [*value[:i], child, *value[i + 1 :]], new.origin)
    below = dotted_path((*path, *keys))
    return Problem(path, f"is {value!r}, not a mapping or a list, so {below} cannot be set", new.origin)


def _with(node: Node | None, value: dict[str, Node] | list[Node], origin: Origin) -> Node:
    return replace(node, value=value) if node else Node(value, origin)
