"""Write the config of a decoder from its settings: the way back from `decoders.decoder_settings`."""

from typing import Any

from mmtrain.families.decoders import layer_types
from mmtrain.families.family import FolderWriter, JsonFiles, NewModel, Settings
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.rotary import rope_scaling_config

_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def decoder_config(model: NewModel) -> dict[str, Any]:
    """Return the config of the LLM: of the one of these families that it belongs to, or else comes near to."""
    llm = model.units["llm"]
    model_type = _model_type(llm)
    config = {
        "model_type": model_type,
        "hidden_size": llm["hidden"],
        "intermediate_size": llm["ffn"],
        "num_hidden_layers": llm["layers"],
        "num_attention_heads": llm["heads"],
        "num_key_value_heads": llm["kv_heads"],
        "head_dim": llm["head_dim"],
        "vocab_size": llm["vocab"],
        "rms_norm_eps": llm["norm_eps"],
        "rope_theta": llm["rope_base"],
        "max_position_embeddings": model.max_tokens,
        "tie_word_embeddings": llm["tie_embeddings"],
        "bos_token_id": None,
        "eos_token_id": model.end_ids[0] if len(model.end_ids) == 1 else list(model.end_ids),
    }
    scaling = llm["rope_scaling"]
    if scaling is not None:
        config["rope_scaling"] = rope_scaling_config(scaling)
    if model_type == "gemma3_text":
        return config | _gemma_config(llm)
    return config | {"hidden_act": "silu"} | _window_config(llm, model_type) | _moe_config(llm, model_type)


def _model_type(llm: Settings) -> str:
    if llm["zero_centered_norms"]:
        return "gemma3_text"
    if llm["moe"] is not None:
        if llm["qk_norm"]:
            return "qwen3_moe"
        return "qwen2_moe" if llm["moe"]["shared_gate"] else "mixtral"
    if llm["qk_norm"]:
        return "qwen3"
    if llm["qkv_bias"]:
        return "qwen2"
    return "llama" if llm["window"] is None else "mistral"


def _moe_config(llm: Settings, model_type: str) -> dict[str, Any]:
    moe = llm["moe"]
    if moe is None:
        return {}
    if model_type == "mixtral":
        sizes = {"num_local_experts": moe["experts"], "num_experts_per_tok": moe["top_k"]}
        return {**sizes, "intermediate_size": moe["ffn"]}
    of_qwen2 = {"shared_expert_intermediate_size": moe["shared_ffn"], "qkv_bias": llm["qkv_bias"]}
    return {
        **(of_qwen2 if model_type == "qwen2_moe" else {}),
        "num_experts": moe["experts"],
        "num_experts_per_tok": moe["top_k"],
        "moe_intermediate_size": moe["ffn"],
        "norm_topk_prob": moe["normalize"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe["dense_blocks"]),
    }


def _window_config(llm: Settings, model_type: str) -> dict[str, Any]:
    if model_type in ("mistral", "mixtral"):
        return {"sliding_window": llm["window"]}
    if llm["window"] is None:
        return {}
    kinds = layer_types(llm["layers"], llm["full_attention_blocks"])
    return {"use_sliding_window": True, "sliding_window": llm["window"], "layer_types": kinds}


def _gemma_config(llm: Settings) -> dict[str, Any]:
    """Return the keys of a Gemma 3 that other decoders do not have."""
    is_windowed = llm["window"] is not None
    full = llm["full_attention_blocks"] if is_windowed else tuple(range(llm["layers"]))
    query_scale = llm["query_scale"] or llm["head_dim"]
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        # `transformers` reads whole numbers only.
        "query_pre_attn_scalar": int(query_scale) if query_scale == int(query_scale) else query_scale,
        "layer_types": layer_types(llm["layers"], full),
    }
    if is_windowed:
        config |= {"sliding_window": llm["window"], "rope_local_base_freq": llm["window_rope_base"] or llm["rope_base"]}
    return config


def _files(model: NewModel) -> JsonFiles:
    config = decoder_config(model)
    return {CONFIG_FILE: {"architectures": [_ARCHITECTURES[config["model_type"]]], **config}}


DECODER_WRITER = FolderWriter(frozenset({"llm"}), _files)
