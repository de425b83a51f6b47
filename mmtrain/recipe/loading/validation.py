"""Validation: turn a tree of values into a `Recipe`, or report all problems at once in plain words."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import ismethod
from types import MethodType
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mmtrain.recipe.loading import json_schema
from mmtrain.recipe.loading.other_trainers import name_here
from mmtrain.recipe.raw_tree import KeyPath, Node, Problem, dotted_path, nearest_node, to_plain
from mmtrain.recipe.settings.base import (
    Section,
    holds_listed_sections,
    holds_named_sections,
    named_section_type,
    section_types,
)
from mmtrain.recipe.settings.schema import Recipe

PydanticError = dict[str, Any]  # one entry of `ValidationError.errors()`


class SettingUnavailableError(Exception):
    """A check read a setting that is missing or invalid, so the check cannot say anything."""


def validate(
    tree: Node, problems: Sequence[Problem], checks: Iterable[Callable[[Recipe], Iterable[Problem]]]
) -> tuple[list[Problem], Recipe | None]:
    """Turn the tree into a `Recipe`, or return everything that is wrong with it.

    Args:
        tree: the merged recipe.
        problems: those known already; the same setting is not reported twice.
        checks: rules that involve several settings. A check that needs an invalid setting is skipped.

    Returns:
        All problems in the order of files and lines, and the recipe if there are none.
    """
    raw = to_plain(tree)
    recipe: Recipe | None = None
    field_problems: list[Problem] = []
    try:
        recipe = Recipe.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as failure:
        errors = cast(list[PydanticError], failure.errors(include_url=False))
        reported = (_problem(error, tree) for error in errors if not _is_consequence(error, errors))
        field_problems = list(dict.fromkeys(reported))  # each alternative of a union reports the same value
    known = {dotted_path(problem.where) for problem in problems}  # keys of `--set` are texts, those of lists numbers
    field_problems = [problem for problem in field_problems if dotted_path(problem.where) not in known]
    invalid = {problem.where for problem in (*problems, *field_problems)}
    view = recipe or cast(Recipe, _PartialSection(Recipe, cast(dict[str, object], raw), invalid, ()))
    check_problems = [problem for check in checks for problem in _run_check(check, view, tree)]
    check_problems = [problem for problem in check_problems if dotted_path(problem.where) not in known]
    all_problems = sorted((*problems, *field_problems, *check_problems), key=lambda p: _position(p, tree))
    return all_problems, recipe if not all_problems else None


class _PartialSection:
    """Reads like a section of a `Recipe` whose validation failed: valid values and defaults only."""

    def __init__(self, section: type[Section], raw: dict[str, object], invalid: set[KeyPath], path: KeyPath) -> None:
        self._section = section
        self._raw = raw
        self._invalid = invalid
        self._path = path

    def __getattr__(self, name: str) -> object:
        field = self._section.model_fields.get(name)
        if field is None:
            return self._attribute(name)
        path = (*self._path, name)
        if name not in self._raw:
            if field.is_required():
                raise SettingUnavailableError(path)
            return field.default
        value = self._raw[name]
        kinds = section_types(field.annotation)
        is_list = holds_listed_sections(field.annotation)
        if kinds and isinstance(value, dict) and not is_list:
            if holds_named_sections(field.annotation):
                return {key: self._named(field, path, key, child) for key, child in value.items()}
            return _PartialSection(kinds[0], value, self._invalid, path)
        if any(keys[: len(path)] == path for keys in self._invalid):
            raise SettingUnavailableError(path)
        if is_list and isinstance(value, list):
            return [_PartialSection(kinds[0], item, self._invalid, (*path, i)) for i, item in enumerate(value)]
        return value

    def _attribute(self, name: str) -> object:
        """Return a property or a method of the section, which then sees this view."""
        attribute = getattr(self._section, name)
        if isinstance(attribute, property):
            assert attribute.fget is not None, name
            return attribute.fget(self)
        return attribute if ismethod(attribute) else MethodType(attribute, self)  # class methods read no values

    def _named(self, field: FieldInfo, path: KeyPath, name: str, value: object) -> "_PartialSection":
        """Return one of several sections that a recipe names."""
        kind = named_section_type(field.annotation, value)
        if kind is None or (*path, name) in self._invalid:
            raise SettingUnavailableError((*path, name))
        return _PartialSection(kind, cast(dict[str, object], value), self._invalid, (*path, name))


def _run_check(check: Callable[[Recipe], Iterable[Problem]], recipe: Recipe, tree: Node) -> Iterator[Problem]:
    try:
        for problem in check(recipe):
            yield replace(problem, origin=nearest_node(tree, problem.where).origin)
    except SettingUnavailableError:
        return


def _is_consequence(error: PydanticError, errors: list[PydanticError]) -> bool:
    """Return whether another error caused this one.

    Two cases: settings that an unknown preset would have supplied are missing, and a list is too short because some of
    its items are invalid.
    """
    keys = error["loc"]
    if error["type"] == "missing" and any(other["loc"] == (*keys[:-1], "preset") for other in errors):
        return True
    others_inside = any(keys == other["loc"][: len(keys)] for other in errors if other is not error)
    return error["type"] == "too_short" and others_inside


def _problem(error: PydanticError, tree: Node) -> Problem:
    """Say one of pydantic's errors in the words of this package."""
    location = _location(error)
    keys = json_schema.without_tags(location)
    node = nearest_node(tree, keys)
    kind: str = error["type"]
    if kind == "extra_forbidden":
        return Problem(keys, _unknown_key(location), node.origin)
    if kind == "value_error":
        return Problem(keys, str(error["ctx"]["error"]), node.origin)
    schema = json_schema.schema_at(location) or {}
    allowed = json_schema.describe_allowed(schema)
    if kind in ("missing", "union_tag_not_found"):
        description = schema.get("description", "")
        text = f"missing; allowed: {allowed}" + (f" ({description})" if description else "")
        return Problem(keys, text, node.origin)
    if kind in ("too_short", "too_long"):
        return Problem(keys, f"{error['msg']}; allowed: {allowed}", node.origin)
    names = [name for branch in schema.get("anyOf", [schema]) for name in json_schema.named_values(branch)]
    closest = get_close_matches(str(node.value), map(str, names), n=1)
    hint = f"; did you mean {closest[0]}?" if closest else ""
    return Problem(keys, f"found {_describe_value(node)}, allowed: {allowed}{hint}", node.origin)


