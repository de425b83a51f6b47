"""Load a recipe: from a file, its bases, the environment and the command line to one validated `Recipe`.

Presets of published models fill settings in. With `stages:` a recipe is several runs one after another, each with
settings of its own laid over the recipe's.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmtrain.errors import RecipeError
from mmtrain.families.hub_models import is_model_of_hub
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.loading import strict_yaml
from mmtrain.recipe.loading.alternatives import merge_layers, without_replaced
from mmtrain.recipe.loading.apply_model_folder import AUTOENCODER_SETTING, apply_model_folders, is_folder_setting
from mmtrain.recipe.loading.energon_blends import apply_blends
from mmtrain.recipe.loading.lowest_version import require_new_enough
from mmtrain.recipe.loading.retired_settings import replace_retired
from mmtrain.recipe.loading.strict_yaml import parse_yaml
from mmtrain.recipe.loading.validation import validate
from mmtrain.recipe.raw_tree import (
    KeyPath,
    Node,
    Origin,
    Problem,
    dotted_path,
    iter_nodes,
    node_at,
    set_node,
    to_node,
)
from mmtrain.recipe.settings.base import flatten, select_for_saving
from mmtrain.recipe.settings.modalities import MODALITIES
from mmtrain.recipe.settings.presets import GENERATOR_PRESETS, LLM_PRESETS, ModelPreset
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.source_path import is_url

_COST_TABLE = ("cluster", "costs")
_SOURCE_SETTINGS = tuple(
    ("data", sources, "*", name) for sources in ("sources", "validation") for name in ("path", "image_root")
)  # which may be URLs
_PATH_SETTINGS = (  # relative paths in these settings start at the folder of the file that sets them
    ("data", "tokenizer"),
    ("data", "index_cache"),
    ("data", "producer_secret"),
    *_SOURCE_SETTINGS,
    ("train", "init_from"),
    AUTOENCODER_SETTING,
    ("model", "generator", "latents"),
    _COST_TABLE,
)
STAGES, STAGE = "stages", "stage"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
INIT_FROM = ("train", "init_from")


@dataclass(frozen=True)
class LoadedRecipe:
    """A validated recipe, and where each of its values was written."""

    recipe: Recipe
    path: Path
    origins: Mapping[str, str]  # dotted path of every written value -> `file:line` or `--set a.b=c`

    def origin(self, path: str) -> str:
        """Return where the value at a dotted path was written; `default` if it was not."""
        return self.origins.get(path, "default")


@dataclass
class _RecipeFiles:
    """The files read so far, each read once, and the problems found in them."""

    env: Mapping[str, str]
    trees: dict[Path, Node] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class WrittenRecipe:
    """A recipe as it is written, read once: the settings of its file and of its bases, and those of `--set`."""

    path: Path
    overrides: tuple[str, ...]
    stages: tuple[str, ...]  # their names, in order; () for a recipe without stages
    chosen_stage: str | None  # by `stage=NAME`
    _files: _RecipeFiles
    _tree: Node

    def load(self, *changes: str) -> LoadedRecipe:
        """Validate the recipe, or one of its stages.

        changes: more settings as in `--set`, which come last. Of a recipe with stages, `stage=NAME` chooses the one to
            load.

        Raises:
            RecipeError: with all problems at once: dotted path, what was found, what is allowed, file and line.
        """
        files = replace(self._files, problems=[*self._files.problems])
        tree = lay_stage_over(_with_overrides(self._tree, filter(is_about_stages, changes), files))
        overrides = [override for override in (*self.overrides, *changes) if not is_about_stages(override)]
        tree = _with_overrides(tree, overrides, files)
        tree, retired_problems = replace_retired(tree)
        files.problems += retired_problems
        tree, folder_problems = apply_model_folders(_make_paths_absolute(tree))
        if any(is_folder_setting(problem.where) or problem.where == AUTOENCODER_SETTING for problem in folder_problems):
            # Everything that the folder would have supplied is missing; these problems would hide the cause.
            raise RecipeError(_message(self.path, [*files.problems, *folder_problems]))
        tree = apply_presets(tree)
        tree, blend_problems = apply_blends(tree)
        if blend_problems:  # shares that they would have supplied are missing, which would hide the cause
            raise RecipeError(_message(self.path, [*files.problems, *folder_problems, *blend_problems]))
        problems, recipe = validate(tree, [*files.problems, *folder_problems], CHECKS)
        if recipe is None:
            raise RecipeError(_message(self.path, problems))
        origins = {dotted_path(keys): str(node.origin) for keys, node in iter_nodes(tree) if keys}
        return LoadedRecipe(recipe, self.path, origins)


def read_recipe(path: Path, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None) -> WrittenRecipe:
    """Read the recipe at `path`, without validating more than its list of stages.

    Args:
        path: a YAML file, which may extend others.
        overrides: settings `a.b.0=value` that take precedence over the files, as in `--set`.
        env: environment variables for `${env:NAME}`; by default those of this process.

    Raises:
        RecipeError: for a file that cannot be read, and a wrong list or choice of stages.
    """
    files = _RecipeFiles(os.environ if env is None else env)
    tree = _with_overrides(_read(path, files, ()), filter(is_about_stages, overrides), files)
    names = stage_names(tree)
    return WrittenRecipe(path, tuple(overrides), names, chosen_stage(tree, names), files, tree)


def load_recipe(path: Path, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None) -> LoadedRecipe:
    """Load the recipe at `path` and validate it; see `read_recipe` and `WrittenRecipe.load`."""
    return read_recipe(path, overrides, env).load()


def _with_overrides(tree: Node, overrides: Iterable[str], files: _RecipeFiles) -> Node:
    for override in overrides:
        tree = _apply_override(tree, override, files)
    return tree


def _read(path: Path, files: _RecipeFiles, chain: tuple[Path, ...]) -> Node:
    """Read one file and merge it over the files that it extends; `chain` holds the files that led here."""
    if path in chain:
        raise RecipeError("recipes extend each other in a cycle: " + " -> ".join(map(str, (*chain, path))))
    if path not in files.trees:
        root, problems = parse_yaml(_text(path), Origin(str(path), 1, path.parent), files.env)
        files.problems += problems
        files.trees[path] = _merge_over_bases(root, path, files, (*chain, path))
    return files.trees[path]


def _merge_over_bases(root: Node, path: Path, files: _RecipeFiles, chain: tuple[Path, ...]) -> Node:
    if root.value is None:
        raise RecipeError(f"{path}: the file is empty; a recipe has at least name, model, data and train")
    if not isinstance(root.value, dict):
        raise RecipeError(f"{root.origin}: found {_kind(root)} at the top level; allowed: a mapping (`name: ...`)")
    require_new_enough(root)
    tree = Node({}, root.origin)
    for base in _bases(root.value.get("extends"), files):
        base_path = Path(os.path.normpath(path.parent / str(base.value)))
        if not base_path.is_file():
            raise RecipeError(f"{base.origin}: extends: there is no file {base_path}")
        tree = merge_layers(tree, _read(base_path, files, chain))
    settings = {key: child for key, child in root.value.items() if key != "extends"}
    return merge_layers(tree, replace(root, value=settings))


def _bases(extends: Node | None, files: _RecipeFiles) -> list[Node]:
    """Return the valid entries of `extends`, and report the others."""
    if extends is None:
        return []
    bases = []
    for name in extends.value if isinstance(extends.value, list) else [extends]:
        if isinstance(name.value, str):
            bases.append(name)
        else:
            text = f"found {_kind(name)}; allowed: the path of a recipe, or a list of paths"
            files.problems.append(Problem(("extends",), text, name.origin))
    return bases


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text; save the recipe as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from None


def _apply_override(tree: Node, override: str, files: _RecipeFiles) -> Node:
    """Apply one `a.b.0=value`; the value is YAML."""
    origin = Origin(f"--set {override}", None, Path.cwd())
    path, equals, text = override.partition("=")
    keys: KeyPath = tuple(path.strip().split("."))
    if not equals or not text.strip() or "" in keys:
        files.problems.append(Problem((), "allowed: a.b.0=value, with null for no value", origin))
        return tree
    value, problems = parse_yaml(text, origin, files.env)
    files.problems += [replace(problem, where=(*keys, *problem.where)) for problem in problems]
    result = set_node(tree, keys, value)
    if isinstance(result, Problem):
        files.problems.append(result)
        return tree
    return without_replaced(result, keys)


def _make_paths_absolute(tree: Node) -> Node:
    """Resolve relative paths against the folder of the file that sets them.

    Names of shipped cost tables and of models of the hub are kept.
    """
    for keys, node in list(iter_nodes(tree)):
        pattern = tuple("*" if isinstance(key, int) else key for key in keys)
        is_path = pattern in _PATH_SETTINGS or is_folder_setting(keys)
        if not is_path or not isinstance(node.value, str):
            continue
        if pattern == _COST_TABLE and _is_bare_name(node.value):
            continue
        if pattern in _SOURCE_SETTINGS and is_url(node.value):
            continue
        absolute = os.path.abspath(node.origin.folder / node.value)
        if is_folder_setting(keys) and is_model_of_hub(node.value, Path(absolute)):
            continue
        updated = set_node(tree, keys, replace(node, value=absolute))
        assert isinstance(updated, Node)
        tree = updated
    return tree


def _is_bare_name(value: str) -> bool:
    """Return whether a value has neither a folder nor a suffix."""
    return os.path.basename(value) == value and not os.path.splitext(value)[1]


def _message(path: Path, problems: Sequence[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{path}: {count}", *map(str, problems)])


def _kind(node: Node) -> str:
    if isinstance(node.value, list):
        return "a list"
    return "a mapping" if isinstance(node.value, dict) else repr(node.value)


def presets_by_unit() -> dict[str, Mapping[str, ModelPreset]]:
    """Return the presets of every unit that a model may have, by name."""
    encoders = {modality.name: modality.presets for modality in MODALITIES.values()}
    return {**encoders, "llm": dict(LLM_PRESETS.items()), "generator": dict(GENERATOR_PRESETS.items())}


def apply_presets(tree: Node) -> Node:
    """Add to every unit the settings of the preset that it names; the recipe's own settings take precedence.

    Unknown names are left as they are: validation reports them.
    """
    for path, presets in _sections_with_presets(tree):
        section = node_at(tree, path)
        name = node_at(section, ("preset",))
        if section is None or name is None or not isinstance(name.value, str) or name.value not in presets:
            continue
        origin = replace(name.origin, source=f"{name.origin}, preset {name.value}", line=None)
        preset = {key: to_node(value, origin) for key, value in presets[name.value].settings.items()}
        settings = section.value if isinstance(section.value, dict) else {}
        filled = set_node(tree, path, replace(section, value={**preset, **settings}))
        assert isinstance(filled, Node)
        tree = filled
    return tree


def _sections_with_presets(tree: Node) -> Iterator[tuple[tuple[str, ...], Mapping[str, ModelPreset]]]:
    """Yield path and presets of every section that may name a preset."""
    for unit, presets in presets_by_unit().items():
        yield ("model", unit), presets
    encoders = node_at(tree, ("model", "encoders"))
    for name in encoders.value if encoders is not None and isinstance(encoders.value, dict) else ():
        modality = node_at(tree, ("model", "encoders", name, "modality"))
        if modality is not None and modality.value in MODALITIES:
            yield ("model", "encoders", name), MODALITIES[str(modality.value)].presets


def is_about_stages(override: str) -> bool:
    """Return whether a `--set` chooses a stage or changes the list of stages, which comes before all others."""
    key = override.partition("=")[0].strip()
    return key == STAGE or key.split(".")[0] == STAGES


def stage_names(tree: Node) -> tuple[str, ...]:
    """Return the names of a recipe's stages, in order; () if it has none. Raises RecipeError for a wrong list."""
    stages = node_at(tree, [STAGES])
    if stages is None or stages.value is None:
        return ()
    if not isinstance(stages.value, list) or not stages.value:
        raise RecipeError(f"{STAGES}: found no list; allowed: a list of mappings with `name` ({stages.origin})")
    names: list[str] = []
    for i, stage in enumerate(stages.value):
        name = node_at(stage, ["name"])
        if name is None or not isinstance(name.value, str) or not _NAME.fullmatch(name.value):
            found = "nothing" if name is None else repr(name.value)
            raise RecipeError(
                f"{STAGES}.{i}.name: found {found}; allowed: letters, digits, `.`, `_` and `-`, the first one a letter "
                f"or a digit ({stage.origin})"
            )
        if name.value in names:
            raise RecipeError(f"{STAGES}.{i}.name: {name.value} is the name of an earlier stage ({name.origin})")
        if i and node_at(stage, INIT_FROM) is not None:
            raise RecipeError(
                f"{STAGES}.{i}.{'.'.join(INIT_FROM)}: a stage starts from the one before it; leave this out "
                f"({stage.origin})"
            )
        names.append(name.value)
    return tuple(names)


