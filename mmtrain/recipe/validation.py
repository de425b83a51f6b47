"""Validation that tells everything at once, in the user's words."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

from pydantic import ValidationError

from mmtrain.recipe import json_schema
from mmtrain.recipe.raw_tree import KeyPath, Node, Problem, dotted_path, nearest_node, to_plain
from mmtrain.recipe.schema import Recipe
from mmtrain.recipe.settings import Section, section_type

Check = Callable[[Recipe], Iterable[Problem]]


class UnknownSetting(Exception):  # noqa: N818 - a signal between a check and its caller, not an error
    """A check read a setting whose value is missing or refused; it has nothing to say then."""


def validate(tree: Node, found: Sequence[Problem], checks: Iterable[Check]) -> tuple[list[Problem], Recipe | None]:
    """Turn the tree into a `Recipe`, or name everything that is wrong with it.

    `found` are problems known already; their paths are not reported twice. Each of `checks` looks at several settings
    together; where some setting is unusable, the checks that need it are left out and the others still speak.
    """
    raw = to_plain(tree)
    recipe: Recipe | None = None
    own: list[Problem] = []
    try:
        recipe = Recipe.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        all_details = cast(list[dict[str, Any]], error.errors(include_url=False))
        own = [_problem(details, tree) for details in all_details if not _follows(details, all_details)]
    known = {dotted_path(problem.where) for problem in found}
    own = [problem for problem in own if dotted_path(problem.where) not in known]
    refused = {problem.where for problem in (*found, *own)}
    view = recipe or cast(Recipe, _Readable(Recipe, cast(dict[str, object], raw), refused, ()))
    crossed = [problem for check in checks for problem in _run(check, view, tree)]
    problems = sorted((*found, *own, *crossed), key=lambda p: _order(p, tree))
    return problems, recipe if not problems else None


class _Readable:
    """Reads like a section of a `Recipe` whose validation failed: good values and defaults, never bad ones."""

    def __init__(self, section: type[Section], raw: dict[str, object], refused: set[KeyPath], at: KeyPath) -> None:
        self._section, self._raw, self._refused, self._at = section, raw, refused, at

    def __getattr__(self, name: str) -> object:
        field, here = self._section.model_fields[name], (*self._at, name)
        if name not in self._raw:
            if field.is_required():
                raise UnknownSetting(here)
            return field.default
        value, section = self._raw[name], section_type(field.annotation)
        if section and isinstance(value, dict):
            return _Readable(section, value, self._refused, here)
        if any(bad[: len(here)] == here for bad in self._refused):
            raise UnknownSetting(here)
        if section and isinstance(value, list):
            return [_Readable(section, item, self._refused, (*here, i)) for i, item in enumerate(value)]
        return value


def _run(check: Check, recipe: Recipe, tree: Node) -> Iterator[Problem]:
    try:
        for problem in check(recipe):
            yield replace(problem, origin=nearest_node(tree, problem.where).origin)
    except UnknownSetting:
        return


def _follows(details: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether a problem comes from another: a list too short without its bad items, what an unknown preset lacks."""
    keys = details["loc"]
    if details["type"] == "missing" and any(o["loc"] == (*keys[:-1], "preset") for o in others):
        return True
    return details["type"] == "too_short" and any(keys == o["loc"][: len(keys)] for o in others if o is not details)


def _problem(details: dict[str, Any], tree: Node) -> Problem:
    """Put one of pydantic's errors into our words."""
    keys: KeyPath = details["loc"]
    node = nearest_node(tree, keys)
    kind: str = details["type"]
    if kind == "extra_forbidden":
        return Problem(keys, _unknown(keys), node.origin)
    if kind == "value_error":
        return Problem(keys, str(details["ctx"]["error"]), node.origin)
    schema = json_schema.schema_at(keys) or {}
    allowed = json_schema.describe_allowed(schema)
    if kind == "missing":
        about = schema.get("description", "")
        return Problem(keys, f"missing; allowed: {allowed}" + (f" ({about})" if about else ""), node.origin)
    if kind in ("too_short", "too_long"):
        return Problem(keys, f"{details['msg']}; allowed: {allowed}", node.origin)
    names = [name for branch in schema.get("anyOf", [schema]) for name in branch.get("enum", ())]
    near = get_close_matches(str(node.value), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(keys, f"found {_shown(node)}, allowed: {allowed}{hint}", node.origin)


def _unknown(keys: KeyPath) -> str:
    *parent, name = keys
    known = json_schema.known_keys(tuple(parent))
    near = get_close_matches(str(name), known, n=1)
    elsewhere = [dotted_path(path) for path in json_schema.setting_paths() if path[-1] == name]
    if near:
        return f"unknown key; did you mean {near[0]}? Allowed here: {', '.join(known)}"
    if elsewhere:
        return f"unknown key here; it belongs to {' or '.join(elsewhere)}"
    return f"unknown key; allowed here: {', '.join(known)}"


def _shown(node: Node) -> str:
    if isinstance(node.value, list):
        return "a list"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, str):
        return f"the text {node.value!r}"
    return json.dumps(node.value)


def _order(problem: Problem, tree: Node) -> tuple[str, int]:
    origin = problem.origin or tree.origin
    return origin.source, origin.line or 0
