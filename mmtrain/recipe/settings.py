"""What every part of a recipe is made of: sections, and settings that declare what they affect."""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]

Effect = Literal["plan", "lengths", "steps", "resume"]
EFFECTS: dict[Effect, str] = {
    "plan": "with another value a saved plan no longer matches the recipe",
    "lengths": "with another value samples have other lengths, so a cached index is built again",
    "steps": "with another value steps hold other data, so a trainer and its data producers must agree on it",
    "resume": "with another value a run cannot be resumed from a checkpoint",
}
NOTHING: frozenset[Effect] = frozenset()  # for settings that affect none of these
AFFECTS_KEY = "affects"  # where the schema of a field keeps the declaration
FORMERLY_KEY = "formerly"  # likewise for the name before a renaming


class Section(BaseModel):
    """Base of every part of a recipe: unknown keys are rejected, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    def _without(self, problems: list[str]) -> Self:
        """Return the section, or reject it with all its problems together."""
        if problems:
            raise ValueError("; ".join(problems))
        return self


def setting(
    default: Any = ...,
    *,
    affects: Collection[Effect],
    description: str,
    formerly: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare a setting and what another value of it would invalidate; without a default it is required.

    Every setting must declare its effects, `NOTHING` if it has none. A field that holds a section may declare effects
    too: they restrict those of the settings inside. What data files hold is compared by content, so paths declare only
    the effects of their names.

    Args:
        default: the value if the recipe does not set it.
        affects: see `EFFECTS`.
        description: for users, in editors and error messages: meaning, unit, what the default does.
        formerly: the name before a renaming. Recipes with it are rejected with the new name in the message, and
            fingerprints and checkpoints keep it as a key, so that a renaming invalidates neither.
        constraints: further arguments of pydantic's `Field`, such as `ge`.
    """
    extra: dict[str, Any] = {AFFECTS_KEY: sorted(affects)}
    if formerly is not None:
        extra[FORMERLY_KEY] = formerly
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def declared_effects(field: FieldInfo) -> frozenset[Effect] | None:
    """Return the effects that a field declares; None if it declares nothing."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or AFFECTS_KEY not in extra:
        return None
    declared: Any = extra[AFFECTS_KEY]
    return frozenset(declared)


def former_name(field: FieldInfo) -> str | None:
    """Return the name of a field before it was renamed; None if it never was."""
    extra = field.json_schema_extra
    return str(extra[FORMERLY_KEY]) if isinstance(extra, dict) and FORMERLY_KEY in extra else None


def section_type(annotation: object) -> type[Section] | None:
    """Return the section that a field of this type holds, or holds several of; None for a plain setting."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def select(section: Section, effect: Effect, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
    """Return the settings below `section` that have the effect, as nested plain values by their present names.

    mode: as in pydantic's `model_dump`; `json` turns paths and tuples into texts and lists.
    """
    return section.model_dump(mode=mode, include=_included_fields(type(section), effect))


def with_former_names(kind: type[Section], values: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of what `select` returned for a section of this type to the former names of the settings.

    What is saved must use it: fingerprints and the facts of checkpoints.
    """
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        field = kind.model_fields[name]
        nested = section_type(field.annotation)
        if nested is not None and isinstance(value, dict):
            value = with_former_names(nested, value)
        elif nested is not None and isinstance(value, list | tuple):
            value = [with_former_names(nested, item) for item in value]
        renamed[former_name(field) or name] = value
    return renamed


def _included_fields(kind: type[Section], effect: Effect) -> dict[str, Any]:
    """Return the fields to include in pydantic's nested form."""
    included: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        effects = declared_effects(field)
        nested = section_type(field.annotation)
        if nested is None:
            if effects is not None and effect in effects:
                included[name] = True
        elif effects is None or effect in effects:
            nested_fields = _included_fields(nested, effect)
            is_single = field.annotation is nested or type(None) in get_args(field.annotation)
            if nested_fields:
                included[name] = nested_fields if is_single else {"__all__": nested_fields}
    return included
