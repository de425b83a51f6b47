"""Mistral (arXiv 2310.06825), as `MistralForCausalLM` of `transformers` computes it."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoder_config import DECODER_WRITER
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.tiny import tiny_decoder
from mmtrain.families.windows import window_settings

_DEFAULTS = {"intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8}
_TINY = tiny_decoder(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16)


def mistral_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM. A window is one of all blocks."""
    settings = decoder_settings(config, _DEFAULTS, qkv_bias=False)
    window = config.optional_integer("sliding_window", 4096)
    return {**settings, **window_settings(config, settings["layers"], window, is_full=lambda _: False)}


def _settings(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"llm": mistral_settings(config)})


MISTRAL = Family(
    "mistral",
    ("MistralForCausalLM",),
    _settings,
    decoder_weights,
    {"config.json": _TINY},
    ignored=decoder_buffers,
    writer=DECODER_WRITER,
)
