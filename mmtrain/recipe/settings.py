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


class Section(BaseModel):
    """Base of every part of a recipe: unknown keys are rejected, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    def _without(self, problems: list[str]) -> Self:
        """Return the section, or reject it with all its problems together."""
        if problems:
            raise ValueError("; ".join(problems))
        return self


def setting(default: Any = ..., *, affects: Collection[Effect], description: str, **constraints: Any) -> Any:
    """Declare a setting and what another value of it would invalidate; without a default it is required.

    Every setting must declare its effects, `NOTHING` if it has none. A field that holds a section may declare effects
    too: they restrict those of the settings inside. What data files hold is compared by content, so paths declare only
    the effects of their names.

    Args:
        default: the value if the recipe does not set it.
        affects: see `EFFECTS`.
        description: for users, in editors and error messages: meaning, unit, what the default does.
        constraints: further arguments of pydantic's `Field`, such as `ge`.
    """
    extra: dict[str, Any] = {AFFECTS_KEY: sorted(affects)}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def declared_effects(field: FieldInfo) -> frozenset[Effect] | None:
    """Return the effects that a field declares; None if it declares nothing."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or AFFECTS_KEY not in extra:
        return None
    declared: Any = extra[AFFECTS_KEY]
    return frozenset(declared)


def section_type(annotation: object) -> type[Section] | None:
    """Return the section that a field of this type holds, or holds several of; None for a plain setting."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def select(section: Section, effect: Effect, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
    """Return the settings below `section` that have the effect, as nested plain values.

    mode: as in pydantic's `model_dump`; `json` turns paths and tuples into texts and lists.
    """
    return section.model_dump(mode=mode, include=_included_fields(type(section), effect))


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
