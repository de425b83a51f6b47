"""The recipe as JSON Schema: for editors, and for error messages that say what a setting allows."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from mmtrain.recipe.raw_tree import KeyPath
from mmtrain.recipe.settings.base import (
    ADDED_KEY,
    AFFECTS_KEY,
    FORMERLY_KEY,
    Section,
    former_name,
    holds_named_sections,
    section_types,
)
from mmtrain.recipe.settings.schema import Recipe

JsonSchema = dict[str, Any]
_INTERPOLATED = {"type": "string", "pattern": r"\$\{env:"}


def editor_schema() -> JsonSchema:
    """Return the JSON Schema of a recipe *file*: the settings of `Recipe`, plus `extends`, `stages` and interpolation.

    Nested `required` lists are left out, because a recipe named in `extends` may supply what this file leaves out.
    """
    schema = _relax(_recipe_schema())
    assert isinstance(schema, dict)
    schema["properties"]["extends"] = {
        "description": "Recipes that this one builds on, as paths relative to this file. Later ones take precedence.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    sections = {name: schema["properties"][name] for name in ("model", "data", "parallel", "cluster", "train")}
    schema["properties"]["stages"] = {
        "description": "Runs one after another, each from the weights of the one before. A stage has a `name` and the "
        "settings in which it differs from the recipe. `--set stage=NAME` chooses one of them.",
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"name": schema["properties"]["name"], **sections},
            "required": ["name"],
            "additionalProperties": False,
        },
    }
    required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "anyOf": [{"required": ["extends"]}, {"required": ["stages"]}, {"required": required}],
    }


def schema_at(keys: KeyPath) -> JsonSchema | None:
    """Return the schema of the setting at a path, with references resolved; None if a recipe has no such setting.

    Below a section that may be of several kinds the path has a tag: the value of the setting that tells them apart.
    """
    schema: JsonSchema | None = _follow(_recipe_schema())
    for key in keys:
        schema = None if schema is None else _child(schema, key)
    return schema


def without_tags(keys: KeyPath) -> KeyPath:
    """Return a path of pydantic's as a recipe has it, without the tags of sections that may be of several kinds."""
    plain: list[str | int] = []
    for i, key in enumerate(keys):
        above = schema_at(keys[:i])
        if above is None or key not in _kinds(above):
            plain.append(key)
    return tuple(plain)


def is_alternative(keys: KeyPath) -> bool:
    """Return whether a path of pydantic's ends with the name of an alternative of a value, like `bool`."""
    if not keys or schema_at(keys) is not None:
        return False
    above = schema_at(keys[:-1]) or {}
    return "anyOf" in above and not _mapping(above)


def _child(schema: JsonSchema, key: str | int) -> JsonSchema | None:
    properties = _mapping(schema).get("properties", {})
    kinds = _kinds(schema)
    child: JsonSchema | None = None
    if key in properties:
        child = properties[key]
    elif key in kinds:
        child = kinds[str(key)]
    elif kinds and key == schema["discriminator"]["propertyName"]:
        child = {"enum": list(kinds)}
    elif isinstance(key, int) and "prefixItems" in schema and key < len(schema["prefixItems"]):
        child = schema["prefixItems"][key]
    elif isinstance(key, int) and "items" in schema:
        child = schema["items"]
    elif isinstance(key, str) and isinstance(schema.get("additionalProperties"), dict):
        child = schema["additionalProperties"]
    return None if child is None else _follow(child)


def _kinds(schema: JsonSchema) -> dict[str, JsonSchema]:
    """Return the schemas of a section that may be of several kinds, by their tags; nothing for other settings."""
    mapping = schema.get("discriminator", {}).get("mapping", {})
    return {tag: {"$ref": reference} for tag, reference in mapping.items()}


def known_keys(keys: KeyPath) -> list[str]:
    """Return the names allowed in the mapping at a path; none if the setting there is not a mapping."""
    return list(_mapping(schema_at(keys) or {}).get("properties", {}))


def setting_paths(keys: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every setting below `keys`, except for settings inside lists."""
    for name in known_keys(keys):
        yield (*keys, name)
        yield from setting_paths((*keys, name))


@cache
def renamed_settings() -> dict[KeyPath, KeyPath]:
    """Return the path of every renamed setting before and after the renaming."""
    return dict(_renamed_settings(Recipe, ()))


def _renamed_settings(kind: type[Section], path: KeyPath) -> Iterator[tuple[KeyPath, KeyPath]]:
    for name, field in kind.model_fields.items():
        former = former_name(field)
        if former is not None:
            yield (*path, former), (*path, name)
        if not holds_named_sections(field.annotation):
            for nested in section_types(field.annotation):
                yield from _renamed_settings(nested, (*path, name))


def named_values(schema: JsonSchema) -> list[Any]:
    """Return the values that a setting names one by one, like `auto`; none for a number or any text."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def describe_allowed(schema: JsonSchema) -> str:
    """Describe in words what a setting allows: `a whole number of at least 1, or null`."""
    schema = _follow(schema)
    if "anyOf" in schema:
        return ", or ".join(describe_allowed(choice) for choice in schema["anyOf"])
    if "discriminator" in schema:
        return "a mapping"
    if names := named_values(schema):
        *others, last = map(str, names)
        return f"{', '.join(others)} or {last}" if others else last
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(schema)
    if kind == "array":
        items = schema.get("prefixItems")
        return f"a list of {len(items)}: {describe_allowed(items[0])} each" if items else "a list"
    if kind == "string" and schema.get("format") == "path":
        return "a path"
    if kind == "string" and "pattern" in schema:
        return f"text like {schema['pattern']}"
    of_kind = {"boolean": "true or false", "string": "text", "null": "null", "object": "a mapping"}
    return of_kind.get(str(kind), "another value")


def _range(schema: JsonSchema) -> str:
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[name]:g}" for name, word in words.items() if name in schema]
    return " " + " and ".join(limits) if limits else ""


@cache
def _recipe_schema() -> JsonSchema:
    schema = _without_declarations(Recipe.model_json_schema())
    assert isinstance(schema, dict)
    return schema


def _without_declarations(schema: object) -> object:
    """Drop effects and former names of settings, which are for this package and not for users."""
    if isinstance(schema, list):
        return [_without_declarations(item) for item in schema]
    if isinstance(schema, dict):
        return {
            key: _without_declarations(value)
            for key, value in schema.items()
            if key not in (ADDED_KEY, AFFECTS_KEY, FORMERLY_KEY)
        }
    return schema


def _follow(schema: JsonSchema) -> JsonSchema:
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = {**_recipe_schema()["$defs"][name], **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _mapping(schema: JsonSchema) -> JsonSchema:
    """Return the alternative of an optional section that is a mapping; empty if there is none."""
    return next((s for s in map(_follow, schema.get("anyOf", [schema])) if "properties" in s), {})


def _relax(schema: object) -> object:
    """Drop `required`, and allow `${env:NAME}` for every scalar that is not a text."""
    if isinstance(schema, list):
        return [_relax(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    relaxed = {key: _relax(value) for key, value in schema.items() if key != "required"}
    is_scalar = relaxed.get("type") in ("integer", "number", "boolean") or "enum" in relaxed
    if not is_scalar:
        return relaxed
    annotations = {key: relaxed.pop(key) for key in ("title", "description", "default") if key in relaxed}
    return {**annotations, "anyOf": [relaxed, _INTERPOLATED]}
