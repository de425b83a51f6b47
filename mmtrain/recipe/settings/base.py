"""What every part of a recipe is made of: sections, and settings that declare what they affect."""

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Self, get_args, get_origin

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
ADDED_KEY = "added_later"  # likewise for settings that came after the first saved plans
POSITION_KEY = "position"  # what `select` adds to each of several sections by name


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
    added_later: bool = False,
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
        added_later: the default does what mmtrain did before it had the setting. Fingerprints and checkpoints leave the
            setting out while it has its default, so that adding it invalidates neither.
        constraints: further arguments of pydantic's `Field`, such as `ge`.
    """
    extra: dict[str, Any] = {AFFECTS_KEY: sorted(affects)}
    if formerly is not None:
        extra[FORMERLY_KEY] = formerly
    if added_later:
        extra[ADDED_KEY] = True
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


def _is_added_default(section: Section, name: str, field: FieldInfo) -> bool:
    """Return whether a setting was added later and has its default."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and ADDED_KEY in extra and getattr(section, name) == field.default


def section_types(annotation: object) -> tuple[type[Section], ...]:
    """Return the sections of which a field of this type holds one, several, or several by name; () for a setting."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(kind for argument in get_args(annotation) for kind in section_types(argument))


def holds_named_sections(annotation: object) -> bool:
    """Return whether a field of this type holds sections by names that the recipe chooses."""
    return get_origin(annotation) is dict and bool(section_types(annotation))


def holds_listed_sections(annotation: object) -> bool:
    """Return whether a field of this type holds a list of sections."""
    return get_origin(annotation) is tuple and bool(section_types(annotation))


def named_section_type(annotation: object, value: object) -> type[Section] | None:
    """Return which section the plain `value` stands for, of those that a field of this type may hold by name.

    Of several kinds the value's `modality` decides. None: there is no such kind, or the value is no section.
    """
    kinds = section_types(annotation)
    if not isinstance(value, dict):
        return None
    if len(kinds) == 1:
        return kinds[0]
    return next((kind for kind in kinds if kind.model_fields["modality"].default == value.get("modality")), None)


def select(section: Section, effect: Effect) -> dict[str, Any]:
    """Return the settings below `section` that have the effect, as nested JSON values by their present names.

    Settings that were `added_later` are left out while they have their default. Sections by name are left out where
    there are none, so that a field of them can be added without a change of what was saved before. Each of them tells
    its position: the order of encoders is the order of their features.
    """
    return _select(section, effect, "json", _present_name)


def select_for_saving(section: Section, effect: Effect, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
    """Return what `select` returns by the former names of the settings, for fingerprints and facts of checkpoints.

    mode: as in pydantic's `model_dump`; `json` turns paths and tuples into texts and lists.
    """
    return _select(section, effect, mode, _saved_name)


def text_for_saving(section: Section) -> str:
    """Return all settings of a section as one text, without those that were `added_later` and have their default."""
    fields = type(section).model_fields.items()
    shown = [name for name, field in fields if not _is_added_default(section, name, field)]
    return " ".join(f"{name}={getattr(section, name)!r}" for name in shown)


def _select(
    section: Section, effect: Effect, mode: Literal["json", "python"], key_of: Callable[[str, FieldInfo], str]
) -> dict[str, Any]:
    selected: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        if _is_added_default(section, name, field):
            continue
        effects = declared_effects(field)
        kinds = section_types(field.annotation)
        value = getattr(section, name)
        key = key_of(name, field)
        if not kinds:
            if effects is not None and effect in effects:
                selected[key] = section.model_dump(mode=mode, include={name})[name]
        elif (effects is not None and effect not in effects) or not any(_has_effect(kind, effect) for kind in kinds):
            continue
        elif isinstance(value, Section):
            inside = _select(value, effect, mode, key_of)
            if inside:  # else all of it was added later, and saved settings do not have the section
                selected[key] = inside
        elif isinstance(value, dict):
            for position, (child_name, child) in enumerate(value.items()):
                settings = {POSITION_KEY: position, **_select(child, effect, mode, key_of)}
                selected.setdefault(key, {})[child_name] = settings
        else:
            selected[key] = None if value is None else [_select(child, effect, mode, key_of) for child in value]
    return selected


def _present_name(name: str, field: FieldInfo) -> str:
    return name


def _saved_name(name: str, field: FieldInfo) -> str:
    return former_name(field) or name


def _has_effect(kind: type[Section], effect: Effect) -> bool:
    """Return whether a setting below sections of this type has the effect."""
    for field in kind.model_fields.values():
        effects = declared_effects(field)
        kinds = section_types(field.annotation)
        if not kinds and effects is not None and effect in effects:
            return True
        if (effects is None or effect in effects) and any(_has_effect(inner, effect) for inner in kinds):
            return True
    return False


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Turn nested mappings and sequences into one mapping from dotted path to plain value."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(i), part) for i, part in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, object] = {}
    for key, part in parts:
        flat.update(flatten(part, f"{path}.{key}" if path else key))
    return flat
