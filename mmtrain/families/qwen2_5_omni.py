"""Qwen2.5-Omni's thinker (arXiv 2503.20215): Qwen2.5-VL's encoder, Whisper's in chunks, and Qwen2.

They are computed as `Qwen2_5OmniThinkerForConditionalGeneration` of `transformers` does. Folders of the whole model
also hold what speaks, the talker and its vocoder: they are not trained.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import (
    decoder_buffers,
    decoder_settings,
    decoder_weights,
    reject_sliding_windows,
    tied_by_outer,
)
from mmtrain.families.family import (
    MEDIA_TOKENS,
    TINY_EXTRACTOR,
    TINY_QWEN_TOWER,
    TINY_TOKENS,
    Family,
    FolderSettings,
    Settings,
    tiny_decoder,
    tiny_token_id,
)
from mmtrain.families.qwen2_5_vl import windowed_tower_settings, windowed_tower_weights
from mmtrain.families.qwen2_vl import DECODER, MEDIA_SETTINGS, TINY_IMAGES, TOWER
from mmtrain.families.weight_layouts import ParameterSource, as_is, respell
from mmtrain.families.whisper import QWEN_ENCODER_DEFAULTS, whisper_settings, whisper_weights

_DECODER_DEFAULTS = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_WITHOUT_EFFECT = ("init_std", "embed_dim")  # keys of sections of the hub's folders
_DEFAULT_SECTIONS = (16, 24, 24)
# As up to 5.17 `transformers` names modules, and as it writes tensors since: each version opens these.
_EARS, _EYES, _DECODER = "audio_tower.", "visual.", "model."
_OTHER_MODELS = ("talker", "token2wav")
_OF_WHOLE_MODEL = ("enable_audio_output", "enable_talker", *(f"{name}_config" for name in _OTHER_MODELS))
# They belong to text and tokenizer. `seconds_per_chunk` says how the sound of a video is mixed with its frames.
_OF_TEXT = (
    "audio_end_token_id", "audio_start_token_id", "audio_token_id", "audio_token_index", "ignore_index",
    "image_token_id", "image_token_index", "seconds_per_chunk", "user_token_id", "video_token_id",
    "video_token_index", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
)  # fmt: skip
_MEDIA: Mapping[str, Settings] = {
    **MEDIA_SETTINGS,
    "audio": {"scheme": "dynamic", "max_seconds": 300.0, "long_clips": "cut", "item_seconds": 30.0},
}
# What its processor passes to that of videos, and the frames a second by which it counts time.
_FRAMES = {"min_pixels": 28 * 28 * 128, "max_pixels": 28 * 28 * 768, "fps": 2.0}
_TINY_BORDERS = {  # tokens before and after the features of a medium, of which positions are counted
    f"{sense}_{end}_token": f"<|{sense}_{end}|>" for sense in ("vision", "audio") for end in ("bos", "eos")
}


def _tiny_border(name: str) -> int:
    return len(TINY_TOKENS) + list(_TINY_BORDERS).index(name)


_TINY: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
    "model_type": "qwen2_5_omni_thinker",
    "image_token_index": tiny_token_id(MEDIA_TOKENS["image"]),
    "video_token_index": tiny_token_id(MEDIA_TOKENS["video"]),
    "audio_token_index": tiny_token_id(MEDIA_TOKENS["audio"]),
    "vision_start_token_id": _tiny_border("vision_bos_token"),
    "audio_start_token_id": _tiny_border("audio_bos_token"),
    "audio_end_token_id": _tiny_border("audio_eos_token"),
    "position_id_per_seconds": 25,
    "text_config": tiny_decoder(
        model_type="qwen2_5_omni_text",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    ),
    "vision_config": {
        "model_type": "qwen2_5_omni_vision_encoder",
        **TINY_QWEN_TOWER,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    },
    "audio_config": {
        "model_type": "qwen2_5_omni_audio_encoder",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 40,
        "max_source_positions": 200,
        "n_window": 20,
        "output_dim": 128,
    },
    "dtype": "float32",
}
_TINY_PROCESSORS = {**TINY_IMAGES, **TINY_EXTRACTOR, "processor_class": "Qwen2_5OmniProcessor"}


def _settings(config: ConfigSection) -> FolderSettings:
    is_whole = config.value("thinker_config") is not None
    thinker = config.section("thinker_config") if is_whole else config
    config.pass_over(*_OF_WHOLE_MODEL)
    if is_whole:
        config.value("tie_word_embeddings")  # the head belongs to the thinker
    thinker.pass_over(*_OF_TEXT, *_WITHOUT_EFFECT)
    llm = _text_settings(thinker)
    vision = _vision_settings(thinker, llm["hidden"])
    audio = _audio_settings(thinker, llm["hidden"])
    if is_whole:
        thinker.finish()
    unused = as_is("audio.borders", f"{_EARS}audio_bos_eos_token.weight", (2, llm["hidden"]))
    return FolderSettings({"vision": vision, "audio": audio, "llm": llm}, _MEDIA, (unused,))


def _text_settings(thinker: ConfigSection) -> Settings:
    text = _section(thinker, "text_config")
    reject_sliding_windows(text)
    llm = decoder_settings(text, _DECODER_DEFAULTS, qkv_bias=True)
    text.finish()
    sections = llm["rope_sections"] or _DEFAULT_SECTIONS
    return tied_by_outer(thinker, {**llm, "rope_sections": sections, "rope_after_media": "all"})


def _vision_settings(thinker: ConfigSection, llm_hidden: int) -> Settings:
    tower = _section(thinker, "vision_config")
    settings = windowed_tower_settings(tower, llm_hidden)
    tower.value("tokens_per_second")  # `position_id_per_seconds` holds
    tower.finish()
    per_second = thinker.number("position_id_per_seconds", 25)
    return {**settings, "time_positions_per_second": per_second, "patch_seconds": "stated"}


def _audio_settings(thinker: ConfigSection, llm_hidden: int) -> Settings:
    tower = _section(thinker, "audio_config")
    settings = whisper_settings(tower, QWEN_ENCODER_DEFAULTS)
    tower.require("num_hidden_layers", settings["layers"], None, default=None)
    tower.require("output_dim", llm_hidden, default=3584)
    chunk = 2 * tower.integer("n_window", 100)
    tower.finish()
    return {
        **settings,
        "positions": "sinusoidal",
        "chunk": chunk,
        "clip_end": "unpadded",
        "downsample": 2,
        "pooling": "mean",
        "projector": {"kind": "linear", "activation": "gelu", "norm": False, "ffn": None},
    }


def _section(thinker: ConfigSection, key: str) -> ConfigSection:
    section = thinker.section(key)
    for without_effect in _WITHOUT_EFFECT:
        section.value(without_effect)
    return section


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    audio, llm = settings.model["audio"], settings.model["llm"]
    yield from respell(windowed_tower_weights(settings, joint_projections=False), ((TOWER, _EYES),))
    yield from whisper_weights(audio, _EARS, last_norm="ln_post")
    ours = f"audio.layers.{audio['layers'] + 1}.linear."
    for kind, shape in (("weight", (llm["hidden"], audio["hidden"])), ("bias", (llm["hidden"],))):
        yield as_is(f"{ours}{kind}", f"{_EARS}proj.{kind}", shape)
    yield from decoder_weights(settings, _DECODER)


_NESTED = ((_EARS, "model.audio_tower."), (_EYES, TOWER), (_DECODER, DECODER))  # modules of later versions
QWEN2_5_OMNI = Family(
    "qwen2_5_omni",
    (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniModel",  # as the hub's folders call the whole model
    ),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_PROCESSORS,
        "tokenizer_config.json": {"extra_special_tokens": _TINY_BORDERS},
    },
    video_processor=_FRAMES,
    spellings=(
        tuple((prefix, f"thinker.{prefix}") for prefix in (_EARS, _EYES, _DECODER, "lm_head.")),
        tuple((ours, f"thinker.{theirs}") for ours, theirs in (*_NESTED, ("lm_head.", "lm_head."))),
        (),
        _NESTED,
    ),
    video_type="Qwen2VLVideoProcessor",
    ignored=decoder_buffers,
    other_models=tuple(f"{name}." for name in _OTHER_MODELS),
)
