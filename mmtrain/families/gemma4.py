"""Gemma 4 with pictures, as `Gemma4ForConditionalGeneration` of `transformers` computes it.

In sizes with `use_bidirectional_attention` tokens of one picture see each other in both directions, in blocks with a
window. Towers that are not built, for clips and in the small sizes for pictures, are left alone: export copies them.
"""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_weights, tied_by_outer
from mmtrain.families.family import (
    MEDIA_TOKENS,
    TINY_TOKENS,
    Family,
    FolderSettings,
    MediaMarkup,
    Settings,
    tiny_token_id,
)
from mmtrain.families.gemma4_text import TINY_TEXT, gemma4_text_settings, unused_by_llm
from mmtrain.families.gemma4_vision import (
    TINY_TOWER,
    VISION_PREFIXES,
    gemma4_vision_settings,
    gemma4_vision_weights,
)
from mmtrain.families.weight_layouts import ParameterSource

_ARCHITECTURE = "Gemma4ForConditionalGeneration"
_AUDIO_PREFIXES = ("model.audio_tower.", "model.embed_audio.")
_TOKEN_KEYS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
    *("boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id"),
)
_START, _IMAGE, _END = "<|image>", "<|image|>", "<image|>"
_HALF = (0.5, 0.5, 0.5)
_TOKENS_PER_PICTURE = 280  # at most, where no processor says otherwise
_TINY = {
    "architectures": [_ARCHITECTURE],
    "model_type": "gemma4",
    "text_config": {
        **TINY_TEXT,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": TINY_TOWER,
    "audio_config": None,
    "boi_token_id": len(TINY_TOKENS),
    "image_token_id": len(TINY_TOKENS) + 1,
    "eoi_token_id": len(TINY_TOKENS) + 2,
    **{f"{kind}_token_id": tiny_token_id(MEDIA_TOKENS[kind]) for kind in ("video", "audio")},
    "eos_token_id": TINY_TEXT["eos_token_id"],
    "dtype": "float32",
}
_TINY_IMAGES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "processor_class": "Gemma4Processor",
    "patch_size": TINY_TOWER["patch_size"],
    "pooling_kernel_size": TINY_TOWER["pooling_kernel_size"],
    "max_soft_tokens": 70,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "resample": 3,
}
_TINY_TOKENIZER = {
    "extra_special_tokens": {
        "boi_token": _START,
        "image_token": _IMAGE,
        "eoi_token": _END,
        "boa_token": "<|audio>",  # which the processor asks for, whatever is given to it
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    }
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_TOKEN_KEYS)  # they belong to the tokenizer
    config.pass_over("vision_soft_tokens_per_image")  # it belongs to the processor
    not_built = {"audio": "audio_config: its tower is not supported yet"} if config.section("audio_config") else {}
    text, tower = config.section("text_config"), config.section("vision_config")
    text.require("model_type", "gemma4_text", default="gemma4_text")
    llm = tied_by_outer(config, gemma4_text_settings(text), default=True)
    text.finish()
    problem = _tower_problem(tower, llm)
    if not tower or problem is not None:
        not_built |= {} if problem is None else {"vision": problem}
        return FolderSettings({"llm": llm}, not_built=not_built)
    vision = gemma4_vision_settings(tower)
    image: Settings = {
        "scheme": "native",
        "pixel_limits": "area",
        "min_pixels": 1,
        "max_pixels": _TOKENS_PER_PICTURE * (vision["patch"] * vision["merge"]) ** 2,
        "resample": "bicubic",
        "decode": "full",
        "mean": _HALF,
        "std": _HALF,
    }
    return FolderSettings({"vision": vision, "llm": llm}, {"image": image}, not_built=not_built)


def _tower_problem(tower: ConfigSection, llm: Settings) -> str | None:
    """Say which key of a small size keeps its vision tower from being built; None if there is none."""
    if tower.value("use_clipped_linears") is True:
        return "vision_config.use_clipped_linears: true is not supported yet; supported: false"
    if tower and llm["per_layer_embeddings"] is not None:
        return "text_config.hidden_size_per_layer_input: inputs of blocks beside pictures are not supported yet"
    return None


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    if "vision" in settings.model:
        yield from gemma4_vision_weights(settings.model["vision"], settings.model["llm"]["hidden"])
    yield from decoder_weights(settings, "model.language_model.")


def _other_towers(settings: FolderSettings) -> tuple[str, ...]:
    """Return the prefixes of the tensors of towers that are not built."""
    return _AUDIO_PREFIXES if "vision" in settings.model else (*VISION_PREFIXES, *_AUDIO_PREFIXES)


GEMMA4 = Family(
    "gemma4",
    (_ARCHITECTURE,),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_IMAGES,
        "processor_config.json": {"processor_class": "Gemma4Processor"},
        "tokenizer_config.json": _TINY_TOKENIZER,
    },
    markups={"image": MediaMarkup(_IMAGE, _IMAGE, _START, _END), "video": None, "audio": None},
    ignored=unused_by_llm,
    other_blocks=_other_towers,
)
