"""GLM-4.5 and its successors with mixtures of experts (arXiv 2508.06471), text alone.

Half of the features of a head turn by position. Folders of the hub hold further blocks behind those of `config.json`,
which predict further tokens; as in `transformers`, they are not trained.
"""

from collections.abc import Mapping

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import (
    PLAIN_MIXTURE,
    decoder_buffers,
    decoder_settings,
    decoder_weights,
    require_no_balancing_loss,
)
from mmtrain.families.family import Family, FolderSettings, Settings, tiny_decoder
from mmtrain.families.rotary import rotary_settings, stated_rotary

DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 151552,
    "rms_norm_eps": 1e-5,
}
_TURNING_SHARE = 0.5  # `partial_rotary_factor`
_ARCHITECTURE = "Glm4MoeForCausalLM"
TINY_DECODER = tiny_decoder(
    model_type="glm4_moe",
    head_dim=32,
    rope_theta=1e6,
    partial_rotary_factor=_TURNING_SHARE,
    attention_bias=True,
    use_qk_norm=True,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    n_group=1,
    topk_group=1,
)


def glm4_moe_settings(
    config: ConfigSection, defaults: Mapping[str, float] = DEFAULTS, qkv_bias: bool = False
) -> Settings:
    """Return the settings of the LLM.

    defaults, qkv_bias: what the config's class assumes for keys that are missing, and for `attention_bias`.
    """
    rotary = rotary_settings(config, 10000.0, turns_all=False)
    llm = decoder_settings(
        config,
        defaults,
        rotary,
        qkv_bias=config.flag("attention_bias", qkv_bias),
        qk_norm=config.flag("use_qk_norm", False),
    )
    config.pass_over("num_nextn_predict_layers", "num_mtp_layers")  # of blocks that are not trained
    share = _turning_share(config)
    turning = int(llm["head_dim"] * share)
    if turning % 2:
        config.reject("partial_rotary_factor", f"{share:g} turns {turning} features of a head; allowed: an even number")
    is_whole = turning == llm["head_dim"]
    return {**llm, "rope_width": None if is_whole else turning, "moe": _mixture(config, llm["layers"])}


def _turning_share(config: ConfigSection) -> float:
    """Return the share of a head's features that turn.

    Version 5 of `transformers` states it with the rotation, and may leave the older statement beside it.
    """
    stated = config.number("partial_rotary_factor", _TURNING_SHARE)
    return stated_rotary(config).number("partial_rotary_factor", stated)


def _mixture(config: ConfigSection, num_blocks: int) -> Settings:
    require_no_balancing_loss(config)
    ffn, num_dense = config.integer("moe_intermediate_size", 1408), config.value("first_k_dense_replace")
    num_dense = 1 if num_dense is None else num_dense
    if type(num_dense) is not int or not 0 <= num_dense < num_blocks:
        found = f"found {num_dense}, allowed: a whole number from 0 to {num_blocks - 1}"
        config.reject("first_k_dense_replace", found)
        num_dense = 0
    return {
        **PLAIN_MIXTURE,
        "experts": config.integer("n_routed_experts", 128),
        "top_k": config.integer("num_experts_per_tok", 8),
        "ffn": ffn,
        "normalize": config.flag("norm_topk_prob", True),
        "scores": "sigmoid",
        "weight_scale": config.number("routed_scaling_factor", 1.0),
        "selection_bias": True,
        "groups": config.integer("n_group", 1),
        "top_groups": config.integer("topk_group", 1),
        "shared_ffn": ffn * config.integer("n_shared_experts", 1),
        "dense_blocks": tuple(range(num_dense)),
    }


def further_blocks(settings: FolderSettings, decoder: str = "model.") -> tuple[str, ...]:
    """Return the prefix of the tensors of the block behind those of the model; no model has had more than one.

    decoder: before the tensors of its LLM.
    """
    return (f"{decoder}layers.{settings.model['llm']['layers']}.",)


GLM4_MOE = Family(
    "glm4_moe",
    (_ARCHITECTURE,),
    lambda config: FolderSettings({"llm": glm4_moe_settings(config)}),
    decoder_weights,
    {"config.json": {"architectures": [_ARCHITECTURE], **TINY_DECODER}},
    ignored=decoder_buffers,
    other_blocks=further_blocks,
)
