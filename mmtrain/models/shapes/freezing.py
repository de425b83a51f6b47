"""What trains: the names of a layer's parameters, known without torch, and which of them a recipe freezes.

The `freeze` flags of the units and the patterns of `train.freeze` are combined here. Planner and torch modules read
the result from `LayerShape.frozen` and `LayerShape.trainable`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from mmtrain.errors import RecipeError
from mmtrain.models.shapes.encoder_shapes import ENCODER_SHAPES
from mmtrain.models.shapes.generator_shapes import generator_parameters
from mmtrain.models.shapes.layer_shape import (
    AVERAGE_SCALE,
    AVERAGE_SHIFT,
    EXPERT_LINEARS,
    LAYER_INPUT_LINEARS,
    LAYER_INPUT_NORM,
    LAYER_INPUTS_LINEAR,
    LAYER_INPUTS_NORM,
    LAYER_INPUTS_TABLE,
    MERGE_LINEAR,
    OUTPUT_SCALE,
    PROJECTOR_KINDS,
    ROUTER,
    SELECTION_BIAS,
    WITHOUT_GRADIENT,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    LayerShape,
    LoraShape,
    MoeMlp,
    adaptable_linears,
    adapter_parameters,
    deepstack_projectors,
    has_rms_post_norm,
    is_of_expert,
    joint_linears,
    linear_parameters,
    norm_parameters,
)
from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings

# The parameter of an embedding with learned vectors for the positions of an image to draw, and that of a resampler.
QUERIES = "queries"
AnyUnitSettings: TypeAlias = EncoderSettings | LlmSettings | GeneratorSettings
# Linears as transformers and Megatron-LM name them -> patterns over ours. Gate and up are joint, as in experts.
LINEAR_PATTERNS = {
    "q_proj": "llm.*.linear_q",
    "k_proj": "llm.*.linear_k",
    "v_proj": "llm.*.linear_v",
    "linear_qkv": "llm.*.linear_qkv",
    "o_proj": "llm.*.linear_proj",
    "linear_proj": "llm.*.linear_proj",
    "gate_proj": "llm.*.linear_fc1",
    "up_proj": "llm.*.linear_fc1",
    "linear_fc1": "llm.*.linear_fc1",
    "down_proj": "llm.*.linear_fc2",
    "linear_fc2": "llm.*.linear_fc2",
}


def mark_frozen(units: Iterable[UnitShape], recipe: Recipe) -> tuple[UnitShape, ...]:
    """Return the units with what trains, `frozen`, `trainable` and the adapters of `train.lora`, set in every layer.

    A layer is trainable if at least one of its parameters trains. The head of a model with tied embeddings also is if
    the embedding trains. With `train.lora` everything is frozen but the adapters and what `also_train` names.

    Raises:
        RecipeError: a pattern of `train.freeze` or `train.lora` matches no parameter.
    """
    units = tuple(units)
    settings: dict[str, AnyUnitSettings] = {unit.name: recipe.model.unit(unit.name) for unit in units}
    names = _spellings((name for unit in units for name in _full_names(unit, settings[unit.name])), units)
    matched = _match_patterns("train.freeze", recipe.train.freeze, names)
    lora = recipe.train.lora
    adapted: set[str] = set()
    if lora is not None:
        linears = _spellings((linear for unit in units for linear in _full_linears(unit)), units)
        adapted = _match_patterns("train.lora.targets", lora.targets, linears)
        matched |= set(names.values()) - _match_patterns("train.lora.also_train", lora.also_train, names)
    # Equal layers must stay one object: the planner's caches rely on it.
    unique: dict[LayerShape, LayerShape] = {}
    marked = []
    for unit in units:
        layers = _mark_layers(unit, settings[unit.name], matched)
        if lora is not None:
            layers = [
                _with_adapters(layer, f"{unit.name}.layers.{i}.", adapted, lora) for i, layer in enumerate(layers)
            ]
        marked.append(replace(unit, layers=tuple(unique.setdefault(layer, layer) for layer in layers)))
    return tuple(marked)


def all_parameter_names(units: Iterable[UnitShape], recipe: Recipe) -> Iterator[str]:
    """Yield the plan-independent names of all parameters of a model, adapters included."""
    for unit in units:
        yield from _full_names(unit, recipe.model.unit(unit.name))


def parameter_names(layer: LayerShape, settings: AnyUnitSettings) -> Iterator[str]:
    """Yield the names of the layer's parameters inside the layer, adapters included, in no particular order.

    The plan-independent name of a parameter has `<unit>.layers.<index>.` before it.
    """
    match layer.kind:
        case "vit_block" | "decoder_block":
            yield from _block_parameters(layer)
        case "patch_embed" | "audio_embed":
            assert isinstance(settings, EncoderSettings)
            yield from ENCODER_SHAPES[settings.modality].embedding_parameters(layer, settings)
        case "projector" | "resampler" | "merger":
            assert isinstance(settings, EncoderSettings)
            if settings.has_post_norm:
                yield from norm_parameters("post_norm", replace(layer, rms_norm=has_rms_post_norm(layer)))
            if settings.projector.norm and not layer.projector.plain_norm:
                yield from norm_parameters("norm", layer)
            for linear in adaptable_linears(layer):
                yield from linear_parameters(linear, layer.linear_bias)
            for projector in deepstack_projectors(layer):
                yield from norm_parameters(f"{projector}.norm", layer)
            if layer.projector.standardizes:
                yield from (AVERAGE_SHIFT, AVERAGE_SCALE)
            if layer.projector.merge_linear:
                yield f"{MERGE_LINEAR}.weight"
            if layer.projector.newline:
                yield "newline"
            if layer.kind == "merger":
                yield from (*linear_parameters("downsample", bias=True), "inner_norm.weight", "inner_norm.bias")
            if layer.kind == "resampler":
                yield from (QUERIES, *norm_parameters("query_norm", layer), *norm_parameters("output_norm", layer))
        case "embedding":
            yield "table.weight"
            if layer.queries:
                yield QUERIES
            if layer.layer_input:
                yield from (LAYER_INPUTS_TABLE, LAYER_INPUTS_LINEAR, LAYER_INPUTS_NORM)
        case "head":
            assert isinstance(settings, LlmSettings)
            yield from norm_parameters("norm", layer)
            if not settings.tie_embeddings:
                yield "output.weight"
        case _:
            yield from generator_parameters(layer)
    for linear in () if layer.lora is None else layer.lora.linears:
        yield from adapter_parameters(linear)


def _block_parameters(layer: LayerShape) -> Iterator[str]:
    """Yield the names of the parameters of a transformer block: those around its mixer and MLP, and theirs."""
    yield from norm_parameters("input_layernorm", layer)
    match layer.mixer:
        case Attention() as attention:
            yield from linear_parameters("self_attention.linear_qkv", attention.qkv_bias)
            if attention.qk_norm:
                yield from norm_parameters("self_attention.q_layernorm", layer)
                if not attention.reads_kv:
                    yield from norm_parameters("self_attention.k_layernorm", layer)
            if attention.joint_qk_norm:
                yield from ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
            yield from linear_parameters("self_attention.linear_proj", layer.linear_bias)
        case GatedDeltaNet() as delta_net:
            yield from (f"{linear}.weight" for linear in delta_net.linears)
            yield from (f"self_attention.{name}" for name in ("taps", "decay_log", "step_bias", "norm.weight"))
    if layer.post_norms:
        yield from norm_parameters("self_attn_bda.norm", layer)
        yield from norm_parameters("mlp_bda.norm", layer)
    if layer.layer_scale:
        yield from ("self_attn_bda.weight", "mlp_bda.weight")
    yield from norm_parameters("pre_mlp_layernorm", layer)
    match layer.mlp:
        case DenseMlp() as mlp:
            for linear in mlp.linears:
                yield from linear_parameters(linear, layer.linear_bias)
        case MoeMlp() as mlp:
            yield from (f"{linear}.weight" for linear in mlp.linears)
            if mlp.router.has_bias:
                yield SELECTION_BIAS
    if layer.layer_input:
        yield from (f"{linear}.weight" for linear in LAYER_INPUT_LINEARS)
        yield from norm_parameters(LAYER_INPUT_NORM, layer)
    if layer.output_scale:
        yield OUTPUT_SCALE


def _with_adapters(layer: LayerShape, prefix: str, adapted: set[str], settings: LoraSettings) -> LayerShape:
    """Return a layer with its adapters; `prefix` comes before the names of its linears and their parts in `adapted`.

    A joint linear that is named itself has one adapter, whatever parts of it are named too.

    Raises:
        RecipeError: some experts of the layer have an adapter on a linear, and others do not.
    """
    parts = {}
    for linear, joint in joint_linears(layer).items():
        of_linear = tuple(name for name in joint.names if prefix + name in adapted)
        if of_linear and prefix + linear not in adapted:
            parts[linear] = replace(joint, adapted=of_linear)
    linears = tuple(name for name in adaptable_linears(layer) if prefix + name in adapted or name in parts)
    if not linears:
        return layer
    if isinstance(layer.mlp, MoeMlp):
        _require_all_experts(linears, layer.mlp.experts, prefix)
    if settings.dropout:
        _require_droppable(layer, linears, prefix)
    lora = LoraShape(settings.rank, settings.scale, linears, tuple(parts.items()), settings.dropout)
    return replace(layer, lora=lora, trainable=True, trains_adapters_only=not layer.trainable)


def _require_droppable(layer: LayerShape, linears: Sequence[str], prefix: str) -> None:
    """Raise RecipeError where the rows of a linear are not the tokens of samples, which masks are drawn for."""
    for linear in linears:
        if is_of_expert(linear) or layer.kind == "resampler":
            what = "queries and patches" if layer.kind == "resampler" else "the tokens that its router sends there"
            raise RecipeError(
                f"train.lora.dropout: adapters on {prefix}{linear}, which reads {what}, drop nothing; leave it out of "
                "train.lora.targets, or set dropout to 0"
            )


def _require_all_experts(linears: Sequence[str], num_experts: int, prefix: str) -> None:
    for linear in EXPERT_LINEARS:
        num_adapted = sum(is_of_expert(name) and name.endswith(f".{linear}") for name in linears)
        if num_adapted not in (0, num_experts):
            every = f"{prefix}mlp.experts.*.{linear}"
            raise RecipeError(
                f"train.lora.targets: name {linear} of {num_adapted} of the {num_experts} experts of {prefix}mlp, "
                f"allowed: that of all experts of a block ({every}), or of none"
            )


def _spellings(names: Iterable[str], units: Sequence[UnitShape]) -> dict[str, str]:
    """Return the names that patterns may match, each with the parameter that it stands for.

    These are the parameters' own names, and `<unit>.projector.<name>` for those of an encoder's projector.
    """
    spellings = {name: name for name in names}
    for unit in units:
        projector = f"{unit.name}.layers.{len(unit.layers) - 1}."
        if unit.layers[-1].kind in PROJECTOR_KINDS:
            aliased = [name for name in spellings if name.startswith(projector)]
            spellings |= {f"{unit.name}.projector.{name.removeprefix(projector)}": name for name in aliased}
    return spellings


def _full_names(unit: UnitShape, settings: AnyUnitSettings) -> Iterator[str]:
    """Yield the plan-independent names of all parameters of a unit."""
    for index, layer in enumerate(unit.layers):
        for name in parameter_names(layer, settings):
            yield f"{unit.name}.layers.{index}.{name}"


def _full_linears(unit: UnitShape) -> Iterator[str]:
    """Yield the plan-independent names of the linears of a unit, and of their parts, that may have an adapter."""
    for index, layer in enumerate(unit.layers):
        parts = (name for joint in joint_linears(layer).values() for name in joint.names)
        for linear in (*adaptable_linears(layer), *parts):
            yield f"{unit.name}.layers.{index}.{linear}"


def _mark_layers(unit: UnitShape, settings: AnyUnitSettings, matched: set[str]) -> list[LayerShape]:
    layers: list[LayerShape] = []
    for index, layer in enumerate(unit.layers):
        names = list(parameter_names(layer, settings))
        frozen = frozenset(
            name
            for name in names
            if _is_frozen_by_flag(layer, settings, name) or f"{unit.name}.layers.{index}.{name}" in matched
        )
        trainable = len(frozen) < len(names)
        if layer.kind == "head" and isinstance(settings, LlmSettings) and settings.tie_embeddings:
            trainable = trainable or "table.weight" not in layers[0].frozen
        marked = replace(layer, frozen=frozen, trainable=trainable)
        bias = f"{unit.name}.layers.{index}.{SELECTION_BIAS}"
        if isinstance(settings, LlmSettings) and not settings.freeze and bias not in matched:
            marked = _with_bias_updates(marked, settings, bias)
        layers.append(marked)
    return layers


def _with_bias_updates(layer: LayerShape, settings: LlmSettings, bias: str) -> LayerShape:
    """Return a layer whose router's selection bias is updated, if it has one and the recipe has a rate for it.

    Raises:
        RecipeError: the router or all experts are frozen, and the bias, called `bias`, is not.
    """
    mlp, moe = layer.mlp, settings.moe
    if not isinstance(mlp, MoeMlp) or moe is None or not moe.selection_bias_rate:
        return layer
    of_experts = {f"{linear}.weight" for linear in mlp.linears if is_of_expert(linear)}
    parts = (("router", {f"{ROUTER}.weight"}), ("experts", of_experts))
    frozen = next((part for part, names in parts if names <= layer.frozen), None)
    if frozen is not None:
        raise RecipeError(
            f"model.llm.moe.selection_bias_rate: found {moe.selection_bias_rate:g}, but the recipe freezes the "
            f"{frozen} that {bias} chooses by. A bias is updated only beside a router and experts that train: freeze "
            f"it too (`train.freeze: [llm.*.{SELECTION_BIAS}]`), or set a rate of 0"
        )
    return replace(layer, mlp=replace(mlp, router=replace(mlp.router, updates_bias=True)))


def _is_frozen_by_flag(layer: LayerShape, settings: AnyUnitSettings, name: str) -> bool:
    """Return whether a `freeze` flag covers the parameter, or it never trains.

    The projector of a frozen encoder still trains, except for the encoder's last norm, which is part of that layer. So
    do the projector of a frozen generator's context, and the queries through which a frozen LLM conditions it.
    """
    if isinstance(settings, AudioSettings) and settings.positions == "fixed" and name == "positions":
        return True
    if name in WITHOUT_GRADIENT:  # a bias has no gradient; see `_with_bias_updates`
        return True
    if layer.kind in PROJECTOR_KINDS and not name.startswith("post_norm."):
        assert isinstance(settings, EncoderSettings)
        return settings.projector.freeze
    return settings.freeze and layer.kind != "context_projector" and name != QUERIES


def _match_patterns(key: str, patterns: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return what the names that match at least one pattern stand for; `key` is the setting that holds the patterns."""
    matched: set[str] = set()
    for i, pattern in enumerate(patterns):
        matches = {full for name, full in names.items() if fnmatchcase(name, pattern)}
        if not matches:
            closest = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.0))
            kind = "linear" if key.endswith("targets") else "parameter"
            raise RecipeError(
                f"{key}.{i}: {pattern} matches no {kind} of this model; {_name_here(pattern)}the closest names are "
                f"{closest}. "
                "Patterns work as in a shell: * for any text, ? for one character, [0-3] for one of a range"
            )
        matched |= matches
    return matched


def _name_here(pattern: str) -> str:
    """Say which pattern matches what transformers names otherwise; empty for other names."""
    name = pattern.rpartition(".")[2]
    here = LINEAR_PATTERNS.get(name)
    if here is None or here.endswith(name):
        return ""
    return f"{name} is {'part of ' * here.endswith('linear_fc1')}{here}; "
