"""Decoders in the manner of Llama: RMS norms, rotary positions, grouped-query attention, a gated MLP.

A config with a section for its LLM may say in both places whether the embeddings are tied. Each family follows its
config class in `transformers`: for most of them the outer config holds alone. Configs of older versions said it in the
inner section only, so some classes also look there.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import FolderSettings, Settings
from mmtrain.families.rotary import rotary_settings
from mmtrain.families.weight_layouts import (
    ParameterSource,
    as_is,
    fused_down,
    fused_gate_and_up,
    gate_and_up,
    gated_query_key_value,
    head_features,
    parts_by_head,
    query_key_value,
    vocabulary,
)

# A tensor for each linear of each expert, by the names of Qwen or of Mixtral, or one for all experts of a block, whose
# matrices are (outputs, inputs) or (inputs, outputs).
ExpertLayout = Literal["apart", "apart, as Mixtral", "fused", "fused, inputs first"]
_MLP_TENSORS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_TENSORS = ("w1", "w3", "w2")
# What holds of mixtures without the keys of later families.
PLAIN_MIXTURE: Settings = {
    "scores": "softmax",
    "weight_scale": 1.0,
    "selection_bias": False,
    "groups": 1,
    "top_groups": 1,
    "shared_ffn": None,
    "shared_gate": False,
}

_TIED_KEY = "tie_word_embeddings"
# What `layer_types` says of a block.
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def decoder_settings(
    config: ConfigSection, defaults: Mapping[str, float], rotary: Settings | None = None, **of_family: Any
) -> Settings:
    """Return the settings of the LLM.

    defaults: what the family's config class in `transformers` assumes for keys that are missing; classes that hold a
        decoder write only what differs from it.
    rotary: the rotary positions of a family that states them in its own way.
    of_family: settings that the config does not state.
    """
    assumed = {key: int(value) for key, value in defaults.items()}
    hidden = config.integer("hidden_size", assumed.get("hidden_size", 4096))
    heads = config.integer("num_attention_heads", assumed.get("num_attention_heads", 32))
    config.choice("hidden_act", {"silu": "silu"}, "silu")
    config.require("attention_dropout", 0, 0.0, None, default=0)
    return {
        "layers": config.integer("num_hidden_layers", assumed.get("num_hidden_layers", 32)),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.optional_integer("num_key_value_heads", assumed.get("num_key_value_heads")) or heads,
        "head_dim": config.optional_integer("head_dim", assumed.get("head_dim")) or hidden // heads,
        "ffn": config.integer("intermediate_size", assumed["intermediate_size"]),
        "mlp": "swiglu",
        "moe": None,
        "delta_net": None,
        "attention_gate": False,
        "rope_width": None,
        "qk_norm": False,
        "window": None,
        "full_attention_blocks": (),
        "window_rope_base": None,
        "full_attention": None,
        "shared_kv": None,
        "per_layer_embeddings": None,
        "value_norm": False,
        "query_scale": None,
        "query_growth": None,
        "rope_after_media": "sides",
        "post_norms": False,
        "zero_centered_norms": False,
        "block_scales": False,
        "scale_embeddings": False,
        "image_attention": "causal",
        "vocab": config.integer("vocab_size", assumed["vocab_size"]),
        "logit_cap": None,
        "norm_eps": config.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
        **(rotary_settings(config, defaults.get("rope_theta", 10000.0)) if rotary is None else rotary),
        **of_family,
    }


def moe_settings(config: ConfigSection, num_blocks: int, defaults: Mapping[str, int], normalizes: bool) -> Settings:
    """Return the settings of mixtures of experts, which compute a loss of their own only where it is switched on.

    normalizes: what holds without `norm_topk_prob`, a key that not all families have.
    """
    step, listed = config.integer("decoder_sparse_step", 1), config.value("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(block) is int and 0 <= block < num_blocks for block in listed):
        config.reject("mlp_only_layers", f"found {listed}, allowed: numbers of blocks, 0 to {num_blocks - 1}")
        listed = []
    require_no_balancing_loss(config)
    of_both_names = (config.optional_integer(key, None) for key in ("num_experts", "num_local_experts"))
    return {
        **PLAIN_MIXTURE,
        "experts": next((number for number in of_both_names if number is not None), defaults["experts"]),
        "top_k": config.integer("num_experts_per_tok", defaults["top_k"]),
        "ffn": config.integer("moe_intermediate_size", defaults["ffn"]),
        "normalize": config.flag("norm_topk_prob", normalizes),
        "dense_blocks": tuple(block for block in range(num_blocks) if block in listed or (block + 1) % step),
    }


def require_no_balancing_loss(config: ConfigSection) -> None:
    """Reject a loss over the tokens of a batch and of all blocks, which depends on the plan."""
    config.require("output_router_logits", False, default=False)
    config.value("router_aux_loss_coef")  # of that loss


def decoder_weights(
    settings: FolderSettings, model: str = "model.", head: str = "lm_head.", *, experts: ExpertLayout = "apart"
) -> Iterator[ParameterSource]:
    """Yield the weights of the LLM; `model` and `head` are the prefixes of its tensors in the folder.

    experts: how the folder holds the linears of experts.
    """
    llm = settings.model["llm"]
    hidden, vocab, layers = llm["hidden"], llm["vocab"], llm["layers"]
    last = layers + 1
    yield vocabulary("llm.layers.0.table.weight", f"{model}embed_tokens.weight", vocab, hidden)
    if llm["per_layer_embeddings"] is not None:
        yield from _layer_inputs_weights(llm, model)
    for block in range(layers):
        yield from _block_weights(llm, block, f"{model}layers.{block}.", experts)
    yield as_is(f"llm.layers.{last}.norm.weight", f"{model}norm.weight", (hidden,))
    if not llm["tie_embeddings"]:
        yield vocabulary(f"llm.layers.{last}.output.weight", "lm_head.weight", vocab, hidden)


def _block_weights(llm: Settings, block: int, theirs: str, layout: ExpertLayout) -> Iterator[ParameterSource]:
    ours = f"llm.layers.{block + 1}."
    hidden, ffn = llm["hidden"], llm["ffn"]
    if reads_kv(llm, block):
        ffn = llm["shared_kv"]["ffn"] or ffn
    yield as_is(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (hidden,))
    if llm["delta_net"] is not None and block not in llm["full_attention_blocks"]:
        yield from _delta_net_weights(llm["delta_net"], hidden, f"{ours}self_attention.", f"{theirs}linear_attn.")
    else:
        heads = attention_heads(llm, block)
        yield from _attention_weights(heads, f"{ours}self_attention.", f"{theirs}self_attn.")
    before_mlp = "pre_feedforward_layernorm" if llm["post_norms"] else "post_attention_layernorm"
    yield as_is(f"{ours}pre_mlp_layernorm.weight", f"{theirs}{before_mlp}.weight", (hidden,))
    if llm["post_norms"]:
        yield as_is(f"{ours}self_attn_bda.norm.weight", f"{theirs}post_attention_layernorm.weight", (hidden,))
        yield as_is(f"{ours}mlp_bda.norm.weight", f"{theirs}post_feedforward_layernorm.weight", (hidden,))
    if llm["per_layer_embeddings"] is not None:
        width = llm["per_layer_embeddings"]["width"]
        yield as_is(f"{ours}layer_input.gate.weight", f"{theirs}per_layer_input_gate.weight", (width, hidden))
        yield as_is(f"{ours}layer_input.projection.weight", f"{theirs}per_layer_projection.weight", (hidden, width))
        yield as_is(f"{ours}layer_input.norm.weight", f"{theirs}post_per_layer_input_norm.weight", (hidden,))
    if llm["block_scales"]:
        yield as_is(f"{ours}output_scale", f"{theirs}layer_scalar", (1,))
    moe = llm["moe"]
    if moe is None or block in moe["dense_blocks"]:
        yield from _gated_mlp_weights(f"{ours}mlp.", f"{theirs}mlp.", (ffn, hidden))
        return
    mixture = "block_sparse_moe." if layout == "apart, as Mixtral" else "mlp."
    yield from _mixture_weights(moe, hidden, (f"{ours}mlp.", f"{theirs}{mixture}"), layout)


def _layer_inputs_weights(llm: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights that make the own inputs of all blocks; `model` is the prefix of the LLM's tensors."""
    width, hidden = llm["per_layer_embeddings"]["width"], llm["hidden"]
    of_all, ours = llm["layers"] * width, "llm.layers.0.layer_inputs."
    yield vocabulary(f"{ours}table.weight", f"{model}embed_tokens_per_layer.weight", llm["vocab"], of_all)
    yield as_is(f"{ours}linear.weight", f"{model}per_layer_model_projection.weight", (of_all, hidden))
    yield as_is(f"{ours}norm.weight", f"{model}per_layer_projection_norm.weight", (width,))


