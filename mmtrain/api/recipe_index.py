"""The index of a recipe's data, for commands that do not train."""

import sys
from typing import TYPE_CHECKING

from mmtrain.recipe import Recipe

if TYPE_CHECKING:
    from mmtrain.data import DataIndex
from collections.abc import Iterable
from pathlib import Path

if TYPE_CHECKING:
    from mmtrain.recipe.settings.data_settings import SourceSettings


def index_recipe(recipe: Recipe) -> "DataIndex":
    """Index the recipe's samples, or read the cached index; print remarks about the data to stderr."""
    from mmtrain.data import build_index

    index = build_index(recipe, notify=print_note)
    for remark in index.remarks():
        print_note(remark)
    return index


def print_note(line: str) -> None:
    """Print a line to stderr, so that stdout holds the command's result only."""
    print(line, file=sys.stderr, flush=True)


def read_named_sources(texts: Iterable[str]) -> "list[SourceSettings]":
    """Return the sources that arguments name. Raises `UserError` for a URL with credentials, and `DataError`."""
    from mmtrain.errors import UserError
    from mmtrain.recipe.loading.energon_blends import is_metadataset, read_metadataset
    from mmtrain.recipe.settings.data_settings import SourceSettings
    from mmtrain.recipe.settings.source_path import parse_source_path

    sources = []
    for text in texts:
        try:
            path = parse_source_path(text)
        except ValueError as error:
            raise UserError(str(error)) from None
        if isinstance(path, Path) and is_metadataset(text):
            datasets = read_metadataset(path.absolute(), "train")
            sources += [SourceSettings(path=dataset.path, split=dataset.split) for dataset in datasets]
        else:
            sources.append(SourceSettings(path=path.absolute() if isinstance(path, Path) else path))
    return sources


def sources_for_recipe(texts: Iterable[str], recipe: Recipe) -> "list[SourceSettings]":
    """Return the sources that arguments name, read as a recipe reads its own; without arguments, those of the recipe.

    A file that the recipe names has all settings of that source. Another one has the `columns` that all sources of the
    recipe share. Raises `UserError` for a URL with credentials, and `DataError`.
    """
    own = [*recipe.data.sources, *recipe.data.validation]
    named = read_named_sources(texts)
    if not named:
        return own
    shared_columns = own[0].columns if own and all(source.columns == own[0].columns for source in own) else {}
    sources = []
    for source in named:
        of_recipe = next((candidate for candidate in own if candidate.path == source.path), None)
        sources.append(of_recipe or source.model_copy(update={"columns": shared_columns}))
    return sources
