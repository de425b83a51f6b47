"""Which files of a run the nodes see that a job gets: those below one folder, at the same relative paths as here."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import BaseModel

from mmtrain.api.job_files.job_request import JobRequest
from mmtrain.errors import UserError
from mmtrain.recipe import Recipe

HUB_CACHE_PREFIX = "models--"  # of folders in the cache of the Hugging Face hub: nodes fetch the model by its name
_OWN_SETTINGS = {"run_dir", "data.index_cache"}  # what a run writes


@dataclass(frozen=True)
class WorkerFolder:
    """What the working folder is on the nodes of a job."""

    here: Path  # the working folder
    there: PurePosixPath  # what the nodes have in its place
    mounted: PurePosixPath  # a folder that has the same absolute path here and there; may be `there` itself
    remedy: str  # how to bring other files to the nodes

    def path(self, path: Path) -> str | None:
        """Return where a file of this machine lies on the nodes, relative to `there`; None if it does not."""
        if path.is_absolute() and PurePosixPath(path.as_posix()).is_relative_to(self.mounted):
            return path.as_posix()
        relative = os.path.relpath(path, self.here)
        return None if relative.startswith("..") else Path(relative).as_posix()


def on_workers(request: JobRequest, recipe: Recipe, folder: WorkerFolder) -> tuple[str, str, str]:
    """Return recipe, plan and run folder as the nodes see them.

    Raises UserError that lists all files of the run that the nodes do not see: these three, and those that the recipe
    names.
    """
    named = {"RECIPE": request.recipe, "--plan": request.plan, "--run-dir": request.run_dir}
    there = {name: folder.path(path) for name, path in named.items()}
    texts = (request.recipe.read_text(encoding="utf-8"), *request.overrides)
    missing = [f"{name}: {named[name]}" for name, path in there.items() if path is None]
    for setting, path in _paths(recipe, ""):
        is_stated = any(str(path) in text for text in texts)  # else it was relative, and starts at the recipe there too
        lies_there = folder.path(path) is not None and not (is_stated and folder.path(path) != path.as_posix())
        if not lies_there and not any(part.startswith(HUB_CACHE_PREFIX) for part in path.parts):
            missing.append(f"{setting}: {path}")
    if missing:
        raise UserError(
            f"not on the nodes, which see {folder.there} in place of the working folder {folder.here}: "
            f"{', '.join(missing)}. {folder.remedy}"
        )
    return str(there["RECIPE"]), str(there["--plan"]), str(there["--run-dir"])


def _paths(value: object, key: str) -> Iterator[tuple[str, Path]]:
    """Yield all paths of a recipe with their settings."""
    if isinstance(value, BaseModel):
        for name, child in value:
            yield from _paths(child, f"{key}.{name}" if key else name)
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _paths(child, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from _paths(child, f"{key}.{number}")
    elif isinstance(value, Path) and key not in _OWN_SETTINGS:
        yield key, value
