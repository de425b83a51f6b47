"""Encoders that were published by themselves: CLIP, SigLIP and Whisper, whose folders hold no LLM.

Features are those that LLaVA takes: of CLIP the patches before its last block, of SigLIP those behind its last block,
without the last norm. Text towers, decoders and heads are not read. Several families put the same vision towers before
an LLM and choose among them by the `model_type` of their config (`tower_settings`).
"""

from collections.abc import Callable, Iterator

from mmtrain.families.clip import MEAN, STD, clip_settings, clip_weights, unused_clip_weights
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.siglip import siglip_settings, siglip_weights, unused_siglip_weights
from mmtrain.families.weight_layouts import ParameterSource
from mmtrain.families.whisper import whisper_settings, whisper_weights

TOWERS = ("clip_vision_model", "siglip_vision_model")
_EVERYTHING_ELSE = ("",)  # as the suffix of names of tensors
_OF_TWO_TOWERS = (
    "text_config",
    "text_config_dict",
    "vision_config_dict",
    "logit_scale_init_value",
    "initializer_factor",
)
_OF_DECODER = (
    "apply_spec_augment", "classifier_proj_size", "decoder_attention_heads", "decoder_ffn_dim", "decoder_layerdrop",
    "decoder_layers", "forced_decoder_ids", "is_encoder_decoder", "mask_feature_length", "mask_feature_min_masks",
    "mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "max_target_positions",
    "median_filter_width", "num_hidden_layers", "tie_word_embeddings", "use_weighted_layer_sum", "vocab_size",
)  # fmt: skip
_WHISPER_DEFAULTS = {
    "encoder_layers": 4,
    "d_model": 384,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
}


def tower_settings(tower: ConfigSection, feature_layer: int, strategy: str) -> Settings:
    """Return the settings of a tower without its projector.

    strategy: which of the tokens of `hidden_states[feature_layer]` are features: all (`full`), or all but the first one
        (`default`), which is the class token.
    """
    if _is_siglip(tower):
        if strategy != "full":
            tower.reject("model_type", f"{strategy!r} features of a tower without class token; supported: 'full'")
        return siglip_settings(tower, feature_layer)
    return {**clip_settings(tower, feature_layer), "class_feature": strategy == "full"}


def tower_images(tower: ConfigSection) -> Settings:
    """Return how pictures are prepared for a tower whose folder has no processor: as for its own release."""
    if _is_siglip(tower):
        half = (0.5, 0.5, 0.5)
        special: Settings = {"fit": "stretch", "mean": half, "std": half, "partial_patches": "drop"}
    else:
        special = {"fit": "crop", "mean": MEAN, "std": STD, "partial_patches": "reject"}
    return {
        "scheme": "fixed",
        "size": tower.integer("image_size", 224),
        "resample": "bicubic",
        "decode": "full",
        **special,
    }


def tower_weights(vision: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the tower, without its projector; `model` is the prefix of its tensors."""
    yield from clip_weights(vision, model) if vision["class_token"] else siglip_weights(vision, model)


def unused_tower_weights(vision: Settings, tower: ConfigSection, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the tower that the features do not depend on."""
    num_blocks = tower.integer("num_hidden_layers", 12)
    if vision["class_token"]:
        yield from unused_clip_weights(vision, num_blocks, model)
    else:
        has_head = tower.flag("vision_use_head", True)
        yield from unused_siglip_weights(vision, num_blocks, has_head, model)


def _is_siglip(tower: ConfigSection) -> bool:
    kind = tower.value("model_type") or TOWERS[0]
    if kind not in TOWERS:
        tower.reject("model_type", f"{kind!r} is not supported yet; supported: {', '.join(TOWERS)}")
    return bool(kind == TOWERS[1])


def _vision(tower_type: str, feature_layer: int, strategy: str) -> Callable[[ConfigSection], FolderSettings]:
    def settings(config: ConfigSection) -> FolderSettings:
        config.pass_over(*_OF_TWO_TOWERS)
        has_two_towers = config.value("vision_config") is not None
        tower = config.section("vision_config") if has_two_towers else config
        tower.require("model_type", tower_type, default=tower_type)
        tower.require("dropout", 0, 0.0, default=0)
        vision = tower_settings(tower, feature_layer, strategy)
        images = tower_images(tower)
        if has_two_towers:
            tower.finish()
        return FolderSettings({"vision": vision}, {"image": images})

    return settings


def _vision_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from tower_weights(settings.model["vision"], "vision_model.")


def _whisper(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_OF_DECODER)
    audio = whisper_settings(config, _WHISPER_DEFAULTS)
    clips = {"scheme": "dynamic", "max_seconds": audio["max_frames"] / 100, "long_clips": "cut"}
    return FolderSettings({"audio": audio}, {"audio": clips})


def _whisper_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from whisper_weights(settings.model["audio"], "model.encoder.")


_TOWER_SPELLINGS = ((), (("vision_model.", ""),))
CLIP = Family(
    "clip",
    ("CLIPModel", "CLIPVisionModel"),
    _vision("clip_vision_model", -2, "default"),
    _vision_weights,
    {},
    spellings=_TOWER_SPELLINGS,
    ignored=lambda _: _EVERYTHING_ELSE,
)
SIGLIP = Family(
    "siglip",
    ("SiglipModel", "SiglipVisionModel"),
    _vision("siglip_vision_model", -1, "full"),
    _vision_weights,
    {},
    spellings=_TOWER_SPELLINGS,
    ignored=lambda _: _EVERYTHING_ELSE,
)
WHISPER = Family(
    "whisper",
    ("WhisperForConditionalGeneration", "WhisperModel"),
    _whisper,
    _whisper_weights,
    {},
    spellings=((), (("model.encoder.", "encoder."),)),
    ignored=lambda _: _EVERYTHING_ELSE,
)
