"""From a file, its ancestors, the environment and the command line to one validated recipe."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmtrain.errors import RecipeError
from mmtrain.recipe import presets
from mmtrain.recipe import strict_yaml as yaml
from mmtrain.recipe.cross_checks import CHECKS
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, dotted_path, iter_nodes, merge_trees, set_node
from mmtrain.recipe.schema import Recipe
from mmtrain.recipe.validation import validate

_TABLE = ("cluster", "costs")
_PATHS = (  # settings whose relative paths start at the folder of the file that wrote them
    ("data", "tokenizer"),
    ("data", "index_cache"),
    ("data", "sources", "*", "path"),
    ("data", "sources", "*", "image_root"),
    ("data", "validation", "*", "path"),
    ("data", "validation", "*", "image_root"),
    _TABLE,
)


@dataclass(frozen=True)
class LoadedRecipe:
    """A validated recipe, and where each of its values came from."""

    recipe: Recipe
    path: Path
    origins: Mapping[str, str]  # dotted path of every written value -> `file:line` or `--set a.b=c`

    def origin(self, where: str) -> str:
        """Where the value at a dotted path was written; `default` where nobody wrote it."""
        return self.origins.get(where, "default")


@dataclass
class _Files:
    """The files read so far, each once, and what was wrong with them."""

    env: Mapping[str, str]
    trees: dict[Path, Node] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def load_recipe(path: Path, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None) -> LoadedRecipe:
    """Load the recipe at `path`: its `extends` ancestors, `${env:NAME}`, the overrides `a.b.0=c`, then presets.

    Raises `RecipeError` with every problem at once: dotted path, what was found, what is allowed, file and line.
    """
    files = _Files(os.environ if env is None else env)
    tree = _read(path, files, ())
    for override in overrides:
        tree = _override(tree, override, files)
    tree = presets.apply_presets(_anchor_paths(tree))
    problems, recipe = validate(tree, files.problems, CHECKS)
    if recipe is None:
        raise RecipeError(_message(path, problems))
    return LoadedRecipe(recipe, path, {dotted_path(at): str(node.origin) for at, node in iter_nodes(tree) if at})


def _read(path: Path, files: _Files, chain: tuple[Path, ...]) -> Node:
    """Read one file and lay it on what it extends."""
    if path in chain:
        raise RecipeError("recipes extend each other in a circle: " + " -> ".join(map(str, (*chain, path))))
    if path not in files.trees:
        own, problems = yaml.parse_yaml(_text(path), Origin(str(path), 1, path.parent), files.env)
        files.problems += problems
        files.trees[path] = _with_bases(own, path, files, (*chain, path))
    return files.trees[path]


def _with_bases(own: Node, path: Path, files: _Files, chain: tuple[Path, ...]) -> Node:
    if own.value is None:
        raise RecipeError(f"{path}: the file is empty; a recipe has at least name, model, data and train")
    if not isinstance(own.value, dict):
        raise RecipeError(f"{own.origin}: found {_kind(own)} at the top level; allowed: a mapping (`name: ...`)")
    tree = Node({}, own.origin)
    for base in _bases(own.value.get("extends"), files):
        where = Path(os.path.normpath(path.parent / str(base.value)))
        if not where.is_file():
            raise RecipeError(f"{base.origin}: extends: there is no file {where}")
        tree = merge_trees(tree, _read(where, files, chain))
    return merge_trees(tree, replace(own, value={key: child for key, child in own.value.items() if key != "extends"}))


def _bases(extends: Node | None, files: _Files) -> list[Node]:
    if extends is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends]
    for name in names:
        if not isinstance(name.value, str):
            found = f"found {_kind(name)}; allowed: the path of a recipe, or a list of paths"
            files.problems.append(Problem(("extends",), found, name.origin))
    return [name for name in names if isinstance(name.value, str)]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text; save the recipe as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from None


def _override(tree: Node, override: str, files: _Files) -> Node:
    """Apply one `a.b.0=c`; the value is YAML."""
    origin = Origin(f"--set {override}", None, Path.cwd())
    where, equals, text = override.partition("=")
    keys: KeyPath = tuple(where.strip().split("."))
    if not equals or not text.strip() or "" in keys:
        files.problems.append(Problem((), "allowed: a.b.0=value, with null for no value", origin))
        return tree
    value, problems = yaml.parse_yaml(text, origin, files.env)
    files.problems += [replace(problem, where=(*keys, *problem.where)) for problem in problems]
    result = set_node(tree, keys, value)
    if isinstance(result, Problem):
        files.problems.append(result)
        return tree
    return result


def _anchor_paths(tree: Node) -> Node:
    """Make paths absolute: each starts at the folder of whoever wrote it. The name of a shipped table is no path."""
    for at, node in list(iter_nodes(tree)):
        pattern = tuple("*" if isinstance(key, int) else key for key in at)
        if pattern in _PATHS and isinstance(node.value, str) and not (at == _TABLE and _is_name(node.value)):
            anchored = set_node(tree, at, replace(node, value=os.path.abspath(node.origin.folder / node.value)))
            assert isinstance(anchored, Node)
            tree = anchored
    return tree


def _is_name(value: str) -> bool:
    """Whether a value is a bare word: neither in a folder nor with a suffix."""
    return os.path.basename(value) == value and not os.path.splitext(value)[1]


def _message(path: Path, problems: Sequence[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{path}: {count}", *map(str, problems)])


def _kind(node: Node) -> str:
    if isinstance(node.value, list):
        return "a list"
    return "a mapping" if isinstance(node.value, dict) else repr(node.value)
