"""Write the config of a decoder from its settings: the way back from `decoders.decoder_settings`."""

from typing import Any

from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.new_model import FolderWriter, JsonFiles, NewModel
from mmtrain.families.rotary import rope_scaling_config

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def decoder_config(model: NewModel) -> dict[str, Any]:
    """Return the config of the LLM: of Qwen2 if queries, keys and values have biases, of Qwen3 if they have norms."""
    llm = model.units["llm"]
    model_type = "qwen2" if llm["qkv_bias"] else "llama"
    if llm["qk_norm"]:
        model_type = "qwen3"
    config = {
        "model_type": model_type,
        "hidden_size": llm["hidden"],
        "intermediate_size": llm["ffn"],
        "num_hidden_layers": llm["layers"],
        "num_attention_heads": llm["heads"],
        "num_key_value_heads": llm["kv_heads"],
        "head_dim": llm["head_dim"],
        "hidden_act": "silu",
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
    return config


def _files(model: NewModel) -> JsonFiles:
    config = decoder_config(model)
    return {CONFIG_FILE: {"architectures": [_ARCHITECTURES[config["model_type"]]], **config}}


DECODER_WRITER = FolderWriter(frozenset({"llm"}), _files)
