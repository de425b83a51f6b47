"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115), as `Qwen2ForCausalLM` of `transformers` computes them."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoder_config import DECODER_WRITER
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.tiny import tiny_decoder
from mmtrain.families.windows import qwen_window_settings

_DEFAULTS = {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32}
_TINY = tiny_decoder(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1e6, tie_word_embeddings=True)


def qwen2_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    settings = decoder_settings(config, _DEFAULTS, qkv_bias=True)
    return {**settings, **qwen_window_settings(config, settings["layers"])}


def _settings(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"llm": qwen2_settings(config)})


QWEN2 = Family(
    "qwen2",
    ("Qwen2ForCausalLM",),
    _settings,
    decoder_weights,
    {"config.json": _TINY},
    ignored=decoder_buffers,
    writer=DECODER_WRITER,
)
