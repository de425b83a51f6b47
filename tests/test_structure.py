"""What keeps the tree readable: no import cycles, short functions, one name for one thing, no retired words."""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mmtrain"
TESTS = ROOT / "tests"
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
MAX_LINES_PER_FUNCTION = 60
MAX_PARAMETERS = 7  # outside the command line, whose options are parameters
MAX_GLOSSARY_ENTRIES = 30


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package by its dotted name; a package stands for its __init__."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imports_of(tree: ast.Module) -> set[str]:
    """Return every module of ours that a module imports, inside functions and for type checking included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules() else node.module)
    return names & set(modules())


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two or more modules (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []
    counter = itertools.count()

    def visit(node: str) -> None:
        index[node] = low[node] = next(counter)
        stack.append(node)
        for successor in sorted(graph[node]):
            if successor not in index:
                visit(successor)
                low[node] = min(low[node], low[successor])
            elif successor in stack:
                low[node] = min(low[node], index[successor])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                components.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return components


def test_the_cycle_finder_finds_cycles() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    assert cycles({name: imports_of(tree) - {name} for name, tree in modules().items()}) == []


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{module}.{function.name}": lines
        for module, function in functions()
        if not module.startswith("mmtrain.cli")
        and (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_LINES_PER_FUNCTION
    }
    assert long == {}


def test_functions_take_few_parameters() -> None:
    wide = {}
    for module, function in functions():
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in every)
        if count > MAX_PARAMETERS and not module.startswith("mmtrain.cli"):
            wide[f"{module}.{function.name}"] = count
    assert wide == {}


def test_a_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: places_of_class for name, places_of_class in places.items() if len(places_of_class) > 1} == {}


def test_a_module_name_stands_for_one_module() -> None:
    """Excepted are the command line, whose modules are called like the commands, and packages within a room."""
    places = defaultdict(list)
    for module in modules():
        is_package = ROOT.joinpath(*module.split(".")).is_dir()
        if not module.startswith("mmtrain.cli") and module.count(".") > 1 and not is_package:
            places[module.rsplit(".", 1)[1]].append(module)
    assert {name: places_of_module for name, places_of_module in places.items() if len(places_of_module) > 1} == {}


@cache
def words_of(name: str) -> set[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def glossary() -> tuple[list[str], set[str]]:
    """Return the entries of docs/glossary.md, and the words that it lists as retired."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    defined, _, retired = page.partition("## Retired words")
    entries = re.findall(r"^\| \*\*(.+?)\*\* \|", defined, re.M)
    return entries, set(re.findall(r"`([a-z]+)`", retired))


def test_the_glossary_is_short_and_has_no_entry_twice() -> None:
    entries, _ = glossary()
    assert 20 <= len(entries) <= MAX_GLOSSARY_ENTRIES
    assert len(set(entries)) == len(entries)


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module gives or uses: of classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name


def test_retired_words_name_nothing() -> None:
    _, retired = glossary()
    assert len(retired) > 30
    offending = set()
    for module, tree in modules().items():
        for name in (module.rsplit(".", 1)[-1], *names_of(tree)):
            if words_of(name) & retired:
                offending.add(f"{module}: {name}")
    assert offending == set()


def modules_named_in(path: Path) -> set[str]:
    """Return the dotted names of ours that a test names: in imports, or in the text of a program that it starts."""
    return set(re.findall(r"\b(?:mmtrain|tests)(?:\.\w+)+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", sorted(path for path in TESTS.iterdir() if path.name in ROOMS), ids=lambda f: f.name)
def test_a_test_lies_in_the_folder_of_a_room_that_it_uses(folder: Path) -> None:
    """Itself, or by the helpers and the conftest.py beside it. Tests of whole runs lie in `flow` instead."""
    named = {path: modules_named_in(path) for path in folder.rglob("*.py")}
    helpers = {".".join(path.relative_to(ROOT).with_suffix("").parts): names for path, names in named.items()}
    misplaced = []
    for path in folder.rglob("test_*.py"):
        names = named[path].union(named.get(folder / "conftest.py", set()), *(helpers.get(n, ()) for n in named[path]))
        if not any(name.startswith(f"mmtrain.{folder.name}") for name in names):
            misplaced.append(path.name)
    assert misplaced == []


def test_every_folder_of_tests_is_of_a_room_or_of_whole_runs_or_scripts() -> None:
    folders = {path.name for path in TESTS.iterdir() if (path / "__init__.py").exists()}
    assert folders - ROOMS == {"compatibility", "flow", "fuzz", "rehearsal", "scripts"}