def reads_kv(llm: Settings, block: int) -> bool:
    """Return whether a block reads keys and values of an earlier one."""
    return llm["shared_kv"] is not None and block >= llm["layers"] - llm["shared_kv"]["blocks"]


def attention_heads(llm: Settings, block: int) -> Settings:
    """Return the settings of the LLM with those of a block's attention in the place of the ones that most have."""
    full = llm["full_attention"]
    llm = {**llm, "reads_kv": reads_kv(llm, block)}
    if full is None or block not in llm["full_attention_blocks"]:
        return {**llm, "keys_as_values": False}
    # Rotary positions take pairs of features as the tensors have them.
    return {**llm, **full, "kv_heads": full["kv_heads"] or llm["kv_heads"], "rope_width": None}


def _attention_weights(llm: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    """Yield the weights of attention; `ours` and `theirs` are the prefixes of our parameters and of the tensors."""
    hidden, heads, kv_heads, head_dim = llm["hidden"], llm["heads"], llm["kv_heads"], llm["head_dim"]
    for kind, inputs in (("weight", (hidden,)), ("bias", ()))[: 1 + llm["qkv_bias"]]:
        projections = (f"{theirs}q_proj.{kind}", f"{theirs}k_proj.{kind}", f"{theirs}v_proj.{kind}")
        joint = f"{ours}linear_qkv.{kind}"
        if llm["reads_kv"]:
            yield as_is(joint, projections[0], (heads * head_dim, *inputs))
            continue
        if llm["keys_as_values"]:
            rows = (heads * head_dim, kv_heads * head_dim)
            parts = [(tensor, 0, number) for tensor, number in zip(projections, rows, strict=False)]
            yield parts_by_head(joint, parts, kv_heads, inputs)
            continue
        layout = gated_query_key_value if llm["attention_gate"] else query_key_value
        yield layout(joint, projections, heads, kv_heads, head_dim, inputs, llm["rope_width"])
    for norm in ("q" if llm["reads_kv"] else "qk") if llm["qk_norm"] else "":
        yield head_features(
            f"{ours}{norm}_layernorm.weight", f"{theirs}{norm}_norm.weight", head_dim, llm["rope_width"]
        )
    yield as_is(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", (hidden, heads * head_dim))


def _delta_net_weights(delta_net: Settings, hidden: int, ours: str, theirs: str) -> Iterator[ParameterSource]:
    """Yield the weights of a gated DeltaNet; `ours` and `theirs` are as in `_attention_weights`.

    Ours have the rows of one key head after the other: its query, its key, and then what its value heads have.
    """
    heads, values = delta_net["key_heads"], delta_net["value_heads"]
    key_width, value_width = heads * delta_net["key_head_dim"], values * delta_net["value_head_dim"]
    convolved = (key_width, key_width, value_width)
    joint = f"{theirs}in_proj_qkv.weight"
    parts = [(joint, sum(convolved[:i]), width) for i, width in enumerate(convolved)]
    for tensor, width in (("z", value_width), ("b", values), ("a", values)):
        parts.append((f"{theirs}in_proj_{tensor}.weight", 0, width))
    yield parts_by_head(f"{ours}linear_in.weight", parts, heads, (hidden,))
    tensor = f"{theirs}conv1d.weight"
    parts = [(tensor, sum(convolved[:i]), width) for i, width in enumerate(convolved)]
    yield parts_by_head(f"{ours}taps", parts, heads, (1, delta_net["taps"]), (delta_net["taps"],))
    yield as_is(f"{ours}decay_log", f"{theirs}A_log", (values,))
    yield as_is(f"{ours}step_bias", f"{theirs}dt_bias", (values,))
    yield as_is(f"{ours}norm.weight", f"{theirs}norm.weight", (delta_net["value_head_dim"],))
    yield as_is(f"{ours}linear_proj.weight", f"{theirs}out_proj.weight", (hidden, value_width))


def _mixture_weights(
    moe: Settings, hidden: int, prefixes: tuple[str, str], layout: ExpertLayout
) -> Iterator[ParameterSource]:
    """Yield the weights of a mixture of experts; `prefixes` are those of our parameters and of the tensors."""
    ours, theirs = prefixes
    yield as_is(f"{ours}router.weight", f"{theirs}gate.weight", (moe["experts"], hidden))
    if moe["selection_bias"]:
        yield as_is(f"{ours}router.selection.bias", f"{theirs}gate.e_score_correction_bias", (moe["experts"],))
    if moe["shared_ffn"] is not None:
        shared = "shared_expert" if moe["shared_gate"] else "shared_experts"  # of Qwen2, which has a gate; of GLM
        yield from _gated_mlp_weights(f"{ours}shared.", f"{theirs}{shared}.", (moe["shared_ffn"], hidden))
    if moe["shared_gate"]:
        yield as_is(f"{ours}shared_gate.weight", f"{theirs}shared_expert_gate.weight", (1, hidden))
    shape, experts = (moe["ffn"], hidden), f"{theirs}experts."
    for expert in range(moe["experts"]):
        name = f"{ours}experts.{expert}."
        if layout in ("apart", "apart, as Mixtral"):
            tensors = _MLP_TENSORS if layout == "apart" else _MIXTRAL_TENSORS
            yield from _gated_mlp_weights(name, f"{experts}{expert}.", shape, tensors)
            continue
        first, last, is_swapped = f"{experts}gate_up_proj", f"{experts}down_proj", layout == "fused, inputs first"
        yield fused_gate_and_up(f"{name}linear_fc1.weight", first, expert, shape, inputs_first=is_swapped)
        yield fused_down(f"{name}linear_fc2.weight", last, expert, shape[::-1], inputs_first=is_swapped)


def _gated_mlp_weights(
    ours: str, theirs: str, shape: tuple[int, int], tensors: tuple[str, str, str] = _MLP_TENSORS
) -> Iterator[ParameterSource]:
    """Yield the weights of a gated MLP; `shape` is (inner width, hidden), `tensors` its gate, values, output."""
    gate, up, down = (f"{theirs}{tensor}.weight" for tensor in tensors)
    yield gate_and_up(f"{ours}linear_fc1.weight", gate, up, shape)
    yield as_is(f"{ours}linear_fc2.weight", down, (shape[1], shape[0]))


def decoder_buffers(settings: FolderSettings) -> tuple[str, ...]:
    """Return what folders may hold beside the weights: tables that are computed, and the copy of a tied matrix."""
    return (".rotary_emb.inv_freq", *(("lm_head.weight",) if settings.model["llm"]["tie_embeddings"] else ()))


def tied_by_outer(config: ConfigSection, llm: Settings, default: bool = False) -> Settings:
    """Return the LLM with embeddings tied as the outer config says, whatever the inner section does."""
    return {**llm, "tie_embeddings": config.flag(_TIED_KEY, default)}


def tied_by_either(config: ConfigSection, llm: Settings) -> Settings:
    """Return the LLM with embeddings tied if the outer config or the inner section ties them."""
    return {**llm, "tie_embeddings": config.flag(_TIED_KEY, False) or llm["tie_embeddings"]}


def never_tied(config: ConfigSection, llm: Settings) -> Settings:
    """Return the LLM with an output matrix of its own, whatever the config says."""
    config.value(_TIED_KEY)
    return {**llm, "tie_embeddings": False}


def window_settings(
    config: ConfigSection, num_blocks: int, window: int | None, is_full: Callable[[int], bool]
) -> Settings:
    """Return the settings of sliding windows; `is_full` says which blocks have none if `layer_types` is missing."""
    full = _full_attention_blocks(config, num_blocks, _SLIDING, lambda block: window is None or is_full(block))
    if len(full) == num_blocks:
        return {"window": None, "full_attention_blocks": ()}
    if window is None:
        config.reject("layer_types", f"found {_SLIDING}, but the config has no sliding window")
    return {"window": window, "full_attention_blocks": full}


def _full_attention_blocks(
    config: ConfigSection, num_blocks: int, other: str, is_full: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the blocks that `layer_types` gives full attention, where others have `other`; all if it is not valid.

    is_full: says which they are if it is missing.
    """
    kinds = config.value("layer_types")
    if kinds is None:
        kinds = [_FULL if is_full(block) else other for block in range(num_blocks)]
    is_list = isinstance(kinds, list) and len(kinds) == num_blocks
    if not is_list or not all(kind in (_FULL, other) for kind in kinds):
        config.reject("layer_types", f"found {kinds}, allowed: {_FULL} or {other} for each of {num_blocks} layers")
        return tuple(range(num_blocks))
    return tuple(block for block, kind in enumerate(kinds) if kind == _FULL)


def mixer_settings(config: ConfigSection, num_blocks: int) -> Settings:
    """Return which blocks have a gated DeltaNet in the place of attention, and its widths."""
    interval = config.integer("full_attention_interval", 4)
    full = _full_attention_blocks(config, num_blocks, _LINEAR, lambda block: (block + 1) % interval == 0)
    if not full:
        config.reject("layer_types", f"{_LINEAR} in all layers is not supported yet; supported: {_FULL} in some")
    delta_net = {
        "key_heads": config.integer("linear_num_key_heads", 16),
        "value_heads": config.integer("linear_num_value_heads", 32),
        "key_head_dim": config.integer("linear_key_head_dim", 128),
        "value_head_dim": config.integer("linear_value_head_dim", 128),
        "taps": config.integer("linear_conv_kernel_dim", 4),
    }
    if delta_net["value_heads"] % delta_net["key_heads"]:
        found = f"found {delta_net['value_heads']}, allowed: a multiple of linear_num_key_heads"
        config.reject("linear_num_value_heads", f"{found}, {delta_net['key_heads']}")
    if len(full) == num_blocks:
        return {"delta_net": None, "full_attention_blocks": ()}
    return {"delta_net": delta_net, "full_attention_blocks": full}


def qwen_window_settings(config: ConfigSection, num_blocks: int) -> Settings:
    """Read the window of Qwen2 and Qwen3: only with `use_sliding_window`, in blocks from `max_window_layers` on."""
    is_used = config.flag("use_sliding_window", False)
    stated = config.optional_integer("sliding_window", 4096)
    first = config.value("max_window_layers")
    first_windowed = 28 if first is None else first
    if type(first_windowed) is not int or first_windowed < 0:
        config.reject("max_window_layers", f"found {first}, allowed: a whole number of at least 0")
        first_windowed = 0
    return window_settings(config, num_blocks, stated if is_used else None, lambda block: block < first_windowed)


def reject_sliding_windows(config: ConfigSection) -> None:
    """Reject windows. Without `use_sliding_window` the other keys of a window have no effect."""
    config.require("use_sliding_window", False, default=False)
    config.value("sliding_window")
    config.value("max_window_layers")
    kinds = config.value("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
        config.reject("layer_types", f"{kinds} are not supported yet; supported: {_FULL}")


def layer_types(num_blocks: int, full_attention_blocks: tuple[int, ...]) -> list[str]:
    """Return what a config says of each block: the way back from `window_settings`."""
    return [_FULL if block in full_attention_blocks else _SLIDING for block in range(num_blocks)]
