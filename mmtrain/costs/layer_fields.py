"""Layers as cost tables state them: the fields that differ from their defaults, and the key that they make.

A table states a layer flat, without the records that `LayerShape` groups its fields in. Two fields of different records
therefore never have the same name.
"""

import difflib
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from mmtrain.models.shapes.layer_shape import (
    Attention,
    DenseMlp,
    GatedDeltaNet,
    GeneratorShape,
    MediaShape,
    MoeMlp,
    ProjectorShape,
)
from mmtrain.models.shapes.model_shape import LayerShape

# Records of a layer, with the field that holds them. Another kind of mixer or MLP has its class here too.
_HOLDERS: dict[type[Any], str] = {
    Attention: "mixer",
    GatedDeltaNet: "mixer",
    DenseMlp: "mlp",
    MoeMlp: "mlp",
    MediaShape: "media",
    ProjectorShape: "projector",
    GeneratorShape: "generator",
}
_OPTIONAL_RECORDS = ("mixer", "mlp")  # which a layer does not have if none of their fields is stated
# Not measured apart: what trains, the few vectors that queries are, activation functions that run again, copies to host
# memory, experts on several replicas or with unequal loads, how a router chooses them, by which angles heads turn, and
# what travels beside hidden states.
_NOT_MEASURED = (
    *("trainable", "frozen", "lora", "trains_adapters_only", "queries", "recomputes_activation", "offload", "ep"),
    *("load_spread", "router", "rotary_alternates", "rotary_base", "side_in", "side_out"),
)
_KINDS: tuple[str, ...] = get_args(get_type_hints(LayerShape)["kind"])


def _default(field: Field[Any]) -> Any:
    """Return the value of a field that tables leave out; widths without a default are left out if they are 0."""
    return 0 if field.default is MISSING else field.default


_RECORD_OF = {field.name: record for record in _HOLDERS for field in fields(record) if field.name not in _NOT_MEASURED}
_NOT_STATED = ("kind", *_HOLDERS.values(), *_NOT_MEASURED)
_DEFAULT_OF_FIELD = {name: _default(record.__dataclass_fields__[name]) for name, record in _RECORD_OF.items()} | {
    field.name: _default(field) for field in fields(LayerShape) if field.name not in _NOT_STATED
}
_FIELDS_IN_ORDER = (  # of saved tables; fields of new kinds of mixers and MLPs follow these
    *("hidden", "out", "heads", "kv_heads", "head_dim", "ffn", "gated", "causal", "rotary", "window_side", "chunk"),
    *("window", "image_spans", "rms_norm", "layer_post_norm", "linear_bias", "qkv_bias", "key_bias", "qk_norm"),
    *("joint_qk_norm", "post_norms", "zero_centered_norms", "layer_scale", "patch_features", "mel_bins"),
    *("partial_cells", "max_side", "vocab", "joins", "pools", "newline", "extra_tokens", "position_rows"),
    *("norm_widths", "carried_in", "carried_out", "scale", "context", "context_width", "time_width"),
)
_DEFAULTS = {name: _DEFAULT_OF_FIELD[name] for name in (*_FIELDS_IN_ORDER, *_DEFAULT_OF_FIELD)}


def layer_fields(layer: LayerShape) -> dict[str, Any]:
    """Return the fields of a layer that differ from their defaults.

    Which parts of a layer train is left out: it decides only which of the measured seconds apply. So are adapters and
    activation functions that run again: their modelled costs come on top.
    """
    stated: dict[str, Any] = {"kind": layer.kind}
    for name, default in _DEFAULTS.items():
        record = _RECORD_OF.get(name, LayerShape)
        holder = layer if record is LayerShape else getattr(layer, _HOLDERS[record])
        value = getattr(holder, name) if isinstance(holder, record) else default
        if value != default:
            stated[name] = list(value) if isinstance(value, tuple) else value
    return stated


def layer_key(stated: dict[str, Any]) -> str:
    """Return the fields of a layer as one comparable text."""
    return ",".join(f"{name}={stated[name]}" for name in sorted(stated))


def shape_of_fields(stated: dict[str, Any]) -> LayerShape:
    """Return the layer that such fields describe, without what of it trains."""
    values: dict[str, Any] = {"hidden": 0, "out": 0}
    in_records: dict[type[Any], dict[str, Any]] = {record: {} for record in _HOLDERS}
    for name, value in stated.items():
        fields_of_holder = in_records[_RECORD_OF[name]] if name in _RECORD_OF else values
        fields_of_holder[name] = tuple(value) if isinstance(value, list) else value
    for record, holder in _HOLDERS.items():
        if in_records[record] or holder not in _OPTIONAL_RECORDS:
            values[holder] = record(**in_records[record])
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
