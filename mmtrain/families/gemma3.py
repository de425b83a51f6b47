"""Gemma 3 with pictures (arXiv 2503.19786), as `Gemma3ForConditionalGeneration` of `transformers` computes it.

SigLIP's patches behind its last norm are averaged in squares, normalized and mapped by one matrix. Tokens of one image
see each other in both directions.
"""

from collections.abc import Iterator
from math import isqrt

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_weights, tied_by_outer
from mmtrain.families.family import TINY_TOKENS, Family, FolderSettings, MediaMarkup
from mmtrain.families.gemma3_text import TINY_TEXT, gemma3_text_settings
from mmtrain.families.llava import LLAVA_SPELLINGS, llava_buffers
from mmtrain.families.siglip import TINY_SIGLIP, siglip_settings, siglip_weights, unused_siglip_weights
from mmtrain.families.weight_layouts import ParameterSource, as_is, transposed

_TOWER = "model.vision_tower."
_START, _END, _FEATURE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
_HALF = (0.5, 0.5, 0.5)
_TINY = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": len(TINY_TOKENS),
    "eoi_token_index": len(TINY_TOKENS) + 1,
    "image_token_index": len(TINY_TOKENS) + 2,
    "mm_tokens_per_image": 4,
    "eos_token_id": TINY_TEXT["eos_token_id"],
    "text_config": TINY_TEXT,
    "vision_config": TINY_SIGLIP,
    "dtype": "float32",
}
_TINY_IMAGES = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "size": {"height": 32, "width": 32},
    "do_pan_and_scan": None,
    "resample": 2,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_TINY_PROCESSOR = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
_TINY_TOKENIZER = {"extra_special_tokens": {"boi_token": _START, "eoi_token": _END, "image_token": _FEATURE}}
_TOKEN_KEYS = (
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
)


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_TOKEN_KEYS)  # they belong to the tokenizer
    text, tower = config.section("text_config"), config.section("vision_config")
    text.require("model_type", "gemma3_text", default="gemma3_text")
    tower.require("model_type", "siglip_vision_model", default="siglip_vision_model")
    llm = tied_by_outer(config, {**gemma3_text_settings(text), "image_attention": "bidirectional"}, default=True)
    encoder = siglip_settings(tower)
    vision = {
        **encoder,
        "downsample": "average_pool",
        "merge": _merge(config, encoder["max_side"]),
        "projector": {
            "kind": "linear",
            "bias": False,
            "norm": True,
            "norm_kind": "zero_centered_rms",
            "norm_eps": None,
            "ffn": None,
        },
    }
    text.finish()
    has_head = tower.flag("vision_use_head", True)
    unused = tuple(unused_siglip_weights(vision, vision["layers"], has_head, _TOWER))
    image = {
        "scheme": "fixed",
        "size": tower.integer("image_size", 224),
        "fit": "stretch",
        "resample": "bilinear",
        "decode": "full",
        "mean": _HALF,
        "std": _HALF,
        "partial_patches": "drop",
    }
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, {"image": image}, unused)


def _merge(config: ConfigSection, side: int) -> int:
    """Return the side of the squares of patches that are averaged; a picture has `side` x `side` patches."""
    num_features = config.integer("mm_tokens_per_image", 256)
    features_per_side = isqrt(num_features)
    if features_per_side**2 != num_features or side % features_per_side:
        config.reject(
            "mm_tokens_per_image",
            f"{num_features} is not supported yet; supported: squares of divisors of {side}, the patches of a side",
        )
        return 1
    return side // features_per_side


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    vision, llm = settings.model["vision"], settings.model["llm"]
    yield from siglip_weights(vision, _TOWER)
    ours, theirs = f"vision.layers.{vision['layers'] + 1}.", "model.multi_modal_projector."
    yield as_is(f"{ours}norm.weight", f"{theirs}mm_soft_emb_norm.weight", (vision["hidden"],))
    matrix = (llm["hidden"], vision["hidden"])
    yield transposed(f"{ours}linear.weight", f"{theirs}mm_input_projection_weight", matrix)
    yield from decoder_weights(settings, "model.language_model.")


GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForConditionalGeneration",),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_IMAGES,
        "processor_config.json": _TINY_PROCESSOR,
        "tokenizer_config.json": _TINY_TOKENIZER,
    },
    markups={"image": MediaMarkup(_START, _FEATURE, f"\n\n{_START}", f"{_END}\n\n"), "video": None},
    spellings=LLAVA_SPELLINGS,
    ignored=llava_buffers,
    image_processor={"do_pan_and_scan": False},  # unless a call asks for it
)
