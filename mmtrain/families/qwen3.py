"""Dense Qwen3 (arXiv 2505.09388), as `Qwen3ForCausalLM` of `transformers` computes it."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoder_config import DECODER_WRITER
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.tiny import tiny_decoder
from mmtrain.families.windows import qwen_window_settings

_DEFAULTS = {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32, "head_dim": 128}
_TINY = tiny_decoder(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=48, rope_theta=1e6, tie_word_embeddings=True
)


def qwen3_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("attention_bias", False, default=False)
    settings = decoder_settings(config, _DEFAULTS, qkv_bias=False, qk_norm=True)
    return {**settings, **qwen_window_settings(config, settings["layers"])}


def _settings(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"llm": qwen3_settings(config)})


QWEN3 = Family(
    "qwen3",
    ("Qwen3ForCausalLM",),
    _settings,
    decoder_weights,
    {"config.json": _TINY},
    ignored=decoder_buffers,
    writer=DECODER_WRITER,
)
