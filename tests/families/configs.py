"""Folders of tiny pretrained models."""

import json
from pathlib import Path
from typing import Any

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "hidden_act": "silu",
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "attention_dropout": 0.0,
    "initializer_range": 0.02, "transformers_version": "4.43.1", "use_cache": True,
}  # fmt: skip
LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write a folder that holds a `config.json` only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder
