"""Layers as cost tables state them: the fields that differ from their defaults, and the key that they make."""

import difflib
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args, get_type_hints

from mmtrain.models.shapes.model_shape import LayerShape

# Not measured apart: what trains, the few vectors that queries are, activation functions that run again, and copies to
# host memory.
_NOT_MEASURED = ("trainable", "frozen", "lora", "trains_adapters_only", "queries", "recomputes_activation", "offload")
_KINDS: tuple[str, ...] = get_args(get_type_hints(LayerShape)["kind"])
_NO_WIDTHS = {"hidden": 0, "out": 0}
_DEFAULTS = {
    field.name: _NO_WIDTHS.get(field.name, field.default)
    for field in fields(LayerShape)
    if field.name not in _NOT_MEASURED and (field.default is not MISSING or field.name in _NO_WIDTHS)
}


def layer_fields(layer: LayerShape) -> dict[str, Any]:
    """Return the fields of a layer that differ from their defaults.

    Which parts of a layer train is left out: it decides only which of the measured seconds apply. So are adapters and
    activation functions that run again: their modelled costs come on top.
    """
    values = asdict(layer)
    stated = {name: values[name] for name, default in _DEFAULTS.items() if values[name] != default}
    return {"kind": layer.kind} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()
    }


def layer_key(stated: dict[str, Any]) -> str:
    """Return the fields of a layer as one comparable text."""
    return ",".join(f"{name}={stated[name]}" for name in sorted(stated))


def shape_of_fields(stated: dict[str, Any]) -> LayerShape:
    """Return the layer that such fields describe, without what of it trains."""
    values: dict[str, Any] = dict(_NO_WIDTHS)
    for name, value in stated.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return LayerShape(**values)


def checked_layer_fields(stated: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as `layer_fields` writes them, without those that state a default.

    Raises:
        ValueError: a field or a kind of layer is unknown, or a value is of another type or negative. Such an entry
            would describe no layer of any model, so that it would never be used.
    """
    if stated.get("kind") not in _KINDS:
        raise ValueError(f"kind {stated.get('kind')!r} is no kind of layer; allowed: {', '.join(_KINDS)}")
    for name, value in stated.items():
        if name == "kind":
            continue
        if name not in _DEFAULTS:
            nearest = difflib.get_close_matches(name, _DEFAULTS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"{name}={value!r} is no field of a layer{hint}")
        _require_type(name, value)
    return layer_fields(shape_of_fields(stated))


def _require_type(name: str, value: object) -> None:
    """Raise ValueError for a value of another type than the field's default, and for a negative number."""
    default = _DEFAULTS[name]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, found {value!r}")
        return
    numbers = value if isinstance(default, tuple) and isinstance(value, list) else [value]
    assert isinstance(numbers, list)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name} must be a whole number and not negative, found {value!r}")
