"""What trains: the names of a layer's parameters, known without torch, and which of them a recipe freezes.

`freeze` flags of the units and the patterns of `train.freeze` come together here; planner and modules both read the
result, `LayerShape.frozen` and `LayerShape.trainable`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mmtrain.errors import RecipeError
from mmtrain.recipe.model_settings import AudioSettings, GeneratorSettings, LlmSettings, VisionSettings
from mmtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from mmtrain.models.model_shape import LayerShape, UnitShape

AnyUnitSettings = VisionSettings | AudioSettings | LlmSettings | GeneratorSettings


def mark_frozen(units: Iterable["UnitShape"], recipe: Recipe) -> tuple["UnitShape", ...]:
    """Mark what does not train in every layer of the units.

    A layer is trainable while one of its parameters is; a head that shares the embedding's matrix also while that is.
    Raises RecipeError if a pattern of `train.freeze` matches no parameter.
    """
    units = tuple(units)
    names = {u.name: [tuple(parameter_names(x, _settings(recipe, u.name))) for x in u.layers] for u in units}
    by_pattern = _matching(
        recipe.train.freeze,
        [f"{unit}.layers.{i}.{name}" for unit, layers in names.items() for i, own in enumerate(layers) for name in own],
    )
    made: dict[LayerShape, LayerShape] = {}  # equal layers stay one object, which the planner's caches rely on

    def layer(unit: "UnitShape", index: int) -> "LayerShape":
        shape, own, settings = unit.layers[index], names[unit.name][index], _settings(recipe, unit.name)
        frozen = frozenset(
            n for n in own if _by_flag(shape, settings, n) or f"{unit.name}.layers.{index}.{n}" in by_pattern
        )
        trains = len(frozen) < len(own)
        if shape.kind == "head" and isinstance(settings, LlmSettings) and settings.tie_embeddings:
            trains = trains or layer(unit, 0).trainable
        shape = replace(shape, frozen=frozen, trainable=trains)
        return made.setdefault(shape, shape)

    return tuple(replace(u, layers=tuple(layer(u, i) for i in range(len(u.layers)))) for u in units)


def parameter_names(layer: "LayerShape", settings: AnyUnitSettings) -> Iterator[str]:
    """Names of the layer's parameters inside the layer, in no particular order.

    `<unit>.layers.<index>.` before them makes the plan-independent name.
    """
    match layer.kind:
        case "vit_block" | "decoder_block":
            yield from _norm("input_layernorm", layer)
            yield from _linear("self_attention.linear_qkv", layer.qkv_bias)
            yield from _linear("self_attention.linear_proj", layer.linear_bias)
            yield from _norm("pre_mlp_layernorm", layer)
            yield from _linear("mlp.linear_fc1", layer.linear_bias)
            yield from _linear("mlp.linear_fc2", layer.linear_bias)
        case "patch_embed":
            assert isinstance(settings, VisionSettings)
            yield from _linear("proj", layer.linear_bias)
            yield from ("class_token",) * settings.class_token
            yield from {"factorized": ("row_positions", "col_positions"), "grid": ("grid_positions",)}[
                settings.positions
            ]
            yield from _norm("pre_norm", layer) if settings.pre_norm else ()
        case "audio_embed":
            yield from (*_linear("conv1", layer.linear_bias), *_linear("conv2", layer.linear_bias))
            yield from ("positions",) if layer.position_rows else ()
        case "projector":
            assert isinstance(settings, VisionSettings | AudioSettings)
            yield from _norm("post_norm", layer) if isinstance(settings, AudioSettings) or settings.post_norm else ()
            yield from _norm("norm", layer) if settings.projector.norm else ()
            yield from _linear("linear_1", layer.linear_bias)
            yield from _linear("linear_2", layer.linear_bias)
        case "embedding":
            yield "table.weight"
        case "head":
            assert isinstance(settings, LlmSettings)
            yield from _norm("norm", layer)
            yield from () if settings.tie_embeddings else ("output.weight",)
        case _:  # of a generator: no module has parameters to name, and patterns reach each layer as a whole
            yield "weight"


def _settings(recipe: Recipe, unit: str) -> AnyUnitSettings:
    settings: AnyUnitSettings = getattr(recipe.model, unit)
    return settings


def _norm(name: str, layer: "LayerShape") -> tuple[str, ...]:
    return (f"{name}.weight",) if layer.rms_norm else (f"{name}.weight", f"{name}.bias")


def _linear(name: str, bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)


def _by_flag(layer: "LayerShape", settings: AnyUnitSettings, name: str) -> bool:
    """A frozen encoder's projector trains on, but for the encoder's last norm, which it holds."""
    if layer.kind == "context_projector":
        return False
    if layer.kind == "projector" and not name.startswith("post_norm."):
        assert isinstance(settings, VisionSettings | AudioSettings)
        return settings.projector.freeze
    return settings.freeze


def _matching(patterns: Iterable[str], names: list[str]) -> set[str]:
    """Names that match a pattern."""
    found: set[str] = set()
    for i, pattern in enumerate(patterns):
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            near = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.0))
            raise RecipeError(
                f"train.freeze.{i}: {pattern} matches no parameter of this model; the nearest are {near}. "
                "Patterns are those of a shell: * for any text, ? for one character, [0-3] for one of a range"
            )
        found |= matches
    return found
