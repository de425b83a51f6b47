"""Mistral (arXiv 2310.06825) without a sliding window, as `MistralForCausalLM` of `transformers` computes it."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.tiny import tiny_decoder

_DEFAULTS = {"intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8}
_TINY = tiny_decoder(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)


def mistral_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("sliding_window", None, default=4096)
    return decoder_settings(config, _DEFAULTS, qkv_bias=False)


def _settings(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"llm": mistral_settings(config)})


MISTRAL = Family(
    "mistral", ("MistralForCausalLM",), _settings, decoder_weights, {"config.json": _TINY}, ignored=decoder_buffers
)
