"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), as `LlamaForCausalLM` of `transformers` computes them."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoder_config import DECODER_WRITER
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.tiny import tiny_decoder

_DEFAULTS = {"intermediate_size": 11008, "vocab_size": 32000}
_TINY = tiny_decoder(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
)


def llama_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("attention_bias", False, default=False)
    config.require("mlp_bias", False, default=False)
    return decoder_settings(config, _DEFAULTS, qkv_bias=False)


def _settings(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"llm": llama_settings(config)})


LLAMA = Family(
    "llama",
    ("LlamaForCausalLM",),
    _settings,
    decoder_weights,
    {"config.json": _TINY},
    ignored=decoder_buffers,
    writer=DECODER_WRITER,
)
