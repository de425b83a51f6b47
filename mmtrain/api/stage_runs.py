"""The runs that a recipe with stages makes, one after another, each in a folder of its own."""

from dataclasses import dataclass
from pathlib import Path

from mmtrain.errors import UserError
from mmtrain.recipe import LoadedRecipe, WrittenRecipe
from mmtrain.runtime.run_folder import RECIPE_FILE


@dataclass(frozen=True)
class StageRun:
    """One run: a stage of a recipe, or a recipe without stages."""

    loaded: LoadedRecipe
    folder: Path
    stage: str | None  # as messages call it: `2 of 3, sft`, or `sft` if it is the only one of several to run


def stage_runs(recipe: WrittenRecipe, run_dir: Path | None) -> list[StageRun]:
    """Load the recipe of every run, in order; of one only, if `--set stage=NAME` chooses it.

    A stage is in a folder `<number>-<name>` below that of the run, and of its object store. It starts from the weights
    of the one before it. Raises RecipeError.
    """
    names, chosen = recipe.stages, recipe.chosen_stage
    if not names:
        loaded = recipe.load()
        return [StageRun(loaded, _folder(loaded, run_dir), None)]
    runs: list[StageRun] = []
    for i, name in enumerate(names, start=1):
        start = [f"train.init_from={runs[-1].folder.absolute()}"] if runs else []
        loaded = recipe.load(f"stage={name}", *start)
        folder = _folder(loaded, run_dir) / f"{i}-{name}"
        remote = loaded.recipe.train.checkpoint.remote
        if remote is not None:
            loaded = recipe.load(f"stage={name}", *start, f"train.checkpoint.remote={remote}/{folder.name}")
        runs.append(StageRun(loaded, folder, f"{i} of {len(names)}, {name}" if chosen is None else name))
    return [run for run, name in zip(runs, names, strict=True) if chosen in (None, name)]


def require_one_stage(recipe: WrittenRecipe, option: str | None) -> None:
    """Raise UserError for an option that several stages cannot share, unless one of them is chosen."""
    if option is not None and recipe.stages and recipe.chosen_stage is None:
        raise UserError(f"{option}: for one stage of the recipe; choose it with --set stage={recipe.stages[0]}")


def _folder(loaded: LoadedRecipe, run_dir: Path | None) -> Path:
    return run_dir or loaded.recipe.run_dir or Path("runs") / loaded.recipe.name


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of the stages that were trained into `folder`, in order; empty for one of a single run."""
    if (folder / RECIPE_FILE).is_file():
        return []
    numbered = {}
    for path in folder.glob("*-*"):
        number = path.name.partition("-")[0]
        if number.isdecimal() and (path / RECIPE_FILE).is_file():
            numbered[int(number)] = path
    return [numbered[number] for number in sorted(numbered)]
