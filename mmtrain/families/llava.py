"""LLaVA-1.5 (arXiv 2310.03744): a vision tower, a projector and a decoder.

They are computed as `LlavaForConditionalGeneration` of `transformers` does.
"""

from collections.abc import Iterator
from dataclasses import replace

from mmtrain.families.clip import MEAN, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, tied_by_either
from mmtrain.families.encoders import tower_images, tower_settings, tower_weights, unused_tower_weights
from mmtrain.families.family import (
    MEDIA_TOKENS,
    Family,
    FolderSettings,
    PrefixChange,
    Settings,
    tiny_decoder,
    tiny_token_id,
)
from mmtrain.families.llava_files import LLAVA_WRITER
from mmtrain.families.text_decoders import text_settings
from mmtrain.families.weight_layouts import ParameterSource, as_is

_TOWER = "model.vision_tower."
NEWLINE = "model.image_newline"  # of the families that join tiles
TINY_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": tiny_token_id(MEDIA_TOKENS["image"]),
    "image_seq_length": 16,
    "text_config": tiny_decoder(model_type="llama"),
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "dtype": "float32",
}
TINY_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": MEAN,
    "image_std": STD,
}
TINY_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": MEDIA_TOKENS["image"],
}
NO_NORM: Settings = {"norm": False, "norm_kind": None, "norm_eps": None}  # of a projector
_WITHOUT_EFFECT_HERE = ("image_seq_length", "image_token_id", "image_token_index", "ignore_index", "vocab_size")


def llava_settings(
    config: ConfigSection, text_type: str = "llama", feature_layer: int = -2, strategy: str = "default"
) -> FolderSettings:
    """Return the settings of a LLaVA, and how pictures are prepared whose folder has no processor.

    text_type, feature_layer, strategy: what the family assumes of the LLM and the features if the config does not say.
    """
    config.pass_over(*_WITHOUT_EFFECT_HERE)  # they belong to text and tokenizer
    strategy = config.choice("vision_feature_select_strategy", {"default": "default", "full": "full"}, strategy)
    config.require("multimodal_projector_bias", True, default=True)
    feature_layer = _feature_layer(config, feature_layer)
    text, tower = config.section("text_config"), config.section("vision_config")
    if not tower:
        config.reject("vision_config", "missing; allowed: the section of a CLIP or SigLIP tower")
    llm = tied_by_either(config, text_settings(text, text_type))
    activation = config.choice("projector_hidden_act", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}, "gelu")
    vision = {
        **tower_settings(tower, feature_layer, strategy),
        "projector": {"kind": "mlp", "bias": True, "activation": activation, "ffn": None, **NO_NORM},
    }
    text.finish()
    unused = tuple(unused_tower_weights(vision, tower, _TOWER))
    image = tower_images(tower)
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, {"image": image}, unused)


def _feature_layer(config: ConfigSection, default: int) -> int:
    value = config.value("vision_feature_layer")
    if value is None:
        return default
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) is int:
        return value
    config.reject("vision_feature_layer", f"{value} is not supported yet; supported: one whole number")
    return default


def llava_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    """Yield the weights of a LLaVA, with those of a projector of two linears."""
    vision, llm = settings.model["vision"], settings.model["llm"]
    yield from tower_weights(vision, _TOWER)
    ours, theirs = f"vision.layers.{vision['layers'] + 1}.", "model.multi_modal_projector."
    for linear, width in (("linear_1", vision["hidden"]), ("linear_2", llm["hidden"])):
        for kind, shape in (("weight", (llm["hidden"], width)), ("bias", (llm["hidden"],))):
            source = as_is(f"{ours}{linear}.{kind}", f"{theirs}{linear}.{kind}", shape)
            yield replace(source, may_be_missing=True)  # before alignment there is no projector
    yield from decoder_weights(settings, "model.language_model.")


def llava_buffers(settings: FolderSettings) -> tuple[str, ...]:
    """Return the suffixes of tensors that hold nothing to keep."""
    return (*decoder_buffers(settings), ".embeddings.position_ids")


_INSIDE: tuple[PrefixChange, ...] = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    (NEWLINE, "image_newline"),
)
LLAVA_SPELLINGS: tuple[tuple[PrefixChange, ...], ...] = (
    ((_TOWER, "vision_tower.vision_model."), *_INSIDE),  # folders of transformers 4, and those of the hub
    ((_TOWER, "vision_tower."), *_INSIDE),  # what transformers 5 writes
    ((_TOWER, "model.vision_tower.vision_model."),),  # as later versions of 4 name modules
    (),
)
LLAVA = Family(
    "llava",
    ("LlavaForConditionalGeneration",),
    llava_settings,
    llava_weights,
    {"config.json": TINY_LLAVA, "preprocessor_config.json": TINY_IMAGES, "processor_config.json": TINY_PROCESSOR},
    spellings=LLAVA_SPELLINGS,
    ignored=llava_buffers,
    writer=LLAVA_WRITER,
)
