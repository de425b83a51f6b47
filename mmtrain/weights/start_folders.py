"""The folders whose weights a recipe starts from: one for the model, or one for each of some units."""

from dataclasses import dataclass
from pathlib import Path

from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import unit_path


@dataclass(frozen=True)
class StartFolder:
    """A folder that a setting of the recipe names."""

    keys: tuple[str, ...]  # of the setting
    path: Path
    unit: str | None = None  # of the recipe, which alone starts from it; None: all units that the folder holds
    unit_in_folder: str | None = None  # of several that the folder may hold

    @property
    def setting(self) -> str:
        """Return the dotted name of the setting."""
        return ".".join(self.keys)


def start_folders(recipe: Recipe) -> tuple[StartFolder, ...]:
    """Return the folders of `model.hf` and of the `hf` of every unit."""
    folders = [] if recipe.model.hf is None else [StartFolder(("model", "hf"), recipe.model.hf)]
    for name, encoder in recipe.model.all_encoders.items():
        if encoder.hf is not None:
            folders.append(StartFolder(("model", *unit_path(name), "hf"), encoder.hf, name, encoder.modality))
    if recipe.model.llm.hf is not None:
        folders.append(StartFolder(("model", "llm", "hf"), recipe.model.llm.hf, "llm", "llm"))
    generator = recipe.model.generator
    if generator is not None and generator.hf is not None:
        folders.append(StartFolder(("model", "generator", "hf"), generator.hf, "generator"))
    return tuple(folders)
