"""List the recipes that come with mmtrain, and copy one to start from."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

import yaml

from mmtrain.errors import UserError, writing
from mmtrain.recipe import editor_schema

PACKAGE = Path(__file__).parents[1]
RECIPES_FOLDER = "recipes"  # in the tree, and where `copy_recipe` writes unless told otherwise
SCHEMA_FILE = "recipe.schema.json"
SLURM_JOB_FILE = "train.sbatch"
RAY_JOB_FILE = "train_ray.py"
_SUFFIX = ".yaml"
_SCHEMA_LINE = re.compile(r"(?<=\$schema=)\S+")
_PATH_ABOVE = re.compile(r"(?P<before>^[^#\n]*?[:-] )(?P<path>(?:\.\./)+[^\s#]+)", re.MULTILINE)


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe of this installation. `name` is its path without suffix, such as `whatif/internvl_26b`."""

    name: str
    path: Path
    summary: str  # the first sentence of its comment


@dataclass(frozen=True)
class CopiedRecipe:
    """What `copy_recipe` wrote."""

    recipe: Path
    beside: tuple[Path, ...]  # the schema, and files that the recipe extends or names
    already_there: tuple[Path, ...]  # recipes and lengths of the same content, which were left alone


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all recipes of this installation by name, those to train first.

    Raises:
        UserError: the installation holds none.
    """
    folder = _recipes_folder()
    paths = [(path.relative_to(folder).with_suffix("").as_posix(), path) for path in folder.rglob(f"*{_SUFFIX}")]
    by_depth = sorted(paths, key=lambda item: (item[0].count("/"), item[0]))
    return [ShippedRecipe(name, path, _summary(path.read_text(encoding="utf-8"))) for name, path in by_depth]


def shipped_job_file(name: str) -> Path | None:
    """Return `SLURM_JOB_FILE` or `RAY_JOB_FILE`; None if this installation does not hold it."""
    candidates = (PACKAGE / "shipped" / name, PACKAGE.parent / "scripts" / name)
    return next((path for path in candidates if path.is_file()), None)


def find_recipe(name: str) -> ShippedRecipe:
    """Return the recipe called `name`, which may have the suffix and start with `recipes/`.

    Raises:
        UserError: there is none; the message has the nearest names.
    """
    plain = name.removesuffix(_SUFFIX).removeprefix(f"{RECIPES_FOLDER}/")
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    if plain in recipes:
        return recipes[plain]
    in_folders = [known for known in recipes if PurePosixPath(known).name == plain]
    nearest = in_folders or get_close_matches(plain, recipes, n=2, cutoff=0.6)
    question = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    raise UserError(f"no recipe of mmtrain is called {name!r}{question} `mmtrain recipes` lists all {len(recipes)}.")


def copy_recipe(name: str, folder: Path, working_folder: Path) -> CopiedRecipe:
    """Copy a recipe to `folder`, with the files that it extends or names, and the schema for editors.

    Relative paths between shipped files stay as they are, because all keep their places below `folder`. The others,
    such as those of data, start at the working folder: that is where the commands in the recipe's comment write them.

    Raises:
        UserError: there is no such recipe, or a file of other content is in the way. Then nothing is written.
    """
    recipe = find_recipe(name)
    root = _recipes_folder()
    schema = folder / SCHEMA_FILE
    contents: dict[Path, str] = {}
    for path in _with_needed_files(recipe.path, root):
        target = folder / path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        is_recipe = path.suffix == _SUFFIX
        contents[target] = _mend_paths(text, path.relative_to(root), folder, working_folder) if is_recipe else text
    _require_free(contents)
    already_there = tuple(target for target in contents if target.exists())
    with writing("--out", folder, "recipe"):
        folder.mkdir(parents=True, exist_ok=True)
        # Generated, so that one of an earlier version may be replaced.
        schema.write_text(json.dumps(editor_schema(), indent=2) + "\n", encoding="utf-8", newline="\n")
        for target in contents.keys() - set(already_there):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8", newline="\n") as file:
                file.write(contents[target])
    copy = folder / recipe.path.relative_to(root)
    beside = [target for target in contents if target != copy and target not in already_there]
    return CopiedRecipe(copy, (*beside, schema), already_there)


def _recipes_folder() -> Path:
    """Return `shipped/recipes` of an installed wheel, or `recipes` of the tree that the package runs from."""
    for folder in (PACKAGE / "shipped" / RECIPES_FOLDER, PACKAGE.parent / RECIPES_FOLDER):
        if (folder / f"demo{_SUFFIX}").is_file():
            return folder
    raise UserError(f"{PACKAGE}: this installation of mmtrain holds no recipes; install it from a wheel with pip")


def _summary(text: str) -> str:
    """Return the first sentence of a recipe's comment, without what introduces its commands."""
    lines = []
    for line in text.splitlines():
        if line.startswith("# yaml-language-server"):
            continue
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    paragraph = re.split(r"(?<=\.) (?=[A-Z])", " ".join(lines))[0]
    return paragraph.partition(": `")[0].rstrip(":.")


def _with_needed_files(recipe: Path, root: Path) -> list[Path]:
    """Return the recipe and all shipped files that it names, and so on; each once."""
    files = [recipe]
    for path in files:  # grows while it runs
        if path.suffix != _SUFFIX:
            continue
        for text in _texts(yaml.safe_load(path.read_text(encoding="utf-8"))):
            named = Path(os.path.normpath(path.parent / text))
            if named.is_file() and named.is_relative_to(root) and named not in files:
                files.append(named)
    return files


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child)


def _mend_paths(text: str, place: Path, folder: Path, working_folder: Path) -> str:
    """Return a recipe's text for its copy at `folder / place`; `place` is relative to the folder of all recipes."""
    target_folder = (folder / place).parent

    def mended(match: re.Match[str]) -> str:
        from_tree = os.path.normpath(Path(RECIPES_FOLDER, place).parent / match["path"])
        if Path(from_tree).is_relative_to(RECIPES_FOLDER):
            return match[0]
        return match["before"] + _relative(working_folder / from_tree, target_folder)

    text = _SCHEMA_LINE.sub(_relative(folder / SCHEMA_FILE, target_folder), text)
    text = _PATH_ABOVE.sub(mended, text)
    return text.replace(f"{RECIPES_FOLDER}/{place.as_posix()}", (folder / place).as_posix())


def _relative(path: Path, start: Path) -> str:
    """Return `path` relative to the folder `start`; absolute where they lie on different drives of Windows."""
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:
        return path.absolute().as_posix()


def _require_free(contents: dict[Path, str]) -> None:
    """Raise UserError if a file of other content is where one shall be written."""
    taken = []
    for target, text in contents.items():
        is_other_file = target.is_file() and target.read_bytes() != text.encode()
        if is_other_file or (target.exists() and not target.is_file()):
            taken.append(target)
    if taken:
        listed = ", ".join(map(str, taken))
        raise UserError(
            f"{listed}: there already, with other content; nothing was written, because no recipe is overwritten. Move "
            "it away, or name another folder with --out"
        )
