"""Find out whether a folder whose config ties the embeddings holds an output matrix with values of its own.

`transformers` then does not tie them. Files that were converted from pickled ones may hold the tied matrix twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from mmtrain.errors import ModelFolderError
from mmtrain.families.family import Family, FolderSettings
from mmtrain.families.folder_files import WEIGHT_FILES
from mmtrain.families.stored_tensors import StoredWeight, are_equal, read_headers
from mmtrain.families.weight_layouts import respell


def untied_if_stored_apart(folder: Path, family: Family, settings: FolderSettings) -> FolderSettings:
    """Return settings without tied embeddings if both matrices are in the files and differ; else `settings`.

    Reads headers, and both matrices up to the first difference. A folder without weights, or with damaged ones, is left
    to whoever opens its weights.
    """
    is_tied = "llm" in settings.model and settings.model["llm"]["tie_embeddings"]
    if not is_tied or not any((folder / name).is_file() for names in WEIGHT_FILES for name in names):
        return settings
    llm = {**settings.model["llm"], "tie_embeddings": False}
    untied = replace(settings, model={**settings.model, "llm": llm})
    matrices = [source for source in family.weights(untied) if source.has_token_rows]
    try:
        stored = read_headers(folder)
        for spelling in family.spellings:
            names = [source.blocks[0].tensor for source in respell(matrices, spelling)]
            if all(name in stored for name in names) and not _are_copies(folder, stored, names):
                return untied
    except (ModelFolderError, OSError):
        return settings
    return settings


def _are_copies(folder: Path, stored: Mapping[str, StoredWeight], names: list[str]) -> bool:
    first, second = (stored[name] for name in names)
    states = ((folder / weight.file).stat() for weight in (first, second))
    return _compare(folder, first, second, tuple((state.st_size, state.st_mtime_ns) for state in states))


@lru_cache(maxsize=16)  # a process reads its folder several times, and copies that are equal are read to the end
def _compare(folder: Path, first: StoredWeight, second: StoredWeight, version: tuple[tuple[int, int], ...]) -> bool:
    """Compare two tensors; `version` makes files that were written anew new arguments."""
    return are_equal(folder, first, second)
