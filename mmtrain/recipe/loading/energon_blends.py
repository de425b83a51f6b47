"""Replace a metadataset of Megatron-Energon among the sources of a recipe by the data sets that it blends.

A metadataset is a YAML file that names data sets, with weights (`blend`) or repetitions (`blend_epochized`), for each
split. Nothing that it names is imported.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmtrain.errors import DataError
from mmtrain.foreign_yaml import parse_yaml
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, node_at, set_node, to_node

METADATASET_SUFFIXES = (".yaml", ".yml")
_SHARE_UNIT = ("data", "share_unit")
_SPLITS = {"sources": "train", "validation": "val"}  # of the recipe's lists, what Energon calls them
_KNOWN_CLASSES = ("Metadataset", "MetadatasetV2")
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}  # `datasets`: of version 1
# What training here does not depend on: tags of samples for task encoders, and the order of shuffling.
_WITHOUT_EFFECT = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier")
_MAX_DEPTH = 16  # of metadatasets that name each other


@dataclass(frozen=True)
class BlendedDataset:
    """One data set of a metadataset."""

    path: Path
    split: str
    share: float | None = None  # of the samples of the metadataset; None without weights
    repetitions: float = 1.0


def is_metadataset(path: str) -> bool:
    """Return whether a source's path names a metadataset: no other source is a YAML file."""
    return path.endswith(METADATASET_SUFFIXES)


def read_metadataset(path: Path, split: str) -> list[BlendedDataset]:
    """Return the data sets of a split, each with its share or its repetitions. Raises `DataError`."""
    return _read_file(path, split, 0)


def apply_blends(tree: Node) -> tuple[Node, list[Problem]]:
    """Replace metadatasets in the lists of sources, and return what is wrong with them.

    Weights become shares of the source's own share, in samples; repetitions multiply its weight. Validation uses every
    sample once.
    """
    problems: list[Problem] = []
    for name, split in _SPLITS.items():
        where = ("data", name)
        listed = node_at(tree, where)
        if listed is None or not isinstance(listed.value, list):
            continue
        expanded = [list(_expand(item, (*where, i), split, problems)) for i, item in enumerate(listed.value)]
        if all(len(items) == 1 and items[0] is item for items, item in zip(expanded, listed.value, strict=True)):
            continue
        sources = [source for items in expanded for source in items]
        tree = _set(tree, where, replace(listed, value=sources))
        if name == "sources" and any("share" in items[0].value for items in expanded if len(items) > 1):  # type: ignore[operator]
            tree = _count_samples(tree, listed.origin, problems)
    return tree, problems


def _expand(item: Node, where: KeyPath, split: str, problems: list[Problem]) -> Iterator[Node]:
    """Yield the sources that a source stands for: itself, if it names no metadataset."""
    path = node_at(item, ("path",))
    if path is None or not isinstance(path.value, str) or not is_metadataset(path.value):
        yield item
        return
    assert isinstance(item.value, dict), "it has a path"
    chosen = node_at(item, ("split",))
    try:
        datasets = read_metadataset(Path(path.value), str(chosen.value) if chosen is not None else split)
    except DataError as error:
        problems.append(Problem((*where, "path"), str(error), path.origin))
        yield item
        return
    for dataset in datasets:
        source = dict(item.value)
        source["path"] = Node(str(dataset.path), path.origin)
        source["split"] = Node(dataset.split, path.origin)
        if split == _SPLITS["sources"] and dataset.share is not None:
            source["share"] = _scaled(source.get("share") or Node(1.0, path.origin), dataset.share)
        elif split == _SPLITS["sources"] and dataset.repetitions != 1:
            source["weight"] = _scaled(source.get("weight") or Node(1.0, path.origin), dataset.repetitions)
        yield Node(source, item.origin)


def _scaled(node: Node, factor: float) -> Node:
    """Multiply a number, or every number of a schedule; anything else is left for validation to reject."""
    if isinstance(node.value, dict):
        return replace(node, value={key: _scaled(child, factor) for key, child in node.value.items()})
    is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
    return replace(node, value=node.value * factor) if is_number else node  # type: ignore[operator]


