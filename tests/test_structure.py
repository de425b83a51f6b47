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
MAX_LINES_PER_FUNCTION = 60
MAX_PARAMETERS = 7  # outside the command line, whose options are parameters
MAX_GLOSSARY_ENTRIES = 40


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


@pytest.mark.parametrize("kind", ["modules", "classes", "functions"])
def test_retired_words_name_nothing(kind: str) -> None:
    _, retired = glossary()
    assert len(retired) > 30
    names = set()
    for module, tree in modules().items():
        if kind == "modules":
            names.add(module)
        for node in tree.body:
            if kind == "classes" and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.add(f"{module}.{node.name}")
            if kind == "functions" and isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names.add(f"{module}.{node.name}")
            if kind == "functions" and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
                names |= {f"{module}.{node.name}.{m.name}" for m in methods if not m.name.startswith("_")}
    offending = {name for name in names if words_of(name.rsplit(".", 1)[-1]) & retired}
    assert offending == set()
