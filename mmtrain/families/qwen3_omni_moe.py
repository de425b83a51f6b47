"""Qwen3-Omni's thinker (arXiv 2509.17765): Qwen3-VL's encoder, an encoder of clips, and Qwen3 with experts.

They are computed as `Qwen3OmniMoeThinkerForConditionalGeneration` of `transformers` does. Folders of the whole model
also hold what speaks, the talker and its vocoder: they are not trained. Each clip is prepared and encoded as if it were
the only one of its call.
"""

from collections.abc import Iterator
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights, moe_settings, tied_by_outer
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
from mmtrain.families.qwen2_5_omni import QWEN2_5_OMNI
from mmtrain.families.qwen2_vl import MEDIA_SETTINGS, TOWER
from mmtrain.families.qwen3_vl import QWEN3_VL, folder_settings, tower_weights
from mmtrain.families.rotary import rotary_settings, stated_rotary
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened, respell
from mmtrain.families.whisper import QWEN_ENCODER_DEFAULTS, whisper_block_weights, whisper_settings

_DECODER_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 3584,
}
_EXPERTS = {"experts": 128, "top_k": 8, "ffn": 768}
_DEFAULT_THETA = 1e6
_DEFAULT_SECTIONS = (24, 20, 20)
_CHUNK_TOKENS = 13  # of a whole chunk, whatever its frames: so `transformers` counts
_FRAMES_PER_TOKEN = 8
_KERNEL = (3, 3)
_EARS, _EYES, _DECODER = "audio_tower.", "visual.", "model."
_OTHER_MODELS = ("talker", "code2wav")
_OF_WHOLE_MODEL = (
    "assistant_token_id", "enable_audio_output", "im_end_token_id", "im_start_token_id", "initializer_range",
    "system_token_id", "tie_word_embeddings", "tts_bos_token_id", "tts_eos_token_id", "tts_pad_token_id",
    "user_token_id", *(f"{name}_config" for name in _OTHER_MODELS),
)  # fmt: skip
# They belong to text and tokenizer. `seconds_per_chunk` says how the sound of a video is mixed with its frames.
_OF_TEXT = (
    "audio_end_token_id", "audio_start_token_id", "audio_token_id", "seconds_per_chunk", "user_token_id",
)  # fmt: skip
# Its processor passes these to that of videos. Without `fps` in a call it counts time as if one frame a second were
# taken.
_FRAMES = {"min_pixels": 128 * 32 * 32, "max_pixels": 768 * 32 * 32, "fps": 1.0}
_CLIPS: Settings = {"scheme": "dynamic", "max_seconds": 300.0, "long_clips": "reject", "item_seconds": 32.0}
_TINY_BORDERS = {  # tokens before and after the features of a medium, of which positions are counted
    "vision_start": "vision_bos_token",
    "vision_end": "vision_eos_token",
    "audio_start": "audio_bos_token",
    "audio_end": "audio_eos_token",
}
_TINY: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
    "model_type": "qwen3_omni_moe_thinker",
    **{f"{kind}_token_id": tiny_token_id(token) for kind, token in MEDIA_TOKENS.items()},
    **{f"{name}_token_id": place for place, name in enumerate(_TINY_BORDERS, len(TINY_TOKENS))},
    "position_id_per_seconds": 13,
    "text_config": {
        **tiny_decoder(
            model_type="qwen3_omni_moe_text",
            head_dim=32,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        ),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "mlp_only_layers": [2],
    },
    "vision_config": {
        "model_type": "qwen3_omni_moe_vision_encoder",
        **TINY_QWEN_TOWER,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "audio_config": {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 40,
        "n_window": 50,
        "n_window_infer": 200,
        "downsample_hidden_size": 16,
        "output_dim": 128,
    },
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    is_whole = config.value("thinker_config") is not None
    thinker = config.section("thinker_config") if is_whole else config
    config.pass_over(*_OF_WHOLE_MODEL)
    thinker.pass_over(*_OF_TEXT, "initializer_range")
    llm = _text_settings(thinker)
    seen = folder_settings(thinker, llm)
    vision = {
        **seen.model["vision"],
        "time_positions_per_second": thinker.number("position_id_per_seconds", 25),
        "patch_seconds": "stated_exactly",
    }
    audio = _audio_settings(thinker, llm["hidden"])
    if is_whole:
        thinker.finish()
    media = {**seen.data, "video": {**MEDIA_SETTINGS["video"], **_FRAMES}, "audio": _CLIPS}
    return FolderSettings({"vision": vision, "audio": audio, "llm": llm}, media)


def _text_settings(thinker: ConfigSection) -> Settings:
    text = thinker.section("text_config")
    text.require("attention_bias", False, default=False)
    text.require("use_qk_norm", True, default=True)
    text.require("shared_expert_intermediate_size", 0, None, default=0)
    text.pass_over("sliding_window", "use_sliding_window")  # its attention has no window, whatever they say
    stated = stated_rotary(text)
    stated.require("interleaved", True, default=True)
    rotary = rotary_settings(text, _DEFAULT_THETA, interleaved=True, stated=stated)
    rotary = {**rotary, "rope_sections": rotary["rope_sections"] or _DEFAULT_SECTIONS}
    llm = decoder_settings(text, _DECODER_DEFAULTS, rotary, qkv_bias=False, qk_norm=True, rope_after_media="all")
    moe = moe_settings(text, llm["layers"], _EXPERTS, normalizes=True)
    text.finish()
    return {**tied_by_outer(thinker, llm), "moe": moe}


def _audio_settings(thinker: ConfigSection, llm_hidden: int) -> Settings:
    tower = thinker.section("audio_config")
    settings = whisper_settings(tower, QWEN_ENCODER_DEFAULTS)
    tower.require("num_hidden_layers", settings["layers"], None, default=None)
    tower.require("output_dim", llm_hidden, default=3584)
    tower.pass_over("conv_chunksize")  # chunks that are convolved at once
    chunk = 2 * tower.integer("n_window", 50)
    if -(-chunk // _FRAMES_PER_TOKEN) != _CHUNK_TOKENS:
        tower.reject("n_window", f"{chunk // 2} is not supported yet; supported: 49 to 52, of which 13 tokens become")
    window_chunks = tower.integer("n_window_infer", 800) // chunk
    if window_chunks < 1:
        tower.reject("n_window_infer", f"found less than a chunk of {chunk} frames; allowed: at least that")
    settings = {
        **settings,
        "key_bias": True,
        "positions": "sinusoidal",
        "chunk": chunk,
        "conv_channels": tower.integer("downsample_hidden_size", 480),
        "window_chunks": max(window_chunks, 1),
        "clip_end": "mirrored",
        "downsample": 1,
        "pooling": "join",
        "projector": {"kind": "mlp", "ffn": settings["hidden"], "bias": True, "activation": "gelu", "norm": False},
    }
    tower.finish()
    return settings


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    num_mergers = len(settings.model["vision"]["deepstack"])
    mergers = {f"{TOWER}merger.": f"{_EYES}merger."}
    mergers |= {f"{TOWER}deepstack_merger_list.{i}.": f"{_EYES}merger_list.{i}." for i in range(num_mergers)}
    parts = {"norm.": "ln_q.", "linear_fc1.": "mlp.0.", "linear_fc2.": "mlp.2."}
    renamed = [(f"{a}{part}", f"{b}{name}") for a, b in mergers.items() for part, name in parts.items()]
    yield from respell(tower_weights(settings), (*renamed, (TOWER, _EYES)))
    yield from _audio_weights(settings.model["audio"], settings.model["llm"]["hidden"])
    yield from decoder_weights(settings, _DECODER)


def _audio_weights(audio: Settings, llm_hidden: int) -> Iterator[ParameterSource]:
    hidden, channels, layers = audio["hidden"], audio["conv_channels"], audio["layers"]
    ours = "audio.layers.0."
    for number, inputs in ((1, 1), (2, channels), (3, channels)):
        tensor = f"{_EARS}conv2d{number}."
        yield flattened(f"{ours}conv{number}.weight", f"{tensor}weight", (channels, inputs, *_KERNEL))
        yield as_is(f"{ours}conv{number}.bias", f"{tensor}bias", (channels,))
    bands = -(-audio["mel_bins"] // _FRAMES_PER_TOKEN)  # behind three convolutions that halve them
    yield as_is(f"{ours}conv_out.weight", f"{_EARS}conv_out.weight", (hidden, channels * bands))
    yield from whisper_block_weights(audio, _EARS)
    last = f"audio.layers.{layers + 1}."
    for kind, inputs in (("weight", (hidden,)), ("bias", ())):
        yield as_is(f"{last}post_norm.{kind}", f"{_EARS}ln_post.{kind}", (hidden,))
        yield as_is(f"{last}linear_1.{kind}", f"{_EARS}proj1.{kind}", (hidden, *inputs))
        yield as_is(f"{last}linear_2.{kind}", f"{_EARS}proj2.{kind}", (llm_hidden, *inputs))


QWEN3_OMNI_MOE = Family(
    "qwen3_omni_moe",
    ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": {
            **QWEN3_VL.tiny["preprocessor_config.json"],
            **TINY_EXTRACTOR,
            "processor_class": "Qwen3OmniMoeProcessor",
        },
        "tokenizer_config.json": {
            "extra_special_tokens": {token: f"<|{name}|>" for name, token in _TINY_BORDERS.items()}
        },
    },
    video_processor=_FRAMES,
    spellings=QWEN2_5_OMNI.spellings,
    video_type="Qwen2VLVideoProcessor",
    ignored=decoder_buffers,
    other_models=tuple(f"{name}." for name in _OTHER_MODELS),
)