def _location(error: PydanticError) -> KeyPath:
    """Return the path of what is wrong, with the tags of unions of sections.

    For a wrong name that is the path of the named section. For a value that no alternative of a union takes, such as
    `true` or `auto`, it is the path of the setting without the alternative's name.
    """
    keys: KeyPath = error["loc"]
    if keys and keys[-1] == "[key]":
        return keys[:-1]
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return (*keys, str(error["ctx"]["discriminator"]).strip("'"))
    return keys[:-1] if json_schema.is_alternative(keys) else keys


# What looks like a setting because an option of the command line counts in it, or other sections have one.
_NO_SETTINGS: Mapping[KeyPath, str] = {
    ("train", "optimizer", "name"): "the optimizer is AdamW; train.optimizer.moments: bf16 makes its state smaller",
    ("train", "mtp"): "blocks that predict further tokens (mtp.*) are not trained; export copies those of model.hf",
    ("cluster", "nodes"): "set cluster.ranks, the ranks of all nodes; `plan --cluster h100-80g:nodes=8` counts them",
}


def _unknown_key(keys: KeyPath) -> str:
    """Say what is allowed in place of an unknown key, whose path has the tags of unions."""
    new_path = json_schema.renamed_settings().get(keys)
    if new_path is not None:
        return f"this setting is now called {dotted_path(new_path)}; rename it"
    *parent, name = keys
    if tuple(keys) in _NO_SETTINGS:
        return f"unknown key; {_NO_SETTINGS[tuple(keys)]}"
    elsewhere = [dotted_path(path) for path in json_schema.setting_paths() if path[-1] == name]
    if elsewhere:  # before what is close: `train.lr` is no misspelt `train.lora`
        return f"unknown key here; it belongs to {' or '.join(elsewhere)}"
    here = name_here(str(name))
    if here is not None:
        return f"unknown key; what other trainers call {name} {here}"
    known = json_schema.known_keys(tuple(parent))
    closest = get_close_matches(str(name), known, n=1)
    if closest:
        return f"unknown key; did you mean {closest[0]}? Allowed here: {', '.join(known)}"
    return f"unknown key; allowed here: {', '.join(known)}"


def _describe_value(node: Node) -> str:
    if isinstance(node.value, list):
        return "a list"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, str):
        return f"the text {node.value!r}"
    return json.dumps(node.value)


def _position(problem: Problem, tree: Node) -> tuple[str, int]:
    """Return file and line, to sort problems by."""
    origin = problem.origin or tree.origin
    return origin.source, origin.line or 0
