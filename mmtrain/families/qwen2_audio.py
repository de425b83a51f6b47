"""Qwen2-Audio (arXiv 2407.10759): Whisper's encoder, one linear and Qwen2.

They are computed as `Qwen2AudioForConditionalGeneration` of `transformers` does: as if every clip were padded with
silence to 30 s, but without tokens for that.
"""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, never_tied
from mmtrain.families.family import (
    MEDIA_TOKENS,
    TINY_EXTRACTOR,
    Family,
    FolderSettings,
    PrefixChange,
    tiny_decoder,
    tiny_token_id,
)
from mmtrain.families.text_decoders import qwen2_settings
from mmtrain.families.weight_layouts import ParameterSource, as_is
from mmtrain.families.whisper import QWEN_ENCODER_DEFAULTS, whisper_settings, whisper_weights

_TOWER = "model.audio_tower."
_DECODER = "model.language_model."
_INSIDE: tuple[PrefixChange, ...] = (
    (_TOWER, "audio_tower."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
_PROJECTOR = "model.multi_modal_projector.linear."
_TINY = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": tiny_token_id(MEDIA_TOKENS["audio"]),
    "text_config": tiny_decoder(model_type="qwen2"),
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 40,
        "max_source_positions": 200,
    },
    "dtype": "float32",
}
_TINY_CLIPS = {**TINY_EXTRACTOR, "processor_class": "Qwen2AudioProcessor"}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over("audio_token_id", "audio_token_index", "ignore_index", "vocab_size")  # they belong to the text
    text, tower = config.section("text_config"), config.section("audio_config")
    text.require("model_type", "qwen2", default="qwen2")
    tower.require("model_type", "qwen2_audio_encoder", default="qwen2_audio_encoder")
    llm = never_tied(config, qwen2_settings(text))
    audio = {
        **whisper_settings(tower, QWEN_ENCODER_DEFAULTS),
        "clip_end": "silence",
        "downsample": 2,
        "pooling": "mean",
        "projector": {"kind": "linear", "bias": True, "activation": "gelu", "norm": False, "ffn": None},
    }
    text.finish()
    tower.finish()
    clips = {"scheme": "dynamic", "max_seconds": audio["max_frames"] / 100, "long_clips": "cut"}
    return FolderSettings({"audio": audio, "llm": llm}, {"audio": clips})


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    audio, llm = settings.model["audio"], settings.model["llm"]
    yield from whisper_weights(audio, _TOWER)
    ours = f"audio.layers.{audio['layers'] + 1}.linear."
    for kind, shape in (("weight", (llm["hidden"], audio["hidden"])), ("bias", (llm["hidden"],))):
        yield as_is(f"{ours}{kind}", f"{_PROJECTOR}{kind}", shape)
    yield from decoder_weights(settings, _DECODER)


QWEN2_AUDIO = Family(
    "qwen2_audio",
    ("Qwen2AudioForConditionalGeneration",),
    _settings,
    _weights,
    {"config.json": _TINY, "preprocessor_config.json": _TINY_CLIPS},
    spellings=(
        (*_INSIDE, (_DECODER, "language_model.model.")),  # folders of the hub, and those that transformers 5 writes
        (*_INSIDE, (_DECODER, "language_model.model.model.")),  # so wrote 5.10 to 5.23
        ((_DECODER, f"{_DECODER}model."),),  # likewise
        (),
    ),
    ignored=decoder_buffers,
)
