"""The sources that a command line names: files, folders, URLs and metadatasets."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmtrain.recipe.settings.data_settings import SourceSettings


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
