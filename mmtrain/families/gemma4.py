"""The LLM of a Gemma 4 with towers, as `Gemma4ForConditionalGeneration` of `transformers` has it.

It is trained on texts. The towers, for pictures and clips, are not built yet: training leaves their tensors alone, and
export copies them.
"""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_weights, tied_by_outer
from mmtrain.families.family import MEDIA_TOKENS, Family, FolderSettings, tiny_token_id
from mmtrain.families.gemma4_text import TINY_TEXT, gemma4_text_settings, unused_by_llm
from mmtrain.families.weight_layouts import ParameterSource

_ARCHITECTURE = "Gemma4ForConditionalGeneration"
_TOKEN_KEYS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
    *("boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id"),
)
_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_TINY = {
    "architectures": [_ARCHITECTURE],
    "model_type": "gemma4",
    "text_config": TINY_TEXT,
    "vision_config": None,
    "audio_config": None,
    **{f"{kind}_token_id": tiny_token_id(token) for kind, token in MEDIA_TOKENS.items()},
    "eos_token_id": TINY_TEXT["eos_token_id"],
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_TOKEN_KEYS)  # they belong to the tokenizer
    config.pass_over("vision_config", "audio_config")  # of towers that export copies
    text = config.section("text_config")
    text.require("model_type", "gemma4_text", default="gemma4_text")
    llm = tied_by_outer(config, gemma4_text_settings(text), default=True)
    text.finish()
    return FolderSettings({"llm": llm})


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    return decoder_weights(settings, "model.language_model.")


GEMMA4 = Family(
    "gemma4",
    (_ARCHITECTURE,),
    _settings,
    _weights,
    {"config.json": _TINY},
    markups={"image": None, "video": None, "audio": None},
    ignored=unused_by_llm,
    other_models=tuple(f"model.{tower}." for tower in _TOWERS),
)
