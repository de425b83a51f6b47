"""What the configs of tiny models agree on with the tokenizer that is written beside them."""

from typing import Any

PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MEDIA_TOKENS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
TINY_TOKENS = (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN, *MEDIA_TOKENS.values())  # their ids are their places
TINY_VOCAB_SIZE = 512  # of a model; its tokenizer has at most as many tokens

TINY_EXTRACTOR = {  # of clips of at most four seconds, in preprocessor_config.json
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 40,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 4,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
TINY_QWEN_TOWER = {  # what the vision towers of Qwen2.5 and Qwen3 have in common
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "out_hidden_size": 128,
    "num_heads": 4,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def tiny_token_id(token: str) -> int:
    """Return the id of a special token of all tiny models."""
    return TINY_TOKENS.index(token)


def tiny_decoder(**of_family: Any) -> dict[str, Any]:
    """Return the config of a decoder that trains in minutes on one core."""
    return {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": TINY_VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tiny_token_id(TURN_END_TOKEN),
        "pad_token_id": tiny_token_id(PAD_TOKEN),
        "dtype": "float32",
        **of_family,
    }