def chosen_stage(tree: Node, names: Sequence[str]) -> str | None:
    """Return the stage that `--set stage=NAME` chose; None if none was chosen. Raises RecipeError for another name."""
    chosen = node_at(tree, [STAGE])
    if chosen is None or chosen.value is None:
        return None
    if chosen.value not in names:
        allowed = f"allowed: {', '.join(names)}" if names else "the recipe has no stages"
        raise RecipeError(f"{STAGE}: found {chosen.value!r}; {allowed} ({chosen.origin})")
    return str(chosen.value)


def lay_stage_over(tree: Node) -> Node:
    """Return the recipe of the chosen stage; of a recipe without stages, the recipe.

    Raises RecipeError if none is chosen of several stages, and for a wrong list or name.
    """
    names = stage_names(tree)
    name = chosen_stage(tree, names)
    if not names:
        return _without(tree, STAGES, STAGE)
    if name is None:
        raise RecipeError(
            f"{STAGES}: the recipe has the stages {', '.join(names)}, and this command works on one of them: choose it "
            f"with --set {STAGE}={names[0]}"
        )
    stages = node_at(tree, [STAGES])
    assert stages is not None
    assert isinstance(stages.value, list)
    return merge_layers(_without(tree, STAGES, STAGE), _without(stages.value[names.index(name)], "name"))


def _without(tree: Node, *keys: str) -> Node:
    assert isinstance(tree.value, dict)
    return Node({key: child for key, child in tree.value.items() if key not in keys}, tree.origin)


def dump_recipe(recipe: Recipe) -> str:
    """Write every setting as YAML. A loaded recipe (its paths are absolute) loads back equal from any folder.

    The steps that were counted for epochs are left out: they are counted again.
    """
    settings = recipe.model_dump(mode="json")
    if recipe.train.epochs is not None:
        settings["train"]["steps"] = None
    return strict_yaml.dump_yaml(settings)


def recipe_fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of all settings that plans depend on: those that declare the effect `plan`.

    Of files it covers the names, not their folders: a plan made on a laptop is valid on a cluster.
    """
    settings = select_for_saving(recipe, "plan", mode="python")
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_file_name)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def plan_settings(recipe: Recipe) -> dict[str, object]:
    """Return all settings that plans depend on, by dotted path: those of the fingerprint, of files the names."""
    settings = flatten(select_for_saving(recipe, "plan", mode="python"))
    return {key: _file_name(value) if isinstance(value, Path) else value for key, value in settings.items()}


def _file_name(path: Path) -> str:
    return path.name