def _count_samples(tree: Node, origin: Origin, problems: list[Problem]) -> Node:
    """Make shares those of samples, as the weights of Energon are."""
    unit = node_at(tree, _SHARE_UNIT)
    if unit is None:
        return _set(tree, _SHARE_UNIT, to_node("samples", origin))
    if unit.value != "samples":
        text = f"found {unit.value}, but weights of a metadataset are shares of samples; set samples, or leave it out"
        problems.append(Problem(_SHARE_UNIT, text, unit.origin))
    return tree


def _set(tree: Node, where: KeyPath, node: Node) -> Node:
    updated = set_node(tree, where, node)
    assert isinstance(updated, Node), "the lists of sources are inside of a mapping"
    return updated


def _read_file(path: Path, split: str, depth: int) -> list[BlendedDataset]:
    if depth > _MAX_DEPTH:
        raise DataError(f"{path}: metadatasets name each other more than {_MAX_DEPTH} deep, perhaps in a circle")
    try:
        described = parse_yaml(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    kind = described.get("__class__") if isinstance(described, dict) else type(described).__name__
    if kind not in _KNOWN_CLASSES:
        is_recipe = isinstance(described, dict) and "model" in described
        hint = "; this looks like a recipe, which is no source: name it by --recipe" if is_recipe else ""
        found = "no `__class__`" if kind is None else kind
        allowed = ", ".join(_KNOWN_CLASSES)
        raise DataError(f"{path}: found {found}, allowed as a source in YAML: {allowed} of Energon{hint}")
    splits = described.get("splits")
    if not isinstance(splits, dict) or split not in splits:
        found = ", ".join(map(str, splits)) if isinstance(splits, dict) else "none"
        raise DataError(f"{path}: no split {split}; it has {found}: set the source's `split`")
    return _read_entry(splits[split], path, split, f"splits.{split}", depth)


def _read_entry(entry: Any, file: Path, split: str, where: str, depth: int) -> list[BlendedDataset]:
    """Return the data sets of one entry: of a data set, of another metadataset, or of a blend."""
    if not isinstance(entry, dict):
        raise DataError(f"{file}: {where}: found {type(entry).__name__}, expected `path`, `blend` or `blend_epochized`")
    blend = next((name for name in _BLENDS if name in entry), None)
    known = {"path", "split_part", "weight", "repetitions", "__module__", "__class__", *_WITHOUT_EFFECT, *_BLENDS}
    unknown = [str(key) for key in entry if key not in known]
    if unknown:
        raise DataError(
            f"{file}: {where}.{unknown[0]} cannot be followed; allowed: path, split_part, weight, repetitions, blend, "
            "blend_epochized. List the data sets as sources of the recipe instead"
        )
    split = str(entry.get("split_part") or split)
    if blend is not None:
        return _read_blend(entry[blend], file, split, f"{where}.{blend}", depth)
    path = entry.get("path")
    if not isinstance(path, str) or "://" in path:
        raise DataError(f"{file}: {where}.path: found {path!r}, allowed: a folder or a metadataset of this machine")
    place = Path(os.path.normpath(file.parent / path))
    return _read_file(place, split, depth + 1) if is_metadataset(path) else [BlendedDataset(place, split)]


def _read_blend(entries: Any, file: Path, split: str, where: str, depth: int) -> list[BlendedDataset]:
    """Return the data sets of a blend: by weights, which become shares, or by repetitions."""
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{file}: {where}: found {entries!r}, expected a list of data sets")
    by = _BLENDS[where.rpartition(".")[2]]
    numbers = []
    for i, entry in enumerate(entries):
        number = entry.get(by, 1) if isinstance(entry, dict) else 1
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
            raise DataError(f"{file}: {where}.{i}.{by}: found {number!r}, allowed: a number above 0")
        numbers.append(float(number))
    datasets = []
    for i, (entry, number) in enumerate(zip(entries, numbers, strict=True)):
        for dataset in _read_entry(entry, file, split, f"{where}.{i}", depth):
            is_mixed = dataset.share is not None if by == "repetitions" else dataset.repetitions != 1
            if is_mixed:
                raise DataError(
                    f"{file}: {where}.{i}: weights and repetitions inside of each other have no meaning together; "
                    "blend by one of them"
                )
            if by == "weight":
                share = number / sum(numbers) * (1.0 if dataset.share is None else dataset.share)
                datasets.append(replace(dataset, share=share))
            else:
                datasets.append(replace(dataset, repetitions=dataset.repetitions * number))
    return datasets
